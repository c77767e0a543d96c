"""From what a client asks for to the state of each answer, for one model's tokens. Checked once, cached, bounded."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import llguidance

from backends.grammar.matcher import GrammarMatcher, MaskBuffers
from backends.grammar.schema import HONOURED, checked_schema, keyword_paths
from backends.grammar.spec import MAX_BYTES, MAX_CHOICES, MAX_PATTERN_BYTES, GrammarRefused, GrammarSpec

_JSON_OPTIONS: llguidance.JsonCompileOptions = {
    "lenient": False,
    "coerce_one_of": False,
    # Without limit, a small model may write blanks until its tokens are used up.
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
}
_MOST_CACHED, _MOST_CACHED_BYTES = 256, 8 << 20
_MOST_WORDS = 300
_UNKNOWN_KEYS = re.compile(r'Unimplemented keys: \["([^"]+)"')


def _limits() -> llguidance.LLParserLimits:
    """Of one answer's matcher: about 20 ms to begin with, 15 ms a step, and 40 MB."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


@dataclass(frozen=True, slots=True)
class _Compiled:
    """``grammar``: in llguidance's own form. ``refusal``: why it can't be carried out: message, field, code."""

    grammar: str
    refusal: tuple[str, str, str] | None = None

    @property
    def size(self) -> int:
        return len(self.grammar) + 200


class GrammarCompiler:
    """Opens grammars for the answers of one model. Thread-safe; work of milliseconds, so not for an event loop.

    ``tokenizer``: its ``tokenizer.json``, asked for when the first grammar comes (a third of a second for 49,152
    tokens). ``vocab_size``: columns of the model's logits. ``ending_ids``: the tokens that end an answer.
    """

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, ending_ids: Collection[int]) -> None:
        self._read, self._vocab_size, self._ending_ids = tokenizer, vocab_size, sorted(ending_ids)
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._buffers = MaskBuffers(vocab_size)
        self._cache: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._cached_bytes = 0

    def open(self, spec: GrammarSpec) -> GrammarMatcher:
        """A new state at the beginning of an answer. Raises :class:`GrammarRefused` for what can't be carried out,
        which includes a grammar that no answer fits."""
        tokenizer = self._llguidance_tokenizer(spec)
        compiled = self._compiled(spec, tokenizer)
        if compiled.refusal is not None:
            raise GrammarRefused(*compiled.refusal)
        return GrammarMatcher(
            llguidance.LLMatcher(tokenizer, compiled.grammar, log_level=0, limits=_limits()),
            self._buffers,
            is_document=spec.is_document,
        )

    def _llguidance_tokenizer(self, spec: GrammarSpec) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                if not self._ending_ids:
                    raise GrammarRefused(
                        f"'{spec.param}' is not supported by this model, which has no token that ends an answer.",
                        spec.param,
                        "unsupported_parameter",
                    )
                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        self._read(),
                        n_vocab=self._vocab_size,
                        eos_token=self._ending_ids,
                        slices=llguidance.LLTokenizer.json_slices(),
                    )
                except Exception as error:  # whatever the library makes of a kind of tokenizer that it doesn't know
                    raise GrammarRefused(
                        f"'{spec.param}' is not supported for this model's tokenizer; leave it out.",
                        spec.param,
                        "unsupported_parameter",
                    ) from error
            return self._tokenizer

    def _compiled(self, spec: GrammarSpec, tokenizer: llguidance.LLTokenizer) -> _Compiled:
        key = hashlib.blake2b(f"{spec.kind}\0{spec.param}\0{spec.text}".encode(errors="surrogatepass")).digest()
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        try:
            compiled = _Compiled(_checked(spec, tokenizer))
        except GrammarRefused as error:
            compiled = _Compiled("", (str(error), error.param, error.code))
        with self._lock:
            if key not in self._cache:
                self._cache[key] = compiled
                self._cached_bytes += compiled.size
            while len(self._cache) > _MOST_CACHED or self._cached_bytes > _MOST_CACHED_BYTES:
                self._cached_bytes -= self._cache.popitem(last=False)[1].size
        return compiled


def _checked(spec: GrammarSpec, tokenizer: llguidance.LLTokenizer) -> str:
    """The grammar in llguidance's form, found to be sound by a matcher that is then thrown away: the first mask tells
    grammars that fit nothing."""
    grammar = _translated(spec)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
    if matcher.is_error():
        raise _refusal(spec, matcher.get_error())
    if warnings := matcher.get_grammar_warnings():
        raise _refusal(spec, warnings[0])
    matcher.compute_bitmask()
    if matcher.is_error():
        if "NoExtension" in matcher.get_error():
            raise GrammarRefused(f"'{spec.param}': no text fits it (does it refer to itself only?).", spec.param)
        raise GrammarRefused(f"'{spec.param}' is too complex; make it simpler.", spec.param)
    return grammar


def _translated(spec: GrammarSpec) -> str:
    size, most = len(spec.text.encode(errors="surrogatepass")), MAX_BYTES
    if spec.kind == "regex":
        most = MAX_PATTERN_BYTES
    if size > most:
        raise GrammarRefused(f"'{spec.param}' has {size} bytes; at most {most} are taken.", spec.param)
    if spec.kind == "json":
        schema = checked_schema(spec.text, spec.param)
        try:
            return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
        except ValueError as error:  # constants nested too deeply
            raise _refusal(spec, str(error)) from None
    if spec.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        return _choices(spec)
    if "x-guidance" in spec.text or re.search(r"\btemperature\s*=", spec.text):
        # The first would switch how schemas inside are read, the second is passed over.
        raise GrammarRefused(
            f"'{spec.param}' may not hold 'x-guidance' or 'temperature='; leave it out.",
            spec.param,
            "unsupported_parameter",
        )
    try:
        return llguidance.grammar_from("ebnf" if spec.kind == "gbnf" else "lark", spec.text)
    except (ValueError, RecursionError) as error:
        raise _refusal(spec, str(error)) from None


def _choices(spec: GrammarSpec) -> str:
    choices = json.loads(spec.text)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise GrammarRefused(
            f"'{spec.param}' has {len(choices)} choices; from 1 to {MAX_CHOICES} are taken.", spec.param
        )
    return llguidance.grammar_from("choice", json.dumps(choices, ensure_ascii=False))


def _refusal(spec: GrammarSpec, words: str) -> GrammarRefused:
    """What llguidance says, with the field it is about."""
    param = spec.param
    if spec.kind == "json":
        named = _UNKNOWN_KEYS.search(words)
        words = words.replace("regex parse", "pattern: regex parse")
        keywords = [named[1]] if named else [each for each in re.findall(r"[A-Za-z$]+", words) if each in HONOURED]
        schema = json.loads(spec.text)
        param = next((path for each in keywords for path in keyword_paths(schema, each, param)), param)
        if named or keywords[:1] == ["oneOf"]:
            instead = (
                "leave it out" if named else "use anyOf, unless its cases exclude each other by type or a constant"
            )
            message = f"'{param}' is a keyword that can't be enforced here; {instead}."
            return GrammarRefused(message, param, "unsupported_parameter")
    shown = " ".join(words.replace("<non-verbose/>", "").split())[:_MOST_WORDS]
    return GrammarRefused(f"'{param}' can't be carried out: {shown}", param)
