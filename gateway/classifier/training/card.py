"""The card beside an artifact: what it was trained on, under which licences, and what it scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.classifier.features import FEATURES_VERSION
from gateway.classifier.model import ARTIFACT_VERSION, ModelArrays
from gateway.classifier.training.dataset import Example
from gateway.classifier.training.fit import is_generated

ARTIFACT_NAME = "classifier.npz"
CARD_NAME = "README.md"
NO_SCORES = "Not measured yet: run `medusa-gateway classifier eval --data FILE --card DIR`."


def facts(examples: Sequence[Example]) -> dict[str, Any]:
    """What the card needs to know of the training data; stored in the artifact."""
    sources: dict[str, dict[str, Any]] = {}
    for example in examples:
        name = "generated" if is_generated(example) else example.source
        source = sources.setdefault(name, {"licences": set(), "labels": Counter(), "languages": Counter()})
        source["licences"].add(example.licence)
        source["labels"][example.label] += 1
        source["languages"][example.lang] += 1
    return {
        "examples": len(examples),
        "sources": {
            name: {
                "licences": sorted(source["licences"]),
                "labels": dict(sorted(source["labels"].items())),
                "languages": dict(sorted(source["languages"].items())),
            }
            for name, source in sorted(sources.items())
        },
    }


def render(arrays: ModelArrays, scores: str = NO_SCORES) -> str:
    """The card as Markdown."""
    about = arrays.about
    sources = about.get("sources", {})
    right = 100 * about.get("certain_accuracy", 0)
    held_out = ", ".join(f"{name} {value:.3f}" for name, value in about.get("held_out", {}).items())
    held_out = held_out and f"\n- Macro-F1 on unseen sources (five folds of whole sources): {held_out}."
    temperatures = ", ".join(f"{group} {value:.2f}" for group, value in arrays.temperatures.items())
    rows = [
        f"| {name} | {', '.join(s['licences'])} | {_counts(s['labels'])} | {_counts(s['languages'])} |"
        for name, s in sources.items()
    ]
    table = "\n".join(["| source | licence | labels | languages |", "|---|---|---|---|", *rows])
    return f"""# Prompt classifier

Says which form of answer a prompt asks for: {", ".join(arrays.labels)}. Code to be run or read is `code`; verse,
story, role-play, slogans and scripts are `creative`; everything else is `chat`, a question in prose about code
included. (An artifact trained on other labels follows its own data.)

- Artifact version {ARTIFACT_VERSION}, features version {FEATURES_VERSION}; plain arrays in `{ARTIFACT_NAME}`, read
  without pickle.
- Logistic regression over {len(arrays.keys)} features: words, concepts of a multilingual lexicon, structure.
- Calibrated on held-out sources, temperatures by language: {temperatures}. `uncertain` below a probability of
  {arrays.uncertain_below:.2f}: {100 * about.get("uncertain", 0):.0f}% of the prompts of unseen sources,
  {right:.1f}% right among the others; calibration error {about.get("calibration_error", 0):.3f}.{held_out}

## Data

{arrays.about.get("examples", 0)} prompts. They are not in this repository; the templates of the generated ones are.

{table}

## Scores

{scores}

The `data only` baseline trains on the data alone, the others on data and generated prompts. The sets are written by
hand and lie beside this card under `eval/`; no model trains on them. `tricky` and `multilingual` were looked at while
templates and lexicon grew, as were the errors on held-out sources; the `_fresh` sets were only ever scored.
`unseen sources` pools, for each source, the predictions of a model that saw nothing of it, and `unseen languages` does
so for languages; a language that is held out keeps its lexicon file, since the lexicon is not learned. A language with
few rows of one label has a jumpy macro-F1: read the row counts.

## Limits

- It reads the head and tail of a long prompt; in the middle it sees questions and short paragraphs only.
- Role-play in a real profession (an accountant, a tutor) is `chat`, a fictional or historical persona is
  `creative`; the line is thin, and such prompts are where it errs most.
- Languages without a lexicon file fall back on structure and on words shared with others.
"""


def write_card(arrays: ModelArrays, directory: Path, scores: str = NO_SCORES) -> Path:
    """Writes the card into `directory`."""
    path = directory / CARD_NAME
    path.write_text(render(arrays, scores), encoding="utf-8")
    return path


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
