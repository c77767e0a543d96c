"""Scores on what a model has not seen: whole sources and languages held out, next to a TF-IDF baseline.

Random rows are never held out: prompts of one source resemble each other, and a random split would only measure that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from scipy.sparse import csr_array
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score

from gateway.classifier.lexicon import Lexicon, read_lexicon
from gateway.classifier.training.dataset import DataError, Example, shipped_sets
from gateway.classifier.training.earlier import Earlier
from gateway.classifier.training.fit import LONG_PROMPT, C, FeatureMatrix, fit_weights, is_generated
from gateway.classifier.training.generator import LABELS

MIN_LANGUAGE_ROWS = 3

Predictor = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(rows to train on, rows to predict) -> label indices."""
Systems = dict[str, tuple[Predictor, np.ndarray]]
"""Predictors by name, each with the rows that it may train on."""


class Matrix(Protocol):
    """What the scoring needs to know of the data."""

    @property
    def examples(self) -> Sequence[Example]: ...
    @property
    def labels(self) -> tuple[str, ...]: ...
    @property
    def y(self) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Score:
    """Scores of the systems on one slice of the data."""

    name: str
    rows: int
    macro_f1: dict[str, float]
    accuracy: dict[str, float]


@dataclass(frozen=True, slots=True)
class Report:
    """The tables of one evaluation run."""

    systems: tuple[str, ...]
    overall: list[Score] = field(default_factory=list)
    sources: list[Score] = field(default_factory=list)
    languages: list[Score] = field(default_factory=list)

    def markdown(self) -> str:
        """The tables as Markdown, for the terminal and the card."""
        parts = [_table("Macro-F1", self.overall, self.systems, "macro_f1")]
        parts.append(_table("Leave one source out: accuracy per source", self.sources, self.systems, "accuracy"))
        if self.languages:
            parts.append(
                _table("Leave one language out: macro-F1 per language", self.languages, self.systems, "macro_f1")
            )
        return "\n\n".join(parts)


def evaluate(
    examples: Sequence[Example], progress: Callable[[str], None] = lambda _: None, before: Path | None = None
) -> Report:
    """Scores classifier and baselines on `examples` and, if they have the built-in labels, on the shipped sets.

    With `before`, a checkout of an earlier version, that version stands beside it in place of the baselines.
    """
    builtin = {e.label for e in examples} <= set(LABELS)
    shipped = shipped_sets() if builtin else {}
    every = [*examples, *(e for rows in shipped.values() for e in rows)]
    matrix = FeatureMatrix.of(every, Lexicon(read_lexicon()))
    generated = np.array([is_generated(e) for e in every])
    test = np.arange(len(every)) >= len(examples)
    real = ~test & ~generated
    if len({e.source for e in examples if not is_generated(e)}) < 2:
        raise DataError('the data has one source only; give the lines "source"s, so that whole sources can be held out')
    if before is not None:
        earlier = Earlier(before, every, matrix.labels)
        try:
            systems = {"before": (earlier.predict, ~test), "now": (_linear(matrix), ~test)}
            return _report(matrix, systems, real, generated, shipped, progress)
        finally:
            earlier.close()
    systems = {"classifier": (_linear(matrix), ~test), "TF-IDF, data only": (_baseline(matrix, real), real)}
    if generated.any():
        systems["TF-IDF, data + generated"] = (_baseline(matrix, ~test), ~test)
    return _report(matrix, systems, real, generated, shipped, progress)


def _report(
    matrix: FeatureMatrix,
    systems: Systems,
    real: np.ndarray,
    generated: np.ndarray,
    shipped: dict[str, list[Example]],
    progress: Callable[[str], None],
) -> Report:
    every = matrix.examples
    report = Report(tuple(systems))
    _by_source(report, matrix, systems, real, progress)
    if shipped:
        # One model serves all sets, since none of them trains.
        progress("shipped sets")
        test = np.flatnonzero([e.source in {rows[0].source for rows in shipped.values()} for e in every])
        predicted = {name: predict(np.flatnonzero(usable), test) for name, (predict, usable) in systems.items()}
        for name, rows in shipped.items():
            chosen = np.array([every[i].source == rows[0].source for i in test.tolist()])
            scores = {system: labels[chosen] for system, labels in predicted.items()}
            report.overall.append(_score(f"{name} set", matrix, test[chosen], scores))
        _slices(report, "kind sets", matrix, test, predicted, lambda e: e.source.startswith("eval_kind_"))
    if shipped:
        _by_language(report, matrix, systems, ~generated, progress)
    return report


