"""Features of a prompt: words, concepts and structure of the sentences that ask for something.

Features come as blocks (family, weight, keys), so training and inference read the same thing and inference needs one
look-up a key. Sentences that ask get full weight, pasted material little.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from math import sqrt
from typing import Any, NamedTuple

from gateway.classifier.lexicon import HEAD_FINAL, UNSPACED, Lexicon, tokens
from gateway.classifier.text import RequestText, read_request

FEATURES_VERSION = 1
"""Raised whenever the same prompt gets other features; an artifact of another version is refused."""

MAX_WORDS = 48  # of one sentence
MAX_SENTENCES = 5  # from either end

ASKING = frozenset(
    {
        *("write", "create", "implement", "fix", "translate", "convert", "explain", "summarise", "extract", "list"),
        *("tell", "give", "compare", "describe", "imagine", "continue", "roleplay", "suggest", "calc", "analyse"),
        *("proofread", "plan", "persona"),
    }
)
FORMS = frozenset(
    {
        *("poem", "story", "song", "joke", "scene", "slogan", "letter", "essay", "recipe", "function", "program"),
        *("script", "code", "query", "regex", "command", "algorithm", "web", "test", "config", "summary", "character"),
        *("text", "plan", "meaning", "difference", "reason"),
    }
)
MARKERS = frozenset({"about", "that", "this", "de", "please", "can", "want"})


class Block(NamedTuple):
    """Keys of one family that share one weight."""

    family: str
    weight: float
    keys: Iterable[str]


class Sentence(NamedTuple):
    """One sentence with what was found in it."""

    words: list[str]
    concepts: list[str]
    score: float
    """How much it looks like the sentence that asks."""
    asks: bool


_CODE_MARKS = ("{", "}", ";", "[", "`", "_", "$")
# Counting two characters costs more than asking for one, so each pair is counted only where its rarer half occurs.
_CODE_PAIRS = (
    *(("(", ("()",)), ("=", ("==", "!=", "=>")), ("-", ("->", " -", "--")), (":", ("::",)), ("&", ("&&",))),
    *(("|", ("||",)), ("/", ("</", "/*"))),
)
_FILE_TYPE = re.compile(r"\.(?:py|js(?:on)?|ts|sh|sql|csv|txt|log|cpp|java|html|yml|md)")
# These two start with what is rare in prose, so that the regex engine skips the rest.
_CAMEL = re.compile(r"[A-Z](?<=[A-Za-z][A-Z])")
_MATH_SIGN = re.compile(r"[-+*/^=×÷%²]")
_MATH = re.compile(r"\d\s?[-+*/^=×÷]\s?\d|\d\s?%|[=+]\s?[xy]\b|[xy]\s?[=+^²]")
_QUESTION = ("?", "？", "؟", "か。", "吗。")
_REQUEST_MARKS = frozenset({"please", "can", "want", "how", "wh"})


def extract(messages: Sequence[Mapping[str, Any]] | str, lexicon: Lexicon) -> list[Block]:
    """The feature blocks of chat messages or of one prompt."""
    return blocks_of(read_request(messages), lexicon)


def blocks_of(request: RequestText, lexicon: Lexicon) -> list[Block]:
    """The feature blocks of a request already cut into pieces."""
    parts = request.sentences
    if len(parts) > 2 * MAX_SENTENCES:
        parts = parts[:MAX_SENTENCES] + parts[-MAX_SENTENCES:]
    raw = "\n".join(parts)
    split = [tokens(part.lower())[:MAX_WORDS] for part in parts]
    every_word = list(chain.from_iterable(split))
    language, meanings = lexicon.resolve(raw, every_word)
    sentences = _sentences(parts, split, lambda words: lexicon.concepts(words, language, meanings), language)
    scores = [sentence.score for sentence in sentences]
    ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)  # stable: of equals, the earlier first
    blocks: list[Block] = []
    other = 0.4 if request.length < 400 else 0.15
    asking = ranked[:2] if len(ranked) > 1 and scores[ranked[1]] > 1.5 else ranked[:1]
    for rank, index in enumerate(asking):
        _sentence_blocks(sentences[index], 1.0 if rank == 0 else 0.7, language, blocks)
    rest = [sentences[index] for index in ranked[len(asking) :]]
    _rest_blocks(rest, other, language, blocks)
    best = sentences[ranked[0]] if ranked else Sentence([], [], 0.0, False)
    _opening_blocks(best, bool(request.code), language, blocks)
    blocks.append(Block("s", 1.0, _structure(request, raw, len(every_word), best)))
    _context_blocks(request, best, lexicon, blocks)
    return blocks


def _sentences(
    parts: Sequence[str], split: list[list[str]], concepts: Callable[[list[str]], list[str]], language: str
) -> list[Sentence]:
    sentences = []
    last = len(parts) - 1
    for index, (part, words) in enumerate(zip(parts, split, strict=True)):
        found = concepts(words)
        asks, score = False, 0.0
        if found:
            if language in HEAD_FINAL:
                found.reverse()
            elif language == "zh":
                found = _noun_first(found)
            asks = not ASKING.isdisjoint(found)
            score = 2.0 * (not ASKING.isdisjoint(found[:2])) + asks
            score += 1.0 * (not _REQUEST_MARKS.isdisjoint(found[:3])) + 0.5 * (not FORMS.isdisjoint(found))
        score += 1.5 * part.rstrip().endswith(_QUESTION) + 0.4 * (index == 0) + 0.6 * (index == last)
        sentences.append(Sentence(words, found, score, asks))
    return sentences


def _noun_first(found: list[str]) -> list[str]:
    """Chinese puts the noun after its description (…的诗): moves it before, as in the other languages."""
    if "de" not in found:
        return found
    at = len(found) - 1 - found[::-1].index("de")
    if at + 1 < len(found) and found[at + 1] in FORMS:
        noun = found[at + 1]
        start = next((i + 1 for i, concept in enumerate(found[:at]) if concept in ASKING), 0)
        rest = [concept for i, concept in enumerate(found) if i not in (at, at + 1)]
        return [*rest[:start], noun, *rest[start:]]
    return found


def _sentence_blocks(sentence: Sentence, weight: float, language: str, blocks: list[Block]) -> None:
    words, found = sentence.words, sentence.concepts
    scaled = weight * 2.0 / sqrt(4 + len(words))
    if language in UNSPACED:
        run = "".join(word for word in words if word[0] >= "\u0e00")
        blocks.append(Block("g", weight * 2.0 / sqrt(8 + len(run)), map("".join, pairwise(run))))
    blocks.append(Block("w", scaled, words))
    blocks.append(Block("b", scaled, map(" ".join, pairwise(words))))
    if language not in UNSPACED:
        blocks.append(Block("x", scaled * 0.7, [word[:5] for word in words if len(word) > 5]))
    if found:
        blocks.append(Block("c", weight * 2.0 / sqrt(3 + len(found)), found))
        blocks.append(Block("p", weight * 2.0 / sqrt(3 + len(found)), map(">".join, pairwise(found))))


def _rest_blocks(rest: Sequence[Sentence], weight: float, language: str, blocks: list[Block]) -> None:
    """Sentences that don't ask, such as a pasted article: words and concepts only, and little of them."""
    words = [word for sentence in rest for word in sentence.words]
    found = [concept for sentence in rest for concept in sentence.concepts]
    if words and language not in UNSPACED:
        blocks.append(Block("w", weight * 2.0 / sqrt(4 + len(words) / 2), words))
    if found:
        blocks.append(Block("c", weight * 2.0 / sqrt(3 + len(found) / 2), found))


