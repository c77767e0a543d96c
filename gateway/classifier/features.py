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
from gateway.classifier.text import DENSE_LONG_CHARS, LONG_CHARS, RequestText, read_request

FEATURES_VERSION = 2
"""Raised whenever the same prompt gets other features; an artifact of another version is refused."""

MAX_WORDS = 48  # of one sentence
MAX_SENTENCES = 5  # from either end
MAX_QUESTIONS = 3  # between those

SURE_SCORE = 1.5
"""Score from which on a sentence surely asks, so that the rest of a long prompt is material."""
ASIDE_SCORE = 1.6
"""For a short paragraph at either end of a long prompt."""

ASKING = frozenset(
    {
        *("write", "create", "implement", "fix", "translate", "convert", "explain", "summarise", "extract", "list"),
        *("tell", "give", "compare", "describe", "imagine", "continue", "roleplay", "suggest", "calc", "analyse"),
        *("proofread", "plan", "persona", "prove"),
    }
)
FORMS = frozenset(
    {
        *("poem", "story", "song", "joke", "scene", "slogan", "letter", "essay", "recipe", "function", "program"),
        *("script", "code", "query", "regex", "command", "algorithm", "web", "test", "config", "summary", "character"),
        *("text", "plan", "meaning", "difference", "reason", "sheet"),
    }
)
MARKERS = frozenset({"about", "that", "this", "de", "please", "can", "want"})


GROUP = "t"
"""Family of the block that carries no features but the calibration group of the request's language."""
GROUPS = ("en", "dense", "other")
"""English; languages written without spaces; all others. Scores of each are softened by a temperature of its own."""


class Block(NamedTuple):
    """Keys of one family that share one weight."""

    family: str
    weight: float
    keys: Iterable[str]


class Sentence(NamedTuple):
    """One sentence with what was found in it."""

    text: str
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
_LATEX = re.compile(r"\\(?:frac|int|sum|sqrt|lim|sin|cos|ln|pi|cdot|mathbb)")
# table(column, column): a word right before a list of single words.
_SCHEMA = re.compile(r"\w\((?:\w+, ?)+\w+\)")
_NAMED = re.compile(r"[a-z\u00df-\u00ff,] [A-Z\u00c0-\u00de][a-z\u00df-\u00ff]")
_PERSONA = frozenset({"persona", "roleplay", "imagine"})
_KINDS = frozenset({"maths", "prove", "sheet", "tooluse", "art", "os", "pro", "figure"})
_HEADING = (":", "：")
_QUESTION = ("?", "？", "؟", "か。", "吗。")
_REQUEST_MARKS = frozenset({"please", "can", "want", "how", "wh"})


def extract(messages: Sequence[Mapping[str, Any]] | str, lexicon: Lexicon) -> list[Block]:
    """The feature blocks of chat messages or of one prompt."""
    return blocks_of(read_request(messages), lexicon)


def blocks_of(request: RequestText, lexicon: Lexicon) -> list[Block]:
    """The feature blocks of a request already cut into pieces."""
    parts, middle, aside = request.sentences, request.middle, request.aside
    chosen = range(len(parts))
    if len(parts) > 2 * MAX_SENTENCES:
        head, tail = range(len(parts))[:MAX_SENTENCES], range(len(parts))[-MAX_SENTENCES:]
        asked = [i for i in range(MAX_SENTENCES, len(parts) - MAX_SENTENCES) if parts[i].rstrip().endswith(_QUESTION)]
        chosen = sorted({*head, *middle, *asked[:MAX_QUESTIONS], *tail})
    parts = [parts[i] for i in chosen]
    split = [tokens(part.lower())[:MAX_WORDS] for part in parts]
    every_word = list(chain.from_iterable(split))
    raw = "\n".join(parts)
    language, meanings = lexicon.resolve(raw, every_word)
    places = [("aside" if i in aside else "middle" if i in middle else "", i in middle) for i in chosen]
    sentences = _sentences(parts, split, lambda words: lexicon.concepts(words, language, meanings), language, places)
    scores = [sentence.score for sentence in sentences]
    ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)  # stable: of equals, the earlier first
    blocks: list[Block] = []
    asking = ranked[:2] if len(ranked) > 1 and _asks_too(sentences[ranked[1]]) else ranked[:1]
    long = request.length >= (DENSE_LONG_CHARS if language in UNSPACED else LONG_CHARS)
    if ranked and chosen[ranked[0]] in aside:
        long = True  # a request with its material below or above
    persona = _persona(sentences)
    if persona >= 0:
        # Who is to answer decides more than what they are asked.
        asking = [persona, *[index for index in asking if index != persona][:1]]
    second = 0.4 if persona >= 0 or long else 0.7
    for rank, index in enumerate(asking):
        _sentence_blocks(sentences[index], 1.0 if rank == 0 else second, language, blocks)
    rest = [sentences[index] for index in ranked if index not in asking]
    best = sentences[ranked[0]] if ranked else Sentence("", [], [], 0.0, False)
    _rest_blocks(rest, long and best.score >= SURE_SCORE, language, blocks)
    _opening_blocks(best, bool(request.code), language, blocks)
    if persona >= 0:
        blocks.append(Block("i", 1.0, _persona_keys(sentences[persona], rest, language)))
    asked = "\n".join(sentences[index].text for index in asking)
    blocks.append(Block("s", 0.5, _structure(request, asked, best)))
    blocks.append(Block("m", 0.5, _surroundings(request, raw, long)))
    _context_blocks(request, best, lexicon, blocks)
    blocks.append(Block(GROUP, 0.0, ("en" if language == "en" else "dense" if language in UNSPACED else "other",)))
    return blocks