def _by_source(
    report: Report, matrix: Matrix, systems: Systems, real: np.ndarray, progress: Callable[[str], None]
) -> None:
    sources = np.array([e.source for e in matrix.examples])
    predicted = {name: np.zeros(len(sources), int) for name in systems}
    for source in sorted(set(sources[real])):
        progress(f"without source {source}")
        held = np.flatnonzero(real & (sources == source))
        for name, (predict, usable) in systems.items():
            predicted[name][held] = predict(np.flatnonzero(usable & (sources != source)), held)
        report.sources.append(_score(source, matrix, held, {name: rows[held] for name, rows in predicted.items()}))
    rows = np.flatnonzero(real)
    _slices(report, "unseen sources", matrix, rows, {name: p[rows] for name, p in predicted.items()})


def _slices(
    report: Report,
    name: str,
    matrix: Matrix,
    rows: np.ndarray,
    predicted: dict[str, np.ndarray],
    among: Callable[[Example], bool] = lambda _: True,
) -> None:
    """Scores of all of `rows`, of those outside English, and of those with a long last message."""
    slices: dict[str, Callable[[Example], bool]] = {
        name: lambda e: True,
        f"{name}, not English": lambda e: e.lang.split("-")[0] not in ("en", "unknown"),
        f"{name}, over {LONG_PROMPT:,} characters": lambda e: len(e.messages[-1][1]) > LONG_PROMPT,
    }
    for title, fits in slices.items():
        examples = [matrix.examples[i] for i in rows.tolist()]
        chosen = np.array([among(e) and fits(e) for e in examples])
        if chosen.any():
            report.overall.append(_score(title, matrix, rows[chosen], {n: p[chosen] for n, p in predicted.items()}))


def _by_language(
    report: Report, matrix: Matrix, systems: Systems, real: np.ndarray, progress: Callable[[str], None]
) -> None:
    languages = np.array([e.lang.split("-")[0] for e in matrix.examples])
    pooled: dict[str, list[np.ndarray]] = {name: [] for name in systems}
    pooled_rows: list[np.ndarray] = []
    for language in sorted(set(languages[real]) - {"en", "unknown"}):
        held = np.flatnonzero(real & (languages == language))
        if len(held) < MIN_LANGUAGE_ROWS:
            continue
        progress(f"without language {language}")
        predicted = {}
        for name, (predict, usable) in systems.items():
            predicted[name] = predict(np.flatnonzero(usable & (languages != language)), held)
            pooled[name].append(predicted[name])
        pooled_rows.append(held)
        report.languages.append(_score(language, matrix, held, predicted))
    if pooled_rows:
        rows = np.concatenate(pooled_rows)
        report.overall.append(
            _score("unseen languages", matrix, rows, {n: np.concatenate(p) for n, p in pooled.items()})
        )


def _linear(matrix: FeatureMatrix) -> Predictor:
    def predict(train: np.ndarray, held: np.ndarray) -> np.ndarray:
        if len(np.unique(matrix.y[train])) < 2:
            return np.full(len(held), matrix.y[train[0]])
        return fit_weights(matrix, train, C).logits(matrix.rows(held)).argmax(axis=1)

    return predict


def _baseline(matrix: FeatureMatrix, usable: np.ndarray) -> Predictor:
    """Word 1-2-grams and a logistic regression, balanced over labels: the usual first thing to try."""
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
    texts = [example.text() for example in matrix.examples]
    vectorizer.fit([text for text, fits in zip(texts, usable.tolist(), strict=True) if fits])
    x = csr_array(vectorizer.transform(texts))

    def predict(train: np.ndarray, held: np.ndarray) -> np.ndarray:
        if len(np.unique(matrix.y[train])) < 2:
            return np.full(len(held), matrix.y[train[0]])
        model = LogisticRegression(C=10.0, max_iter=200, tol=1e-3, class_weight="balanced")
        model.fit(x[train], matrix.y[train])
        return np.asarray(model.predict(x[held]))

    return predict


def _score(name: str, matrix: Matrix, held: np.ndarray, predicted: dict[str, np.ndarray]) -> Score:
    y = matrix.y[held]
    present = np.unique(y)
    f1 = {s: float(f1_score(y, p, labels=present, average="macro")) for s, p in predicted.items()}
    return Score(name, len(held), f1, {s: float((p == y).mean()) for s, p in predicted.items()})


def _table(title: str, scores: Sequence[Score], systems: Sequence[str], measure: str) -> str:
    lines = [f"### {title}", "", f"| | rows | {' | '.join(systems)} |", "|---|--:|" + "--:|" * len(systems)]
    for score in scores:
        values = getattr(score, measure)
        lines.append(f"| {score.name} | {score.rows} | " + " | ".join(f"{values[s]:.3f}" for s in systems) + " |")
    return "\n".join(lines)
