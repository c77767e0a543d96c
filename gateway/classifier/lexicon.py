"""A multilingual lexicon: words of many languages mapped to shared concepts.

Concepts are what carries learning from one language to another: "Gedicht", "стихотворение" and "詩" are all `poem`, so
a weight learned on English prompts works for languages with no training prompts. Not covered: morphology beyond stems,
and languages whose file is missing under assets/lexicon.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

LEXICON_DIR = Path(__file__).parent / "assets" / "lexicon"

FUNCTION_WORD = "fn"
"""Concept of words that only say which language this is; it's never emitted."""

HEAD_FINAL = frozenset({"ja", "ko", "hi", "tr"})
"""Languages that put the verb last and its object before it; their concept order is reversed to match the others."""

UNSPACED = frozenset({"zh", "ja", "ko", "th"})
"""Languages matched inside words: without spaces (zh, ja, th) or with particles glued on (ko)."""

STEM_KEY = 4
SHORTEST_STEM = 3
UNSPACED_FROM = "\u0e00"
_ACCENTS = str.maketrans("áàâäãåéèêëíìîïóòôöõúùûüçñý", "aaaaaaeeeeiiiiooooouuuucny")
_KANA = re.compile("[\u3040-\u30ff]")
_HANGUL = re.compile("[\uac00-\ud7af\u1100-\u11ff]")
_THAI = re.compile("[\u0e00-\u0e7f]")
_UNSPACED_CHARS = re.compile("[\u0e00-\u0e7f\u1100-\u11ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
# One-letter clitics ("and", "the", "in", "to") that Arabic and Hebrew write glued to the next word.
CLITICS = frozenset("\u0648\u0641\u0628\u0644\u0643\u0627" + "\u05d5\u05d4\u05e9\u05d1\u05dc\u05db\u05de")
CLITIC_RANGE = ("\u0590", "\u06ff")

Entry = tuple[tuple[str, str], ...]  # (language, concept), ...
Meaning = tuple[str, Mapping[str, Entry] | None]
"""The concept of a word ("" if only a part of phrases, or a function word), and what may follow it to make a phrase."""
_NOTHING: Meaning = ("", None)


def parse_lexicon(language: str, text: str) -> list[tuple[str, str, str]]:
    """Rows (language, form, concept) of a lexicon file: lines of `concept: form, form, ...`."""
    rows = []
    for line in text.splitlines():
        concept, colon, forms = line.partition(":")
        if colon and not line.startswith("#"):
            rows += [(language, form.strip().lower(), concept.strip()) for form in forms.split(",") if form.strip()]
    return rows


def read_lexicon(directory: Path = LEXICON_DIR) -> list[tuple[str, str, str]]:
    """The rows of every language file in `directory`, in a fixed order (English first)."""
    files = sorted(directory.glob("*.txt"), key=lambda path: (path.stem != "en", path.stem != "universal", path.stem))
    return [row for path in files for row in parse_lexicon(path.stem, path.read_text(encoding="utf-8"))]


class Lexicon:
    """Looks up concepts of words; built once from rows, then read-only."""

    def __init__(self, rows: Iterable[tuple[str, str, str]]) -> None:
        self.rows = list(rows)
        self._exact: dict[str, Entry] = {}
        self._phrases: dict[str, dict[str, Entry]] = {}
        self._stems: dict[str, list[tuple[str, str, str]]] = {}
        self._runs: dict[str, dict[str, str]] = {}
        english: dict[str, str] = {}
        for language, form, concept in self.rows:
            if language in UNSPACED:
                self._runs.setdefault(language, {}).setdefault(form, concept)
            elif form.endswith("*"):
                self._add_stem(language, form[:-1], concept)
            elif len(pair := tuple(tokens(form))) == 2:
                seconds = self._phrases.setdefault(pair[0], {})
                seconds[pair[1]] = (*seconds.get(pair[1], ()), (language, concept))
            else:
                self._add_exact(language, form, concept)
                if language == "en":
                    english.setdefault(form, concept)
        for language, form, concept in self.rows:
            plain = form.translate(_ACCENTS)  # people leave accents out, but "que" isn't "qué" where it's a word itself
            if plain != form and language not in UNSPACED and not form.endswith("*") and len(tokens(form)) == 1:
                self._add_exact(language, plain, concept)
        for key, stems in self._stems.items():
            if len(key) == STEM_KEY:
                stems += self._stems.get(key[:SHORTEST_STEM], ())
            stems.sort(key=lambda stem: -len(stem[0]))
        self._languages = {word: tuple(known for known, _ in entry) for word, entry in self._exact.items()}
        self._lengths = {language: _lengths_by_first(forms) for language, forms in self._runs.items()}
        self._english = frozenset(form for language, form, concept in self.rows if (language, concept) == ("en", "fn"))
        # Most prompts are English: everything about a word in one look-up.
        starts = dict.fromkeys(self._phrases, "")
        self._english_meanings = self._meanings(starts | _misspellings(english) | self._concepts_in("en"))
        # In text of an unspaced language, words of all others mean the same, since none of them is in its own language.
        self._foreign_meanings = self._meanings(starts | self._concepts_in("zh"))

    def _add_exact(self, language: str, form: str, concept: str) -> None:
        entry = self._exact.get(form, ())
        if not any(known == language for known, _ in entry):
            self._exact[form] = (*entry, (language, concept))

    def _add_stem(self, language: str, stem: str, concept: str) -> None:
        for variant in {stem, stem.translate(_ACCENTS)}:
            self._stems.setdefault(variant[:STEM_KEY], []).append((variant, language, concept))

    def _concepts_in(self, language: str) -> dict[str, str]:
        resolved = {word: _resolve(entry, language) for word, entry in self._exact.items()}
        return {word: concept for word, concept in resolved.items() if concept}

    def _meanings(self, concepts: Mapping[str, str]) -> dict[str, Meaning]:
        phrases = self._phrases
        return {
            word: ("" if concept == FUNCTION_WORD else concept, phrases.get(word))
            for word, concept in concepts.items()
            if concept or word in phrases
        }

    def resolve(self, text: str, words: Sequence[str]) -> tuple[str, Mapping[str, Meaning]]:
        """The language of `words` ("en" if none speaks up), by script, then by votes, and what the words mean in it."""
        if not text.isascii() and (language := _unspaced_language(text, words)):
            return language, self._foreign_meanings
        distinct = set(words)
        english = len(distinct & self._english)
        if english * 5 >= len(distinct):
            return "en", self._english_meanings
        # In reading order: a tie between languages goes to the one that spoke first, in every process.
        return self._by_votes(dict.fromkeys(words), english)

    def _by_votes(self, distinct: Iterable[str], english: int) -> tuple[str, Mapping[str, Meaning]]:
        exact, stems = self._exact, self._stems
        votes = Counter({"en": english})
        votes.update(chain.from_iterable(filter(None, map(self._languages.get, distinct))))
        # A stem of another language matches by chance too often ("completo", "complete"): it speaks for its own only.
        unknown = [
            word
            for word in distinct
            if word not in exact
            and (
                word[:STEM_KEY] in stems
                or word[:SHORTEST_STEM] in stems
                or CLITIC_RANGE[0] <= word[0] <= CLITIC_RANGE[1]
            )
        ]
        rival = max((count for known, count in votes.items() if known not in ("en", "universal")), default=0)
        if votes["en"] - rival >= len(unknown):  # English whatever these say
            return "en", self._english_meanings
        stemmed = [(word, entry) for word in unknown if (entry := self._stem(word) or self._bare(word))]
        votes.update(known for _, entry in stemmed for known, _ in entry)
        votes.pop("universal", None)
        language = max(votes, key=lambda known: (votes[known], known == "en"))
        if language == "en":
            return "en", self._english_meanings
        concepts = {word: _resolve(exact.get(word, ()), language) for word in distinct}
        for word, entry in stemmed:
            for known, concept in entry:
                if known == language:
                    concepts[word] = concept
        return language, self._meanings(concepts)

    def concepts(self, words: Sequence[str], language: str, meanings: Mapping[str, Meaning]) -> list[str]:
        """The concepts of `words` in reading order, by what `resolve` said of them."""
        found: list[str] = []
        meaning_of, runs = meanings.get, self._runs.get(language)
        seconds: Mapping[str, Entry] | None = None  # what may follow the last word to make a phrase
        last_hit = False
        for word in words:
            if runs is not None and word[0] >= UNSPACED_FROM:
                self._scan(word, language, runs, found)
                seconds, last_hit = None, False
                continue
            meaning = meaning_of(word)
            if seconds is None:
                if meaning is None:
                    last_hit = False
                    continue
                concept, seconds = meaning
            else:
                phrase = _resolve(seconds[word], language) if word in seconds else ""
                concept, seconds = meaning or _NOTHING
                if phrase:
                    concept = phrase if phrase != FUNCTION_WORD else ""
                    if last_hit:
                        found.pop()
            last_hit = concept != ""
            if last_hit:
                found.append(concept)
        return found

    def _stem(self, word: str) -> Entry:
        stems = self._stems.get(word[:STEM_KEY]) or self._stems.get(word[:SHORTEST_STEM])
        if stems is None:
            return ()
        hits: dict[str, str] = {}
        for stem, language, concept in stems:
            if language not in hits and word.startswith(stem):
                hits[language] = concept
        return tuple(hits.items())

    def _bare(self, word: str) -> Entry:
        """The entry of an Arabic or Hebrew word without the clitics before it."""
        if not CLITIC_RANGE[0] <= word[0] <= CLITIC_RANGE[1]:
            return ()
        for _ in range(3):
            if len(word) < 3 or word[0] not in CLITICS:
                return ()
            word = word[1:]
            if entry := self._exact.get(word) or self._stem(word):
                return entry
        return ()

    def _scan(self, run: str, language: str, forms: dict[str, str], found: list[str]) -> None:
        lengths, position, end = self._lengths[language], 0, len(run)
        while position < end:
            step = 1
            for length in lengths.get(run[position], ()):
                concept = forms.get(run[position : position + length])
                if concept is not None:
                    step = length
                    if concept != FUNCTION_WORD:
                        found.append(concept)
                    break
            position += step


def _resolve(entry: Entry, language: str) -> str:
    """The concept of an entry for a text in `language`; English text never takes another language's meaning."""
    for known, concept in entry:
        if known == language:
            return concept
    for known, concept in entry:
        if known == "universal" or (language != "en" and concept != FUNCTION_WORD):
            return concept
    return ""


def _unspaced_language(text: str, words: Iterable[str]) -> str:
    if not _UNSPACED_CHARS.search(text):
        return ""
    if _KANA.search(text):
        return "ja"
    if _HANGUL.search(text):
        return "ko"
    if _THAI.search(text):
        return "th"
    return "zh" if any(word[0] >= "\u3400" for word in words) else ""


def _lengths_by_first(forms: dict[str, str]) -> dict[str, tuple[int, ...]]:
    lengths: dict[str, set[int]] = {}
    for form in forms:
        lengths.setdefault(form[0], set()).add(len(form))
    return {first: tuple(sorted(sizes, reverse=True)) for first, sizes in lengths.items()}


def _misspellings(concepts: dict[str, str]) -> dict[str, str]:
    """One dropped, doubled or swapped letter of each long English word; shorter ones would collide with real words."""
    typos: dict[str, str] = {}
    for word, concept in concepts.items():
        if len(word) < 6 or concept == FUNCTION_WORD or not word.isalpha():
            continue
        for i in range(1, len(word)):
            dropped = word[:i] + word[i + 1 :]
            doubled = word[:i] + word[i] + word[i:]
            swapped = word[: i - 1] + word[i] + word[i - 1] + word[i + 1 :] if i > 1 else dropped
            for typo in (dropped, doubled, swapped):
                if typo not in concepts:
                    typos.setdefault(typo, concept)
    return typos


# Latin to Indic letters with their combining marks, then scripts without spaces; a mixed "Python関数" gives two tokens.
_SPACED = r"[0-9a-z_\u00aa-\u024f\u0300-\u0dff\u1e00-\u1fff]+"
_UNSPACED = r"[\u0e00-\u0e7f\u1100-\u11ff\u3005-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
_TOKEN = re.compile(rf"{_SPACED}(?:\+\+|#)?|{_UNSPACED}")
# The same where "c++" and "c#" can't occur; looking for them after every word takes as long as all the rest.
_PLAIN_TOKEN = re.compile(f"{_SPACED}|{_UNSPACED}")
_PLAIN_ASCII_TOKEN = re.compile("[0-9a-z_]+")


def tokens(text: str) -> list[str]:
    """The words of lower-case `text`, in order; runs of unspaced scripts come as one word."""
    if "#" in text or "++" in text:
        return _TOKEN.findall(text)
    return (_PLAIN_ASCII_TOKEN if text.isascii() else _PLAIN_TOKEN).findall(text)
