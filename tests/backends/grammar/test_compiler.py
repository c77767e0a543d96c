"""Grammars are checked, cached and bounded, and what one answer does to its grammar is nobody else's business."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.grammar.compiler import GrammarCompiler
from backends.grammar.matcher import MaskBuffers
from backends.grammar.spec import ANY_OBJECT, GrammarKind, GrammarRefused, GrammarSpec
from backends.models.tiny import TINY_TOKENIZERS, tiny_tokenizer
from backends.types import GRAMMAR_LIMIT, TokenGrammar
from tests.support.grammars import EOS, VOCAB, accepts, allowed, tiny_grammars
from tests.support.paths import ROOT

ODD = ['quo"te', "a\nb", "é\\", "", "\u0007/"]


def fits(kind: GrammarKind, text: str, answer: str) -> bool:
    return accepts(tiny_grammars().open(GrammarSpec(kind, text)), answer)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json", ANY_OBJECT, ['{"a":[1,{}]}', "{}"], ["[]", "{", "1", '{"a": 1}', ""]),
        ("json", "{}", ["1", '"a"', "[]", "null"], ["", "nul"]),
        ("regex", "a+|b", ["a", "aaa", "b"], ["", "ab", "c"]),
        ("regex", "^x{2}$", ["xx"], ["x", "xxx"]),
        ("regex", "[é日]*", ["", "é日"], ["e"]),
        ("choice", '["yes", "no", "yes, but"]', ["yes", "no", "yes, but"], ["", "ye", "yes,"]),
        ("choice", json.dumps(ODD), ODD, ["a"]),
        ("lark", 'start: "a" b\nb: /[0-9]+/', ["a1", "a23"], ["a", "b1"]),
        ("gbnf", 'root ::= "yes" | [a-c]+ "."', ["yes", "abc."], ["abc", "no"]),
    ],
)
def test_each_kind(kind: GrammarKind, text: str, good: list[str], bad: list[str]) -> None:
    assert [answer for answer in good if not fits(kind, text, answer)] == []
    assert [answer for answer in bad if fits(kind, text, answer)] == []


@pytest.mark.parametrize("kind", TINY_TOKENIZERS)
def test_no_special_token_is_text(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    compiler = GrammarCompiler(tokenizer.to_json, len(tokenizer) + 5, [0])
    grammar = compiler.open(GrammarSpec("regex", "(?s).*"))
    row = np.zeros(len(tokenizer) + 5, np.float32)
    grammar.mask(row)
    special = [i for i in range(len(tokenizer)) if tokenizer.token_name(i) is not None]
    # The one that ends an answer may come, and no column that stands for no token.
    assert np.flatnonzero(row[special] == 0).tolist() == [special.index(0)]
    assert np.isneginf(row[len(tokenizer) :]).all()
    assert (row == 0).sum() > 100


@given(st.binary(min_size=36, max_size=36), st.integers(225, 260), st.booleans())
def test_a_mask_sets_what_it_forbids_and_nothing_else(bits: bytes, vocab: int, sparse: bool) -> None:
    buffers = MaskBuffers(vocab)
    words = np.frombuffer(bits, np.int32)[: len(buffers.bits)]
    buffers.bits[:] = words & 0x11 if sparse else words
    if vocab % 32:
        buffers.bits[-1] &= (1 << vocab % 32) - 1
    row = np.arange(vocab, dtype=np.float32)
    buffers.apply(buffers.bits, row)
    for token in range(vocab):
        may = bool(buffers.bits[token // 32] >> (token % 32) & 1)
        assert row[token] == (token if may else -np.inf)


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("json", '{"properties":{"a":{"enum":["x",1]}},"required":["a"],"additionalProperties":false}', '{"a":"x"}'),
        ("regex", "[a-c]+é?", "abcé"),
        ("choice", '["yes", "yes, but"]', "yes, but"),
    ],
)
def test_what_is_allowed_is_what_the_mask_leaves(kind: GrammarKind, text: str, answer: str) -> None:
    """Whether the mask was made ahead or is made when it is asked for."""
    grammar, ahead = (tiny_grammars().open(GrammarSpec(kind, text)) for _ in range(2))
    for token in [*tiny_tokenizer().encode(answer), EOS]:
        ahead.prepare()
        rows = np.zeros((2, VOCAB), np.float32)
        grammar.mask(rows[0])
        ahead.mask(rows[1])
        assert np.array_equal(rows[0], rows[1])
        # Once all is said only the mask knows that the end may follow; the answer is then over without it.
        asked = [each for each in range(VOCAB) if each != EOS or grammar.complete_after is None]
        assert [each for each in asked if grammar.allows(each)] == [each for each in asked if rows[0][each] == 0]
        assert not grammar.allows(-1)
        grammar.advance(token)
        ahead.advance(token)


def test_long_masks_are_applied_to_their_end() -> None:
    rng = np.random.default_rng(0)
    buffers = MaskBuffers(49_999)
    for density in (0.001, 0.5, 0.999):
        bits = rng.random(len(buffers.bits) * 32) < density
        buffers.bits[:] = np.packbits(bits, bitorder="little").view(np.int32)
        row = np.arange(49_999, dtype=np.float32)
        buffers.apply(buffers.bits, row)
        assert np.array_equal(np.isneginf(row), ~bits[:49_999])
        assert np.array_equal(row[bits[:49_999]], np.flatnonzero(bits[:49_999]))


def test_what_is_looked_up_is_neither_read_nor_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import backends.grammar.compiler as compiler_module

    compiler, read = GrammarCompiler(tiny_tokenizer().to_json, VOCAB, [EOS]), []
    real = compiler_module._checked
    monkeypatch.setattr(compiler_module, "_checked", lambda *given: read.append(1) or real(*given))
    for _ in range(3):
        compiler.open(GrammarSpec("regex", "a"))
        with pytest.raises(GrammarRefused):
            compiler.open(GrammarSpec("regex", "("))
    assert len(read) == 2
    # The error names the field, so the field belongs to the key.
    with pytest.raises(GrammarRefused, match="'regex'"):
        compiler.open(GrammarSpec("regex", "(", "regex"))


def test_the_cache_is_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tiny_tokenizer().to_json, VOCAB, [EOS])
    for number in range(300):
        compiler.open(GrammarSpec("choice", f'["{number}"]'))
    assert len(compiler._cache) == 256
    monkeypatch.setattr("backends.grammar.compiler._MOST_CACHED_BYTES", 20_000)
    for number in range(20):
        compiler.open(GrammarSpec("choice", json.dumps([f"{number}" + "x" * 2000])))
    assert compiler._cached_bytes == sum(each.size for each in compiler._cache.values()) <= 20_000
    assert 5 < len(compiler._cache) < 10


def test_answers_of_one_grammar_know_nothing_of_each_other() -> None:
    spec = GrammarSpec("json", '{"enum": ["a", "b"]}')
    one, other = tiny_grammars().open(spec), tiny_grammars().open(spec)
    (quote,) = allowed(one)
    one.advance(quote)
    assert allowed(one) == set(tiny_tokenizer().encode("ab"))
    assert allowed(other) == {quote}


def test_many_threads_open_grammars_at_once() -> None:
    compiler = GrammarCompiler(tiny_tokenizer().to_json, VOCAB, [EOS])
    found: list[tuple[TokenGrammar, str]] = []

    def work(number: int) -> None:
        for turn in range(20):
            found.append((compiler.open(GrammarSpec("choice", f'["{turn}", "t{number}"]')), f"t{number}"))  # noqa: PERF401

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Their masks are for one thread: the engine's.
    assert [accepts(grammar, text) for grammar, text in found] == [True] * 80


def walk(grammar: TokenGrammar, text: str) -> None:
    for token in tiny_tokenizer().encode(text):
        if token not in allowed(grammar):
            return
        grammar.advance(token)


HOSTILE = [
    GrammarSpec("regex", "^([a-z]{1,1000}){1,1000}$"),
    GrammarSpec("regex", "(a+)+b"),
    GrammarSpec("regex", ".*a.{200}"),
    GrammarSpec("regex", "(.*[ab].*){20}"),
    GrammarSpec("json", json.dumps({"type": "string", "maxLength": 1_000_000})),
    GrammarSpec("json", json.dumps({"type": "array", "maxItems": 100_000, "items": {"type": "string"}})),
    GrammarSpec("json", json.dumps({"enum": [f"value {i}" for i in range(1000)]})),
    GrammarSpec(
        "json", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}})
    ),
    GrammarSpec("json", json.dumps({"anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(300)]})),
    GrammarSpec("lark", "start: a a a a a a a a\na: b? b? b? b? b? b?\nb: /x*/ | /x?/"),
]


@pytest.mark.parametrize("spec", HOSTILE, ids=lambda spec: spec.text[:30])
def test_a_hostile_grammar_is_refused_or_bounded(spec: GrammarSpec) -> None:
    """Never an exception, and processor time by the library's own counting; it is measured only against hanging."""
    began = time.process_time()
    try:
        grammar = tiny_grammars().open(spec)
    except GrammarRefused:
        return
    walk(grammar, '{"p1":1,"p2":' if spec.kind == "json" else "a" * 40)
    assert time.process_time() - began < 20
    if grammar.error is not None:
        assert grammar.error == GRAMMAR_LIMIT
        # For ever, and nothing is allowed any more: the end would make a cut answer look complete.
        assert allowed(grammar) == set()
        assert grammar.complete_after is None


