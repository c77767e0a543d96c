"""Training with scikit-learn: a multinomial logistic regression over feature blocks, calibrated on held-out sources.

The labels are whatever the data says. Generated prompts join only when the data's labels are the built-in three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from scipy.sparse import csr_array
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score

from gateway.classifier.features import GROUP, GROUPS, extract
from gateway.classifier.lexicon import Lexicon, read_lexicon, tokens
from gateway.classifier.model import ModelArrays
from gateway.classifier.training.dataset import DataError, Example, shipped_sets
from gateway.classifier.training.generator import DEFAULT_COUNT, LABELS, PromptGenerator

MIN_COUNT = 2
"""Prompts that a feature must occur in; once-only words are noise and weight in the artifact."""
LONG_PROMPT = 1_024
"""Characters of the last message from which on a prompt is scored as a long one too."""
C = 2.0
MAX_ITERATIONS = 300
GENERATED_WEIGHT = 0.5
"""Of a generated prompt, against 1 of a real one: there are many, and they resemble each other."""
UNSEEN_LABEL_BIAS = -30.0
"""Score of a label that a fold's training rows lack."""
CALIBRATION_FOLDS = 5
MIN_GROUP = 100
"""Held-out rows from which on a calibration group has a temperature of its own."""
LEXICAL = frozenset("wbxhg")
"""Families of one language's words and letters, as against concepts and structure."""
LEXICAL_DROPOUT = 0.3
"""Share of generated prompts that train without lexical features, so that concepts alone must carry the label;
otherwise the few words of the templates would carry it, and unseen words and languages would be lost."""
CERTAIN_ACCURACY = 0.97
"""The threshold of `uncertain` is the lowest that leaves the others this accurate ..."""
MAX_UNCERTAIN = 0.2
"""... but never calls more than this share of the calibration prompts uncertain."""