def _sentences(
    parts: Sequence[str],
    split: list[list[str]],
    concepts: Callable[[list[str]], list[str]],
    language: str,
    places: Sequence[tuple[str, bool]],
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
            form = not FORMS.isdisjoint(found)
            score += 1.0 * (not _REQUEST_MARKS.isdisjoint(found[:3])) + 0.5 * form + 0.7 * (asks and form)
        place, inside = places[index]
        end = part.rstrip()
        # A line that ends with a colon is often a heading: "Translation:".
        score += 1.5 * end.endswith(_QUESTION) - 1.0 * (end.endswith(_HEADING) and index < last) - 1.0 * inside
        score += ASIDE_SCORE if place == "aside" else 1.0 * (index == 0) + 0.8 * (index == last)
        sentences.append(Sentence(part, words, found, score, asks))
    return sentences


def _asks_too(sentence: Sentence) -> bool:
    """Whether a sentence beside the best one asks for something itself."""
    return sentence.score > 1.5 and (sentence.asks or sentence.text.rstrip().endswith(_QUESTION))


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


def _rest_blocks(rest: Sequence[Sentence], pasted: bool, language: str, blocks: list[Block]) -> None:
    """Sentences that don't ask. Of pasted material only the concepts, in a family of their own: it tells little, and
    what it weighs must not grow with its length."""
    words = [word for sentence in rest for word in sentence.words]
    # Each once: a word that a text repeats says no more of what is asked about it.
    found = list(dict.fromkeys(concept for sentence in rest for concept in sentence.concepts))
    if pasted:
        blocks.append(Block("r", 0.3 / sqrt(1 + len(found)), found))
        return
    weight = 0.4
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
    keys += [f"y:{name}" for name in sorted(_KINDS.intersection(found))]
    if has_code:
        keys += [f"k:{concept}" for concept in found[:6]] + [f"kv:{verb}"]
    blocks.append(Block("o", 1.0, keys))
    if language not in UNSPACED and best.words:
        blocks.append(Block("h", 0.7, [*best.words[:5], " ".join(best.words[:2]), " ".join(best.words[:3])]))


def _persona(sentences: Sequence[Sentence]) -> int:
    """Which of the first two sentences says who is to answer ("You are a pirate"); -1 if none does."""
    for index, sentence in enumerate(sentences[:2]):
        if not _PERSONA.isdisjoint(sentence.concepts[:3]):
            return index
    return -1


def _persona_keys(sentence: Sentence, rest: Sequence[Sentence], language: str) -> list[str]:
    """A persona by name (Ada), by trade (a lawyer), or by what it is (a dragon): the forms of answer differ."""
    found = sentence.concepts
    who = [concept for concept in ("figure", "fantasy", "pro", "program", "code", "character") if concept in found]
    keys = [f"who:{name}" for name in who] or ["who:-"]
    if any("fantasy" in other.concepts or "figure" in other.concepts for other in rest[:3]):
        keys.append("who:fantasy around")
    if _NAMED.search(sentence.text):
        keys.append("who:named" if language != "de" else "who:noun")
    return keys


def _structure(request: RequestText, asked: str, best: Sentence) -> list[str]:
    """What the asking sentences look like; of the length only whether they are the whole request."""
    marks = _code_marks(asked[:300])
    start = asked[:300]
    code = bool(request.code)
    share = 8 * len(asked) // max(request.length, 1)
    keys = [
        f"words:{min(len(best.words), 32).bit_length()}",
        f"share:{min(share, 7).bit_length()}",
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
        "asks in a question": best.text.rstrip().endswith(_QUESTION),
        "no concepts": not best.concepts,
        "math": _MATH_SIGN.search(start) is not None and _MATH.search(start) is not None,
        "formula": "\\" in start and _LATEX.search(start) is not None,
        "figures": sum(map(str.isdigit, start)) * 8 > len(start),
        "schema": "(" in start and _SCHEMA.search(start) is not None,
        "capitals": _CAMEL.search(start) is not None,
        "marks without code": marks > 0 and not code,
        "answered in code": request.answered_in_code,
        "quotes": '"' in asked or "“" in asked or "「" in asked or "«" in asked,
        "empty": not best.words and not code,
    }
    return keys + [name for name, present in flags.items() if present]


def _surroundings(request: RequestText, raw: str, long: bool) -> list[str]:
    """What stands around the question, without its words."""
    flags = {
        "long": long,
        "lines of calls": "Action:" in raw or "Observation:" in raw or "result:" in raw or '{"' in raw,
        "table": raw.count(",") * 8 > len(raw) or raw.count("|") > 6,
        "schema around": "(" in raw and _SCHEMA.search(raw[:600]) is not None,
    }
    return [name for name, present in flags.items() if present]


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