def test_running_out_in_one_answer_is_no_other_answers_trouble() -> None:
    spec = GrammarSpec("regex", "^([a-z]{1,1000}){1,1000}$")
    compiler = GrammarCompiler(tiny_tokenizer().to_json, VOCAB, [EOS])
    ends = []
    for _ in range(3):
        grammar, steps = compiler.open(spec), 0
        rng = np.random.default_rng(1)
        while grammar.error is None and steps < 60:
            may = sorted(allowed(grammar) - {EOS})
            if may:
                grammar.advance(int(rng.choice(may)))
            steps += 1
        ends.append((steps, grammar.error))
    assert len(set(ends)) == 1


def test_looking_ahead_changes_nothing_of_the_answer() -> None:
    spec = GrammarSpec(
        "json", json.dumps({"type": "object", "properties": {"name": {"enum": ["a", "bc"]}}, "required": ["name"]})
    )
    plain, looked = tiny_grammars().open(spec), tiny_grammars().open(spec)
    for token in tiny_tokenizer().encode('{"name":"bc"}'):
        outlook = looked.outlook()
        assert outlook is not None
        for other in range(VOCAB):
            if outlook.allows(other) and (behind := outlook.after([other])) is not None:
                behind.forced()
        forced = outlook.forced()
        assert forced == [] or forced[0] == token
        assert allowed(looked) == allowed(plain)
        plain.advance(token)
        looked.advance(token)
    assert plain.complete_after == looked.complete_after == 13
    assert looked.outlook() is None


