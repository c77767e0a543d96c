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

from backends.tree import CandidateTree
from policy.alerts import AlertRule, Receiver
from policy.diff import differences
from policy.format import default_policy, json_schema, parse_policy
from policy.problems import PolicyError
from policy.spec import Bounds, FallbackSettings, PolicySpec, RequestFacts, Settings, TemperatureLimits

DATA = Path(__file__).parent / "data" / "policies"
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


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
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


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with contextlib.suppress(PolicyError):
        parse(content)


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