@dataclass(frozen=True, slots=True)
class FeatureMatrix:
    """Examples as rows; columns are the keys that occur often enough."""

    examples: Sequence[Example]
    keys: tuple[tuple[str, str], ...]
    x: csr_array  # [examples, keys]
    labels: tuple[str, ...]
    y: np.ndarray  # [examples], index into labels
    groups: np.ndarray  # [examples], calibration group (features.GROUPS)

    @classmethod
    def of(cls, examples: Sequence[Example], lexicon: Lexicon) -> FeatureMatrix:
        """Extracts features of all `examples`."""
        index: dict[tuple[str, str], int] = {}
        data: list[float] = []
        columns: list[int] = []
        ends = [0]
        groups: list[str] = []
        for example in examples:
            values: dict[int, float] = {}
            # crc32 of the id: the same choice in every run, unlike hash().
            dropped = is_generated(example) and crc32(example.id.encode()) % 1000 < 1000 * LEXICAL_DROPOUT
            for family, weight, keys in extract(example.chat(), lexicon):
                if family == GROUP:
                    groups += keys
                    continue
                if dropped and family in LEXICAL:
                    continue
                for key in keys:
                    column = index.setdefault((family, key), len(index))
                    values[column] = values.get(column, 0.0) + weight
            columns += values
            data += values.values()
            ends.append(len(columns))
        x = csr_array((np.array(data, np.float32), columns, ends), shape=(len(examples), len(index)))
        frequent = np.flatnonzero(np.bincount(columns, minlength=len(index)) >= MIN_COUNT)
        keys = list(index)
        labels = tuple(sorted({example.label for example in examples}))
        y = np.array([labels.index(example.label) for example in examples])
        return cls(examples, tuple(keys[i] for i in frequent), x[:, frequent].tocsr(), labels, y, np.array(groups))

    def rows(self, rows: np.ndarray) -> csr_array:
        """Some of the examples' rows."""
        return csr_array(self.x[rows])


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A fitted linear model on the columns of a `FeatureMatrix`."""

    weights: np.ndarray  # [keys, labels]
    bias: np.ndarray  # [labels]

    def logits(self, x: csr_array) -> np.ndarray:
        """Scores [rows, labels]."""
        return np.asarray(x @ self.weights) + self.bias


def is_generated(example: Example) -> bool:
    """Whether the example came from the generator."""
    return example.source.startswith("generated_")


def sample_weights(examples: Sequence[Example], generated_weight: float = GENERATED_WEIGHT) -> np.ndarray:
    """One weight an example: labels balance out within real data, generated prompts are balanced already."""
    counts = Counter(e.label for e in examples if not is_generated(e))
    mean = sum(counts.values()) / max(len(counts), 1)
    return np.array([generated_weight if is_generated(e) else mean / counts[e.label] for e in examples])


def fit_weights(
    matrix: FeatureMatrix, rows: np.ndarray, c: float = C, generated_weight: float = GENERATED_WEIGHT
) -> LinearWeights:
    """Fits on some rows of the matrix. Two labels get symmetric weights, so that inference knows one form only."""
    weight = sample_weights([matrix.examples[i] for i in rows.tolist()], generated_weight)
    model = LogisticRegression(C=c, max_iter=MAX_ITERATIONS, tol=1e-3)
    model.fit(matrix.rows(rows), matrix.y[rows], sample_weight=weight)
    coefficients, intercept, known = (np.asarray(part) for part in (model.coef_, model.intercept_, model.classes_))
    size = len(matrix.labels)
    weights, bias = np.zeros((len(matrix.keys), size)), np.full(size, UNSEEN_LABEL_BIAS)
    if len(known) == 2:
        weights[:, known], bias[known] = np.outer(coefficients[0], (-0.5, 0.5)), intercept[0] * np.array((-0.5, 0.5))
    else:
        weights[:, known], bias[known] = coefficients.T, intercept
    return LinearWeights(weights, bias)


def folds_by_source(examples: Sequence[Example], folds: int = CALIBRATION_FOLDS) -> np.ndarray:
    """A fold number an example: whole sources stay together; rows spread out where the data names one source only."""
    counts = Counter(example.source for example in examples)
    if len(counts) < 2:
        return np.arange(len(examples)) % folds
    sizes = [0] * folds
    fold_of: dict[str, int] = {}
    for source, count in counts.most_common():
        fold_of[source] = sizes.index(min(sizes))
        sizes[fold_of[source]] += count
    return np.array([fold_of[example.source] for example in examples])


@dataclass(frozen=True, slots=True)
class Calibration:
    """How scores become probabilities, and what came of it on prompts of sources that the model had not seen."""

    temperatures: dict[str, float]
    """By calibration group."""
    uncertain_below: float
    uncertain: float
    """Share of prompts below the threshold."""
    certain_accuracy: float
    """Share of right answers among the others."""
    error: float
    """Expected calibration error over ten bins."""


def calibrate(logits: np.ndarray, y: np.ndarray, groups: np.ndarray | None = None) -> Calibration:
    """The temperature of each group that fits held-out logits best, and the threshold of `uncertain`.

    A group of too few rows takes the temperature of all rows outside English, or of all rows if those are few too.
    """
    groups = np.full(len(y), GROUPS[0]) if groups is None else groups
    overall = _temperature(logits, y)
    foreign = groups != "en"
    fallback = _temperature(logits[foreign], y[foreign]) if foreign.sum() >= MIN_GROUP else overall
    temperatures = {}
    for group in GROUPS:
        rows = groups == group
        few = overall if group == "en" else fallback
        temperatures[group] = _temperature(logits[rows], y[rows]) if rows.sum() >= MIN_GROUP else few
    scales = np.array([temperatures[group] for group in groups.tolist()])
    probabilities = softmax(logits / scales[:, None])
    best = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == y
    below = 0.95
    for threshold in np.arange(0.40, 0.96, 0.01):
        certain = best >= threshold
        if certain.mean() < 1 - MAX_UNCERTAIN:
            below = float(threshold) - 0.01
            break
        if right[certain].mean() >= CERTAIN_ACCURACY:
            below = float(threshold)
            break
    below = round(below, 2)
    certain = best >= below
    accuracy = float(right[certain].mean()) if certain.any() else 0.0
    return Calibration(temperatures, below, float(1 - certain.mean()), accuracy, expected_error(best, right))


def expected_error(best: np.ndarray, right: np.ndarray) -> float:
    """Expected calibration error: how far probability and accuracy are apart, over ten bins of the probability."""
    bins = np.minimum((best * 10).astype(int), 9)
    gaps = [abs(float(best[bins == b].sum() - right[bins == b].sum())) for b in range(10)]
    return sum(gaps) / max(len(best), 1)


def _temperature(logits: np.ndarray, y: np.ndarray) -> float:
    temperatures = np.geomspace(0.3, 5.0, 60)
    losses = [-np.mean(np.log(softmax(logits / t)[np.arange(len(y)), y] + 1e-12)) for t in temperatures]
    return float(temperatures[int(np.argmin(losses))])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities [rows, labels] of scores."""
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def with_generated(examples: Sequence[Example], count: int | None, seed: int = 0) -> list[Example]:
    """Adds generated prompts: `count` of them, or the default number when the labels are the built-in three."""
    builtin = {example.label for example in examples} <= set(LABELS)
    if count is None:
        count = DEFAULT_COUNT if builtin else 0
    if count and not builtin:
        labels = ", ".join(sorted({example.label for example in examples}))
        raise DataError(
            f"generated prompts have the labels {', '.join(LABELS)}, the data has {labels}; use --generated 0"
        )
    if not count:
        return list(examples)
    # A template may give a prompt of the evaluation sets by chance; those sets stay unseen.
    unseen = {plain_text(e) for rows in shipped_sets().values() for e in rows}
    generated = distinct(PromptGenerator().generate(count, seed))
    return [*examples, *(e for e in generated if plain_text(e) not in unseen)]