@pytest.mark.parametrize("given", [{}, {"ending_ids": []}, {"tokenizer": "{}"}])
def test_a_model_that_cannot_is_refused_by_name(given: dict[str, Any]) -> None:
    compiler = GrammarCompiler(
        lambda: given.get("tokenizer", tiny_tokenizer().to_json()), VOCAB, given.get("ending_ids", [EOS])
    )
    if given:
        with pytest.raises(GrammarRefused, match="'regex' is not supported") as refused:
            compiler.open(GrammarSpec("regex", "a", "regex"))
        assert refused.value.code == "unsupported_parameter"
    else:
        compiler.open(GrammarSpec("regex", "a", "regex"))


def linked(length: int, link: Callable[[dict[str, Any]], dict[str, Any]]) -> GrammarSpec:
    """Definitions each of which holds a reference to the next."""
    defs: dict[str, Any] = {f"{i}": link({"$ref": f"#/$defs/{i + 1}"}) for i in range(length)}
    return GrammarSpec("json", json.dumps({"$ref": "#/$defs/0", "$defs": {**defs, f"{length}": {}}}))


CHAINS = [
    linked(990, lambda below: below),
    linked(490, lambda below: {"items": below}),
    GrammarSpec("lark", "start: r0\n" + "\n".join(f"r{i}:r{i + 1}" for i in range(700)) + '\nr700:"b"'),
    GrammarSpec("lark", "start: R0\n" + "\n".join(f'R{i}:R{i + 1}"a"' for i in range(550)) + '\nR550:"b"'),
]


def test_the_longest_chains_do_not_end_the_process() -> None:
    """In a process of its own, whose threads have less than half of the usual stack."""
    program = (
        "import json, sys, threading; threading.stack_size(3 << 20)\n"
        "from backends.grammar.spec import GrammarSpec\n"
        "from tests.support.grammars import allowed, tiny_grammars\n"
        "def work():\n"
        "    for kind, text in json.load(sys.stdin):\n"
        "        grammar = tiny_grammars().open(GrammarSpec(kind, text))\n"
        "        for _ in range(3):\n"
        "            grammar.advance(min(allowed(grammar)))\n"
        "        print('alive', flush=True)\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
    )
    specs = json.dumps([(spec.kind, spec.text) for spec in CHAINS])
    run = subprocess.run([sys.executable, "-c", program], input=specs, capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout.split()) == (0, ["alive"] * len(CHAINS)), run.stderr