def _opening_blocks(best: Sentence, has_code: bool, language: str, blocks: list[Block]) -> None:
    """What the asking sentence asks for first: the verb, and the first noun that names a form of answer."""
    found = best.concepts
    verb = next((concept for concept in found if concept in ASKING or concept in ("how", "wh")), "-")
    form = next((concept for concept in found if concept in FORMS), "-")
    content = [concept for concept in found if concept not in MARKERS][:3]
    keys = [f"v:{verb}", f"f:{form}", f"vf:{verb}>{form}", "o:" + ">".join(content[:2]), "o3:" + ">".join(content)]
    if "about" in found:
        before = found[: found.index("about")]
        keys += [f"a:{concept}" for concept in before]
    if has_code:
        keys += [f"k:{concept}" for concept in found[:6]] + [f"kv:{verb}"]
    blocks.append(Block("o", 1.0, keys))
    if language not in UNSPACED and best.words:
        blocks.append(Block("h", 0.7, [*best.words[:5], " ".join(best.words[:2]), " ".join(best.words[:3])]))


def _structure(request: RequestText, raw: str, words: int, best: Sentence) -> list[str]:
    marks = _code_marks(raw[:300])
    start = raw[:200]
    code = bool(request.code)
    keys = [
        f"words:{min(words, 64).bit_length()}",
        f"length:{min(request.length, 8192).bit_length()}",
        f"marks:{min(marks, 8)}",
    ]
    question = bool(request.sentences) and any(s.rstrip().endswith(_QUESTION) for s in request.sentences[-2:])
    flags = {
        "code": code,
        "fenced": request.fenced,
        "only code": code and not request.sentences,
        "code last": request.code_last,
        "code and question": code and question,
        "code and request": code and best.asks,
        "question": question,
        "asks": best.asks,
        "no concepts": not best.concepts,
        "math": _MATH_SIGN.search(start) is not None and _MATH.search(start) is not None,
        "capitals": _CAMEL.search(start) is not None,
        "marks without code": marks > 0 and not code,
        "answered in code": request.answered_in_code,
        "quotes": '"' in raw or "“" in raw or "「" in raw or "«" in raw,
        "empty": not words and not code,
    }
    return keys + [name for name, present in flags.items() if present]


def _code_marks(text: str) -> int:
    """How many signs of code `text` holds; overlapping ones count each, and ".json" is ".js" too."""
    marks = sum(map(text.count, _CODE_MARKS))
    for rarer, pairs in _CODE_PAIRS:
        if rarer in text:
            marks += sum(map(text.count, pairs))
    if "." in text:
        types = _FILE_TYPE.findall(text)
        marks += len(types) + types.count(".json")
    return marks


def _context_blocks(request: RequestText, best: Sentence, lexicon: Lexicon, blocks: list[Block]) -> None:
    """The system prompt and earlier turns: light, unless the last turn says too little to stand alone."""
    alone = any(concept in FORMS for concept in best.concepts) or len(best.words) > 12
    weight = 0.15 if alone else 0.5
    for text in request.context:
        words = tokens(text.lower())[:MAX_WORDS]
        found = lexicon.concepts(words, *lexicon.resolve(text, words))
        blocks.append(Block("w", weight * 2.0 / sqrt(4 + len(words)), words))
        blocks.append(Block("c", weight * 2.0 / sqrt(3 + len(found)), found))
        blocks.append(Block("e", 2 * weight, [f"{concept}" for concept in dict.fromkeys(found)]))
