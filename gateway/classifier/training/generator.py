"""Generates training prompts from templates and vocabulary, for what public data lacks.

The templates are data under assets/prompts: `{a|b}` chooses, `{slot}` fills in, `<<material>>` pastes code or prose.
Prompts come in adversarial families (a poem about a language, a function that prints a poem), so that no single word
gives the label away, in short and long, clean and mistyped, and in many languages.
Not covered: conversations longer than two turns, and languages without a template file (the lexicon carries those).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gateway.classifier.training.dataset import Example
from gateway.classifier.training.pastes import paste, place

PROMPTS_DIR = Path(__file__).parent.parent / "assets" / "prompts"
LABELS = ("chat", "code", "creative")
LICENCE = "Apache-2.0"
DEFAULT_COUNT = 72_000
KINDS_SHARE = 0.42
"""Share of prompts by the templates of kinds/, in the languages that have them: what people paste, in plain words."""
PASTE_SHARE = 0.3
"""Share of those that come with a long paste."""
CONSTRAINT_SHARE = 0.12
"""Share of the others that end with a wish about the form, such as "no commas", which says nothing of the class."""
LISTS = ("ask.", "system", "turn.")
"""Sections with these names are lists of values, as are "sentence", "article", "follow" and what `paste` joins."""

_CHOICE = re.compile(r"\{([^{}]*)\}")
_MATERIAL = re.compile(r"<<(\w+)>>")
_ENGLISH_SHARE = 0.5
_SHARES = {"zh": 3.0, "es": 1.5, "fr": 1.5, "de": 1.5}
"""How much of what is left a language gets, where others get 1: those with more templates have more to show."""
_KEYS = "qwertyuiopasdfghjklzxcvbnm"


@dataclass(frozen=True, slots=True)
class Templates:
    """One language's templates and vocabulary."""

    language: str
    slots: dict[str, list[str]]
    sections: dict[str, list[str]] = field(default_factory=dict)