def plain_text(example: Example) -> str:
    """The last message without case and punctuation, to compare prompts by."""
    return " ".join(tokens(example.messages[-1][1].lower()))


def distinct(examples: Sequence[Example]) -> list[Example]:
    """Without repeated prompts; the first of each stays."""
    return list({example.messages: example for example in reversed(examples)}.values())[::-1]


def train(examples: Sequence[Example], about: dict[str, Any] | None = None, c: float = C) -> ModelArrays:
    """Trains and calibrates a classifier on `examples` as they are."""
    rows = read_lexicon()
    matrix = FeatureMatrix.of(examples, Lexicon(rows))
    if len(matrix.labels) < 2:
        raise DataError(f"the data has one label only ({', '.join(matrix.labels)}); give examples of at least two")
    every = np.arange(len(examples))
    # Generated sources are easy to predict from each other and would make the model look surer than it is.
    real = np.array([not is_generated(e) for e in examples])
    logits, positions = held_out_logits(matrix, real, c)
    calibration = calibrate(logits, matrix.y[positions], matrix.groups[positions])
    final = fit_weights(matrix, every, c)
    used = np.flatnonzero(np.abs(final.weights).max(axis=1) > 1e-3)
    weights = np.zeros((len(used) + 1, len(matrix.labels)), np.float32)
    weights[1:] = final.weights[used]
    return ModelArrays(
        labels=matrix.labels,
        keys=tuple(matrix.keys[i] for i in used),
        weights=weights,
        bias=final.bias.astype(np.float32),
        temperatures=calibration.temperatures,
        uncertain_below=calibration.uncertain_below,
        lexicon=tuple(rows),
        about=(about or {})
        | {
            "uncertain": round(calibration.uncertain, 4),
            "certain_accuracy": round(calibration.certain_accuracy, 4),
            "calibration_error": round(calibration.error, 4),
            "held_out": held_out_scores(logits, [examples[i] for i in positions.tolist()], matrix.labels),
        },
    )


def held_out_scores(logits: np.ndarray, examples: Sequence[Example], labels: Sequence[str]) -> dict[str, float]:
    """Macro-F1 on prompts of sources that were not trained on: all, those outside English, long ones."""
    y = np.array([labels.index(e.label) for e in examples])
    slices = {
        "all": np.ones(len(y), bool),
        "not English": np.array([e.lang.split("-")[0] not in ("en", "unknown") for e in examples]),
        f"over {LONG_PROMPT:,} characters": np.array([len(e.messages[-1][1]) > LONG_PROMPT for e in examples]),
    }
    found = logits.argmax(axis=1)
    return {
        name: round(float(f1_score(y[rows], found[rows], labels=np.unique(y[rows]), average="macro")), 4)
        for name, rows in slices.items()
        if rows.any()
    }


def held_out_logits(matrix: FeatureMatrix, real: np.ndarray, c: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits of real examples, each from a model that saw none of its source, and which examples they are."""
    positions = np.flatnonzero(real) if real.any() else np.arange(len(real))
    folds = folds_by_source([matrix.examples[i] for i in positions.tolist()])
    logits = np.zeros((len(positions), len(matrix.labels)))
    for fold in np.unique(folds):
        held = positions[folds == fold]
        rows = np.setdiff1d(np.arange(len(real)), held)
        if len(np.unique(matrix.y[rows])) < 2:
            continue
        logits[folds == fold] = fit_weights(matrix, rows, c).logits(matrix.rows(held))
    return logits, positions
