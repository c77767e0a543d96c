"""Policy files: what is read, and how a broken one is refused."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import policy.file.format
from backends.tree import CandidateTree
from policy.alerts import AlertRule, Receiver
from policy.config.problems import PolicyError
from policy.diff import differences
from policy.file.format import default_policy, json_schema, parse_policy
from policy.file.reach import unreachable
from policy.spec import (
    BUILT_IN_CLASSES,
    Bounds,
    FallbackSettings,
    PolicySpec,
    RequestFacts,
    Settings,
    TemperatureLimits,
)
from tests.support.paths import DATA

DATA = DATA / "policies"
BROKEN = sorted((DATA / "broken").glob("*.yaml"))
EXPECT = re.compile(r"^# expect (\d+) \| (.*?) \| (.*)$", re.MULTILINE)
FULL = (DATA / "full.yaml").read_bytes()


def parse(text: str | bytes) -> PolicySpec:
    return parse_policy(text.encode() if isinstance(text, str) else text, "policy.yaml")


def test_there_are_many_broken_files() -> None:
    assert len(BROKEN) >= 50


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_broken_file(path: Path) -> None:
    """Each names, in comments, the line, path and part of the message of what it must be refused for."""
    content = path.read_bytes()
    expected = EXPECT.findall(content.decode("latin-1"))
    assert expected or path.stem == "empty"
    with pytest.raises(PolicyError) as caught:
        parse_policy(content, str(path))
    problems = caught.value.problems
    for line, at, fragment in expected:
        assert any(
            each.line == int(line) and each.path.startswith(at) and fragment in each.message for each in problems
        ), f"expected {line} {at} {fragment!r} among {problems}"
    named = {line for line, _, _ in expected}
    assert {str(each.line) for each in problems} <= named, f"complaints about lines that are in order: {problems}"
    for told in caught.value.lines():
        assert re.match(rf"{re.escape(str(path))}:\d+: \S", told)


def test_everything_that_can_be_said() -> None:
    spec = parse(FULL)
    assert re.fullmatch(r"1-[0-9a-f]{12}", spec.version)
    assert spec.settings[None, -1] == Settings(
        heads=Bounds(1, 4),
        nodes=Bounds(0, 32),
        depth=4,
        temperature=TemperatureLimits(0.7, 0, 1.2),
        deadline_s=60.0,
        control=0.02,
        fallback=FallbackSettings(1.05, 5.0, 20.0, 0.05),
    )
    code = spec.of_class("code")
    assert (code.nodes, code.temperature) == (Bounds(0, 48), TemperatureLimits(0.2, 0, 1.2))
    assert spec.of_class("creative").fallback == FallbackSettings(1.05, 5.0, 20.0, 0.1)
    assert [rule.name for rule in spec.rules] == ["guests", "busy", "long-code", "greedy"]
    assert spec.settings["sql", 2].tree == CandidateTree.from_branching([3, 2, 1])
    assert spec.settings["code", 3].tree == CandidateTree(((0,), (1,), (0, 0)))
    assert spec.alerts == (
        AlertRule(
            "slow",
            "speculative_speedup_factor",
            below=1.0,
            for_s=60.0,
            severity="critical",
            classes=("code",),
            notify=("ops",),
        ),
        AlertRule(
            "second-head",
            "medusa_head_accuracy",
            below=0.2,
            keep_s=120.0,
            models=("smollm2-*",),
            head=2,
            actions=("fall_back", "log"),
            summary="Heads don't fit the model: see the runbook.",
        ),
    )
    assert spec.receivers == {
        "ops": Receiver("ops", "alertmanager", "http://127.0.0.1:9093", repeat_s=60.0),
        "chat": Receiver("chat", "webhook", None, "CHAT_WEBHOOK", "CHAT_TOKEN", repeat_s=3600.0, timeout_s=5.0),
    }


@pytest.mark.parametrize(
    ("facts", "rule"),
    [
        ({}, "default"),
        ({"class_name": "code"}, "classes.code"),
        ({"tenant": "guest-7", "load": 9.0}, "guests"),
        ({"tenant": "a-guest-7"}, "default"),
        ({"load": 2.0, "class_name": "code"}, "busy"),
        ({"class_name": "sql", "model": "smollm2-x", "prompt_tokens": 1000, "turn": "later"}, "long-code"),
        ({"class_name": "sql", "model": "mistral", "prompt_tokens": 1000, "turn": "later"}, "classes.sql"),
        ({"class_name": "sql", "model": "other", "prompt_tokens": 999, "turn": "later"}, "classes.sql"),
        ({"class_name": "chat", "model": "other", "prompt_tokens": 1000, "turn": "later"}, "default"),
        ({"temperature": 0.0}, "greedy"),
    ],
)
def test_the_first_rule_that_matches(facts: dict[str, Any], rule: str) -> None:
    spec = parse(FULL)
    made = RequestFacts(**({"request_id": "r", "model": "m"} | facts))
    index, _ = spec.select(made)
    assert spec.rule_name(index, made.class_name) == rule


def test_the_version_is_that_of_the_content() -> None:
    assert parse("version: 1\n").version == parse("version: 1\n").version
    assert parse("version: 1\n").version != parse("version: 1\n\n").version


def test_a_shorthand_and_shared_nodes() -> None:
    spec = parse("version: 1\nclasses:\n  code: &all {heads: 3}\n  chat: *all\n")
    assert spec.of_class("chat").heads == Bounds(1, 3)


def test_the_schema_takes_what_the_reader_takes() -> None:
    """Of two readers of one format, neither may be stricter in what a schema can say."""
    schema = json_schema()
    jsonschema_rs.meta.validate(schema)
    validator = jsonschema_rs.validator_for(schema)
    for content in (FULL, default_policy(), b"version: 1\n"):
        parse(content)
        validator.validate(yaml.safe_load(content))
    beyond_a_schema = 0
    for path in BROKEN:
        try:
            value = json.loads(json.dumps(yaml.safe_load(path.read_bytes())))
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError, RecursionError):
            continue
        beyond_a_schema += validator.is_valid(value)
    assert beyond_a_schema <= 21, "rules between fields only"


KEYS = ["min", "max", "name", "use", "when", "class", "heads", "nodes", "tree", "temperature", "fallback", "code"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 400) | st.floats(-2, 3) | st.sampled_from(["5s", "2%", "auto", "4x2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        st.sampled_from(["defaults", "classes", "rules", "alerts", "receivers", "extra"]),
        VALUES | st.dictionaries(st.sampled_from(KEYS), VALUES),
    )
)
def test_anything_is_read_or_refused(value: dict[str, Any]) -> None:
    content = yaml.safe_dump({"version": 1} | value).encode()
    try:
        parse(content)
    except PolicyError as error:
        lines = content.count(b"\n")
        assert error.problems
        assert all(1 <= each.line <= lines + 1 and each.message for each in error.problems)


@settings(max_examples=200)
@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with contextlib.suppress(PolicyError):
        parse(content)


# What a file costs: counted, not timed.


def merges(monkeypatch: pytest.MonkeyPatch, text: str) -> tuple[int, str]:
    """How often settings were merged for a file, and what it was refused for."""
    count, merge = 0, policy.file.format._merged

    def counting(*args: Any) -> Settings:
        nonlocal count
        count += 1
        return merge(*args)

    with monkeypatch.context() as patched:
        patched.setattr(policy.file.format, "_merged", counting)
        try:
            parse(text)
        except PolicyError as error:
            return count, str(error)
    return count, ""


def many(
    classes: int, rules: int, of_class: str = "{{}}", use: str = "{{}}", when: str = "load: {{min: {down}}}"
) -> str:
    lines = ["version: 1", "classes:", *(f"  c{n}: {of_class.format(n=n)}" for n in range(classes)), "rules:"]
    for n in range(rules):
        condition = when.format(n=n, down=rules - n)
        lines.append(f"  - {{name: r{n}, when: {{{condition}}}, use: {use.format(n=n, up=n % 200 + 1)}}}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "- [", "[{a: "])
def test_depth_is_refused_while_it_is_scanned(monkeypatch: pytest.MonkeyPatch, opening: str) -> None:
    """Scanning costs the square of the depth: 5,000 brackets took seconds."""
    scanned = 0
    fetch = yaml.scanner.Scanner.fetch_more_tokens

    def counting(self: Any) -> Any:
        nonlocal scanned
        scanned += 1
        return fetch(self)

    monkeypatch.setattr(yaml.scanner.Scanner, "fetch_more_tokens", counting)
    with pytest.raises(PolicyError, match="is nested more than 24 deep"):
        parse(f"version: 1\ndefaults:\n  {opening * 5000}\n")
    assert scanned < 200


def test_block_depth_is_refused_too() -> None:
    text = "version: 1\n" + "".join(f"{'  ' * level}a:\n" for level in range(400))
    with pytest.raises(PolicyError, match="is nested more than 24 deep"):
        parse(text)


def test_classes_and_rules_that_are_alike_are_merged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert merges(monkeypatch, many(6000, 1)) == (2, "")
    assert merges(monkeypatch, many(400, 400)) == (2, "")
    assert merges(monkeypatch, many(1000, 1000)) == (2, "")
    tenants = many(64, 1000, "{{nodes: {n}}}", "{{nodes: {up}}}", "tenant: t{n}")
    assert merges(monkeypatch, tenants) == (65 * 201, "")


def test_too_many_that_differ_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    count, told = merges(monkeypatch, many(200, 200, "{{deadline: {n}.5s}}", "{{nodes: {up}}}"))
    assert count == 0
    assert "make 40200 combinations of settings; a policy may have 20000" in told


def test_every_class_and_rule_has_its_settings_and_its_complaint() -> None:
    spec = parse(many(3, 4, "{{nodes: {n}}}", "{{heads: {up}}}", "class: [c0, c1], load: {{min: {down}}}"))
    found = {key: (value.nodes.high, value.heads.high) for key, value in spec.settings.items()}
    expected = {(f"c{n}", -1): (n, 16) for n in range(3)} | {(f"c{n}", r): (n, r + 1) for n in (0, 1) for r in range(4)}
    expected |= {(None, -1): (32, 16)} | {(None, r): (32, r + 1) for r in range(4)}
    assert found == expected
    assert len(spec.settings) == len(expected)
    with pytest.raises(KeyError):
        spec.settings["c2", 0]
    with pytest.raises(PolicyError) as caught:
        parse("version: 1\nclasses:\n  a: {heads: 2, tree: 2x2x1}\n  b: {heads: 2, tree: 2x2x1}\n")
    assert [each.path for each in caught.value.problems] == ["classes.a.tree", "classes.b.tree"]


def test_what_is_told_has_an_end() -> None:
    with pytest.raises(PolicyError) as caught:
        parse(many(500, 500, when="class: nobody{n}"))
    assert len(caught.value.problems) == 200
    assert all(len(each.message) < 2000 for each in caught.value.problems)


def test_aliases_of_long_lists_are_counted() -> None:
    names = ", ".join(f"c{n}" for n in range(1000))
    text = many(1000, 300, when="class: *all, load: {{min: {down}}}").replace("*all", f"&all [{names}]", 1)
    with pytest.raises(PolicyError, match="unfold without end"):
        parse(text)


def test_a_diff_of_many_classes_looks_at_each_kind_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = parse(many(300, 300)), parse(many(300, 300, use="{{nodes: 5}}"))
    asked = 0
    look = type(before.settings).__getitem__

    def counting(self: Any, key: Any) -> Settings:
        nonlocal asked
        asked += 1
        return look(self, key)

    monkeypatch.setattr(type(before.settings), "__getitem__", counting)
    lines = differences(before, after)
    assert lines == [f"rules.r{n}.use.nodes.high: 32 -> 5" for n in range(300)]
    assert asked < 20 * 300


# Rules that no request comes to.

REACH = st.fixed_dictionaries(
    {},
    optional={
        "class": st.lists(st.sampled_from(["code", "chat", "creative", "unclassified"]), min_size=1, max_size=4),
        "tenant": st.lists(st.sampled_from(["*", "g*", "guest-*", "g*t", "guest", "a"]), min_size=1, max_size=2),
        "model": st.lists(st.sampled_from(["m", "m*", "*m"]), min_size=1, max_size=2),
        "turn": st.sampled_from(["first", "later"]),
        "load": st.sampled_from([{"min": 0}, {"min": 1}, {"max": 1}, {"min": 1, "max": 2}]),
        "prompt_tokens": st.sampled_from([{"min": 1}, {"max": 5}]),
        "temperature": st.sampled_from([{"max": 2}, {"min": 0, "max": 1}, {"min": 1}]),
    },
)


@settings(max_examples=200)
@given(st.lists(REACH, min_size=2, max_size=5), st.data())
def test_no_request_comes_to_a_rule_that_is_said_to_be_dead(rules: list[dict[str, Any]], data: Any) -> None:
    given = [{name: tuple(v) if isinstance(v, list) else v for name, v in when.items()} for when in rules]
    conditions = [policy.file.format._conditions(when) for when in given]
    for below, above in unreachable(given, BUILT_IN_CLASSES):
        assert above < below
        facts = RequestFacts(
            "r",
            data.draw(st.sampled_from(["m", "mm", "am", "x"])),
            data.draw(st.sampled_from(BUILT_IN_CLASSES)),
            tenant=data.draw(st.sampled_from(["guest", "guest-1", "gt", "a", "", "z"])),
            turn=data.draw(st.sampled_from(["first", "later"])),
            prompt_tokens=data.draw(st.integers(0, 7)),
            temperature=data.draw(st.sampled_from([None, 0.0, 0.5, 1.0, 2.0])),
            load=data.draw(st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0])),
        )
        assert not conditions[below].hold(facts) or conditions[above].hold(facts)


@pytest.mark.parametrize(
    ("above", "below", "dead"),
    [
        ("{}", "{class: code}", True),
        ("{class: code}", "{class: code, load: {min: 1}}", True),
        ("{tenant: 'g*'}", "{tenant: 'guest-*'}", True),
        ("{tenant: 'guest-*'}", "{tenant: 'g*'}", False),
        ("{tenant: 'g*'}", "{tenant: [guest, gast]}", True),
        ("{tenant: 'g*'}", "{tenant: [guest, anna]}", False),
        ("{tenant: '*'}", "{turn: later}", True),
        ("{class: [code, chat]}", "{class: code, tenant: a}", True),
        ("{class: code}", "{class: [code, chat]}", False),
        ("{class: [code, chat, creative, unclassified]}", "{turn: later}", True),
        ("{load: {max: 2}}", "{load: {min: 1, max: 2}}", True),
        ("{load: {max: 2}}", "{load: {min: 1}}", False),
        ("{load: {min: 0}}", "{class: code}", True),
        ("{temperature: {min: 0, max: 2}}", "{class: code}", True),
        ("{turn: first}", "{turn: first, model: 'x*'}", True),
        ("{turn: first, model: x}", "{turn: first}", False),
    ],
)
def test_a_rule_below_one_that_takes_all_of_its_requests(above: str, below: str, dead: bool) -> None:
    text = f"version: 1\nrules:\n  - {{name: a, when: {above}, use: {{}}}}\n  - {{name: b, when: {below}, use: {{}}}}\n"
    if not dead:
        parse(text)
        return
    with pytest.raises(PolicyError, match=r"4: rules\[1\]: can't be reached: rule 'a' above takes every request"):
        parse(text)


# Numbers and durations as YAML 1.1 has them.

TRAPS = ["010", "0600", "1:30", "1:30.5", "0x10", "0b11", "1_000", "1_0.5", "-010", "00"]


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize(
    "field",
    [
        "defaults: {nodes: TRAP}",
        "defaults: {deadline: TRAP}",
        "defaults: {control: TRAP}",
        "defaults: {temperature: {max: TRAP}}",
        "defaults: {tree: TRAP}",
        "defaults: {tree: [[TRAP]]}",
        "rules: [{name: a, when: {load: {min: TRAP}}, use: {}}]",
        "alerts: [{name: slow, metric: speculative_speedup_factor, below: TRAP}]",
        "alerts: [{name: slow, metric: speculative_speedup_factor, below: 1, for: TRAP}]",
    ],
)
def test_numbers_are_written_in_decimal(field: str, trap: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(f"version: 1\n{field.replace('TRAP', trap)}\n")
    [problem] = caught.value.problems
    assert f"not {trap}, which YAML reads as" in problem.message
    assert "write it in decimal" in problem.message


@pytest.mark.parametrize("number", ["9" * 400, "0x" + "f" * 400, "-" + "9" * 400, "9" * 5000, "1" + ":59" * 300])
@pytest.mark.parametrize("field", ["nodes: N", "deadline: N", "control: N", "tree: N", "temperature: {max: N}"])
def test_a_number_beyond_all_floats_is_refused(field: str, number: str) -> None:
    with pytest.raises(PolicyError, match=r"as large|can't read"):
        parse(f"version: 1\ndefaults: {{{field.replace('N', number)}}}\n")


@pytest.mark.parametrize("number", ["0", "7", "0.5", ".5", "1.", "1.5e+0"])
def test_decimal_numbers_are_read(number: str) -> None:
    parse(f"version: 1\ndefaults: {{temperature: {{max: {number.replace('7', '2')}}}}}\n")


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("defaults: {deadline: 1h30m}", "not '1h30m'; only one unit goes: write 5400s"),
        ("defaults: {deadline: 1m 30s}", "write 90s"),
        ("defaults: {deadline: 5min}", "the units are ms, s, m, h"),
        ("defaults: {nodes: {{ .Values.nodes }}}", "looks like a template that was not rendered"),
        ("defaults: {deadline: {{ .Values.deadline }}}", "looks like a template that was not rendered"),
        ("defaults: {{ .Values.defaults }}", "looks like a template that was not rendered"),
        ("defaults: {nodes: '{{ nodes }}'}", "looks like a template that was not rendered"),
        ("defaults:\n  nodes: ${NODES}", "looks like a template that was not rendered"),
        ("defaults: {method: '{{ method }}'}", "looks like a template that was not rendered"),
        ("alerts: [{name: slow, metric: speculative_speedup_factor, above: yes}]", "expected a number"),
        ("alerts: [{name: slow, metric: speculative_speedup_factor, abov: 1}]", "did you mean 'above'?"),
    ],
)
def test_each_is_told_once_with_what_to_do(field: str, says: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(f"version: 1\n{field}\n")
    [problem] = caught.value.problems
    assert says in problem.message


def changed(before: str | bytes, after: str | bytes) -> list[str]:
    return differences(parse(before), parse(after))


def test_a_diff_is_of_meaning() -> None:
    assert changed(FULL, FULL.replace(b"# Everything", b"# All")) == []
    assert changed("version: 1\n", "version: 1\ndefaults: {heads: 16}\n") == []
    assert changed("version: 1\n", "version: 1\ndefaults: {nodes: 8, deadline: 5s}\n") == [
        "defaults.nodes.high: 32 -> 8",
        "defaults.deadline_s: not set -> 5",
    ]


def test_a_diff_of_classes_rules_and_alerts() -> None:
    lines = changed(FULL, FULL.replace(b"  code: {nodes: 48", b"  code: {nodes: 40").replace(b"min: 2}}", b"min: 3}}"))
    assert lines == ["rules.busy.when.load.low: 2 -> 3", "classes.code.nodes.high: 48 -> 40"]
    lines = changed(FULL, FULL.replace(b"name: busy", b"name: rush").replace(b"name: slow", b"name: sluggish"))
    assert lines == [
        "rules.busy: removed",
        "rules.rush: added in place 2",
        "alerts.slow: removed",
        "alerts.sluggish: added",
    ]
    assert changed(FULL, FULL.replace(b"repeat: 1h", b"repeat: 2h")) == ["receivers.chat.repeat_s: 3600 -> 7200"]
    lines = changed(FULL, FULL.replace(b"use: {tree: 3x2x1, heads: 3}", b"use: {heads: 2}"))
    assert "rules.long-code.use.tree: a tree of 15 nodes, 3 deep -> auto" in lines
    two = (
        "version: 1\nrules:\n  - {name: a, when: {turn: first}, use: {}}\n  - {name: b, when: {turn: later}, use: {}}\n"
    )
    swapped = (
        "version: 1\nrules:\n  - {name: b, when: {turn: later}, use: {}}\n  - {name: a, when: {turn: first}, use: {}}\n"
    )
    assert changed(two, swapped) == ["rules: the order is now b, a"]