def parse_templates(language: str, text: str) -> Templates:
    """Reads a template file: [slots] lines of `name: a | b`, other [section]s of one template a line."""
    slots: dict[str, list[str]] = {}
    sections: dict[str, list[str]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif section == "slots" and line.strip():
            name, _, values = line.partition(":")
            slots[name.strip()] = _values(values)
        elif line.strip():
            sections.setdefault(section, []).append(line)
    for name in [*sections]:
        if name.startswith(LISTS) or name in (
            "sentence",
            "article",
            "follow",
            "subject",
            "verb",
            "clause",
            "constraint",
        ):
            slots[name] = _values(" | ".join(sections.pop(name)))
    return Templates(language, slots, sections)


def _values(text: str) -> list[str]:
    return [value.strip() for value in text.split(" | ") if value.strip()]


class PromptGenerator:
    """Deterministic for a seed; every language has its own stream, so leaving one out doesn't change the others."""

    def __init__(self, directory: Path = PROMPTS_DIR) -> None:
        shared = parse_templates("", (directory / "common.txt").read_text(encoding="utf-8")).slots
        self._snippets = (directory / "snippets.txt").read_text(encoding="utf-8").strip().split("\n---\n")
        self._templates: dict[str, Templates] = {}
        for path in sorted(directory.glob("??.txt")):
            parsed = parse_templates(path.stem, path.read_text(encoding="utf-8"))
            self._templates[path.stem] = Templates(path.stem, shared | parsed.slots, parsed.sections)
        self._kinds: dict[str, Templates] = {}
        for path in sorted((directory / "kinds").glob("??.txt")):
            parsed, base = parse_templates(path.stem, path.read_text(encoding="utf-8")), self._templates[path.stem]
            self._kinds[path.stem] = Templates(path.stem, base.slots | parsed.slots, parsed.sections)
        self.languages = tuple(self._templates)

    def generate(self, count: int = DEFAULT_COUNT, seed: int = 0, leave_out: str = "") -> list[Example]:
        """About `count` examples, balanced over labels; `leave_out` names a language to skip."""
        others = sum(_SHARES.get(language, 1.0) for language in self.languages if language != "en")
        examples: list[Example] = []
        for language in self.languages:
            share = _ENGLISH_SHARE
            if language != "en":
                share = (1 - _ENGLISH_SHARE) * _SHARES.get(language, 1.0) / others
            if language != leave_out:
                examples += self._stream(language, round(count * share), random.Random(f"{seed}/{language}"))
        return examples

    def _stream(self, language: str, count: int, rng: random.Random) -> Iterator[Example]:
        templates = self._templates[language]
        for index in range(count):
            label = LABELS[index % len(LABELS)]
            yield self._example(templates, label, f"generated/{language}/{index}", rng)

    def _example(self, templates: Templates, label: str, name: str, rng: random.Random) -> Example:
        kinds = self._kinds.get(templates.language)
        if kinds is not None and rng.random() < KINDS_SHARE:
            messages = self._of_kinds(kinds, label, rng)
        else:
            prompt = _disturb(self._prompt(templates, label, rng), templates.language, rng)
            messages = self._conversation(templates, label, prompt, rng)
        return Example(
            id=name,
            source=f"generated_{templates.language}",
            licence=LICENCE,
            label=label,
            lang=templates.language,
            messages=tuple(messages),
        )

    def _of_kinds(self, kinds: Templates, label: str, rng: random.Random) -> Iterator[tuple[str, str]]:
        def fill(text: str) -> str:
            return self._filled(text, kinds, rng)

        agent = rng.random() < 0.06
        if agent and label == "creative" and "turn.game" in kinds.slots:
            yield "system", fill(rng.choice(kinds.slots["system.game"]))
            yield "user", fill(rng.choice(kinds.slots["turn.game"]))
            return
        if agent and label == "code" and "system.agent" in kinds.slots:
            yield "system", fill(rng.choice(kinds.slots["system.agent"]))
        elif agent and label == "chat" and "system.tools" in kinds.slots:
            yield "system", fill(rng.choice(kinds.slots["system.tools"]))
            yield "user", fill(rng.choice(kinds.slots["errand2"]))
            return
        if rng.random() < PASTE_SHARE:
            # What is pasted is now and then in English, whatever the language of the question.
            slots = self._kinds["en"].slots if rng.random() < 0.15 else kinds.slots
            material = paste(slots, lambda text: self._filled(text, self._kinds["en"], rng), self._snippets, rng)
            ask = fill(rng.choice(kinds.slots[f"ask.{label}"]))
            if rng.random() < 0.15:
                ask = self._prompt(kinds, label, rng)
            yield "user", place(material, _disturb(ask, kinds.language, rng, typos=False), rng)
            return
        prompt = _disturb(self._prompt(kinds, label, rng), kinds.language, rng)
        if rng.random() < CONSTRAINT_SHARE:
            prompt += rng.choice((" ", " ", "\n\n")) + fill(rng.choice(kinds.slots["constraint"]))
        yield "user", prompt

    def _prompt(self, templates: Templates, label: str, rng: random.Random) -> str:
        return self._filled(rng.choice(templates.sections[label]), templates, rng)

    def _filled(self, text: str, templates: Templates, rng: random.Random) -> str:
        while match := _CHOICE.search(text):
            inner = match.group(1)
            if inner in templates.slots:
                chosen = rng.choice(templates.slots[inner])
            else:
                options = inner.split("|")
                chosen = rng.choice(options)
                # {lib|pl} chooses between slots.
                chosen = rng.choice(templates.slots[chosen]) if chosen in templates.slots else chosen
            text = text[: match.start()] + chosen + text[match.end() :]
        text = text.replace("\\n", "\n").strip()
        return _MATERIAL.sub(lambda match: self._material(match.group(1), templates, rng), text)

    def _material(self, kind: str, templates: Templates, rng: random.Random) -> str:
        if kind in ("code", "fence"):
            snippet = "\n".join(rng.choice(self._snippets) for _ in range(rng.choice((1, 1, 1, 2, 6))))
            tag = rng.choice(("", "python", "js", "sql", "java"))
            return snippet if kind == "code" else f"```{tag}\n{snippet}\n```"
        if kind == "inline":
            lines = [line.strip() for snippet in self._snippets for line in snippet.split("\n") if len(line) > 8]
            return rng.choice(lines)
        if kind == "log":
            return "\n".join(
                f"2024-03-{rng.randint(10, 28)} {rng.choice(('INFO', 'WARN', 'ERROR'))} worker-{i} done"
                for i in range(rng.randint(2, 40))
            )
        if kind == "csv":
            return "name,city,price\n" + "\n".join(
                f"item{i},Oslo,{rng.randint(1, 99)}" for i in range(rng.randint(2, 40))
            )
        sentences = templates.slots["sentence" if kind == "story" else "article"]
        if kind == "paste":
            sentences = rng.choice((sentences, templates.slots["sentence"], sentences))
            return _paragraphs(sentences, rng.choice((6, 12, 40)), rng)
        return " ".join(rng.choice(sentences) for _ in range(rng.choice((1, 2, 3, 3, 5, 15))))

    def _conversation(
        self, templates: Templates, label: str, prompt: str, rng: random.Random
    ) -> Iterator[tuple[str, str]]:
        english = self._templates["en"].slots
        if rng.random() < 0.15:
            kind = rng.choice(("system", "system", f"system.{label}"))
            yield "system", rng.choice(english[kind])
        if rng.random() < 0.04 and templates.language == "en":
            # A follow-up that says little alone: the earlier turn gives the class.
            yield "user", prompt
            answer = {"code": "```\nx = 1\n```", "creative": "The rain fell softly.", "chat": "Here is an answer."}[
                label
            ]
            yield "assistant", answer
            yield "user", rng.choice(english["follow"])
            return
        if rng.random() < 0.05:
            other = rng.choice(LABELS)
            yield "user", self._prompt(templates, other, rng)
            yield "assistant", "```\nx = 1\n```" if other == "code" else "Sure."
        yield "user", prompt


def _paragraphs(sentences: list[str], count: int, rng: random.Random) -> str:
    chosen = [rng.choice(sentences) for _ in range(count)]
    return "\n".join(" ".join(chosen[i : i + 4]) for i in range(0, count, 4))


def _disturb(prompt: str, language: str, rng: random.Random, typos: bool = True) -> str:
    """What people do to a prompt: no capitals, no full stop, a greeting, a typo."""
    if rng.random() < 0.25:
        prompt = prompt.lower()
    if rng.random() < 0.2:
        prompt = prompt.rstrip(".?!。？")
    if language == "en":
        if rng.random() < 0.06:
            prompt = rng.choice(("Hi! ", "hey, ", "Hello. ", "Please ", "ok so ", "Quick question: ")) + prompt
        if rng.random() < 0.08:
            prompt += rng.choice(
                (
                    " Answer in at least 300 words.",
                    " Do not use any commas.",
                    " Keep it under 100 words.",
                    " Your entire response should be in lowercase.",
                    " Use JSON for the answer.",
                    " End with a postscript.",
                    " Wrap your answer in double quotes.",
                    " Highlight three sections with markdown.",
                    " Thanks!",
                )
            )
        if typos and rng.random() < 0.12 and len(prompt) < 200:
            prompt = _typos(prompt, rng)
    return prompt


def _typos(text: str, rng: random.Random) -> str:
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = [i for i in range(1, len(text) - 1) if text[i].isalpha() and text[i - 1].isalpha()]
        if not places:
            return text
        i = rng.choice(places)
        text = rng.choice(
            (
                text[:i] + text[i + 1 :],
                text[:i] + text[i + 1] + text[i] + text[i + 2 :],
                text[:i] + rng.choice(_KEYS) + text[i + 1 :],
                text[:i] + text[i] + text[i:],
            )
        )
    return text
