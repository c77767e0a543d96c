"""Inference: a linear model over feature blocks, read from plain arrays.

`PromptClassifier` is immutable after loading and safe to share between threads. Not covered: learning from live
traffic; the policy corrects a class by its measured acceptance, not here.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gateway.classifier.features import FEATURES_VERSION, GROUPS, Block, extract
from gateway.classifier.lexicon import Lexicon

ARTIFACT_VERSION = 2
DEFAULT_ARTIFACT = Path(__file__).parent / "assets" / "classifier.npz"

_FAMILY_NAMES = {
    "w": "word",
    "b": "words",
    "x": "stem",
    "h": "opening",
    "g": "characters",
    "c": "concept",
    "p": "concepts",
    "o": "asks for",
    "s": "structure",
    "e": "context",
    "i": "persona",
    "r": "pasted",
    "m": "around",
}


class ArtifactError(ValueError):
    """An artifact that can't be used; the message says which file, why and what to do."""


@dataclass(frozen=True, slots=True)
class FeatureScore:
    """One feature and how much it spoke for the label, in log-odds against the mean of all labels."""

    feature: str
    score: float


@dataclass(frozen=True, slots=True)
class Classification:
    """What a prompt was taken for."""

    label: str
    uncertain: bool
    """The probability is below the threshold that calibration chose; policies can match on it."""
    probabilities: dict[str, float]
    _model: PromptClassifier = field(repr=False, compare=False)
    _request: Sequence[Mapping[str, Any]] | str = field(repr=False, compare=False)

    def explain(self, limit: int = 8) -> list[FeatureScore]:
        """The features that spoke for the label, strongest first. Computed now; classifying doesn't pay for it."""
        return self._model.top_features(self._request, self.label, limit)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: label, uncertain, probabilities."""
        probabilities = {label: round(p, 6) for label, p in self.probabilities.items()}
        return {"label": self.label, "uncertain": self.uncertain, "probabilities": probabilities}


@dataclass(frozen=True, slots=True)
class ModelArrays:
    """Everything an artifact holds."""

    labels: tuple[str, ...]
    keys: tuple[tuple[str, str], ...]
    """(family, key) of weight rows 1, 2, ...; row 0 is zeros and stands for unknown keys."""
    weights: np.ndarray  # [len(keys) + 1, labels], float32
    bias: np.ndarray  # [labels], float32
    temperatures: dict[str, float]
    """By calibration group (`features.GROUPS`)."""
    uncertain_below: float
    lexicon: tuple[tuple[str, str, str], ...]
    about: dict[str, Any]
    """Free facts for the card: data, counts, scores."""


class PromptClassifier:
    """Classifies chat messages by the form of the expected answer."""

    def __init__(self, arrays: ModelArrays) -> None:
        self.labels = arrays.labels
        self.uncertain_below = arrays.uncertain_below
        self.about = arrays.about
        self._lexicon = Lexicon(arrays.lexicon)
        self._weights = arrays.weights
        self._bias = arrays.bias
        self._temperatures = arrays.temperatures
        self._index: dict[str, dict[str, int]] = {}
        for row, (family, key) in enumerate(arrays.keys, start=1):
            self._index.setdefault(family, {})[key] = row

    @classmethod
    def load(cls, path: Path | str | None = None) -> PromptClassifier:
        """Reads an artifact; without a path, the one that ships with the gateway."""
        return cls(load_arrays(Path(path) if path is not None else DEFAULT_ARTIFACT))

    def classify(self, messages: Sequence[Mapping[str, Any]] | str) -> Classification:
        """The class of chat messages or of one prompt. Never raises on odd text: an empty prompt has an answer too."""
        blocks = extract(messages, self._lexicon)
        group = next(iter(blocks[-1].keys))  # the block of family GROUP, which is always the last
        logits = self._logits(blocks[:-1]) / self._temperatures[group]
        scores = np.exp(logits - logits.max())
        values = (scores / scores.sum()).tolist()
        probabilities = dict(zip(self.labels, values, strict=True))
        best = max(values)
        label = self.labels[values.index(best)]
        return Classification(label, best < self.uncertain_below, probabilities, self, messages)

    def _logits(self, blocks: Iterable[Block]) -> np.ndarray:
        rows: list[int] = []
        weights: list[float] = []
        ends: list[int] = [0]
        for family, weight, keys in blocks:
            index = self._index.get(family)
            if index is not None:
                rows.extend(filter(None, map(index.get, keys)))  # row 0 stands for unknown keys
                weights.append(weight)
                ends.append(len(rows))
        if not rows:
            return self._bias
        counts = [end - start for start, end in pairwise(ends)]
        return np.array(weights, np.float32).repeat(counts) @ self._weights[rows] + self._bias

    def top_features(self, messages: Sequence[Mapping[str, Any]] | str, label: str, limit: int) -> list[FeatureScore]:
        """The `limit` features that spoke most for `label`."""
        column = self.labels.index(label)
        totals: dict[str, float] = {}
        blocks = extract(messages, self._lexicon)
        temperature = self._temperatures[next(iter(blocks[-1].keys))]
        for family, weight, keys in blocks[:-1]:
            index = self._index.get(family, {})
            for key in keys:
                row = index.get(key)
                if row:
                    name = f"{_FAMILY_NAMES.get(family, family)}: {key}"
                    weights = self._weights[row] / temperature
                    totals[name] = totals.get(name, 0.0) + weight * float(weights[column] - weights.mean())
        best = sorted(
            ((score, name) for name, score in totals.items() if score > 0), key=lambda pair: (-pair[0], pair[1])
        )
        return [FeatureScore(name, round(score, 4)) for score, name in best[:limit]]


def save_arrays(arrays: ModelArrays, path: Path) -> None:
    """Writes an artifact as plain arrays: numbers and UTF-8 bytes, nothing that needs pickle."""
    about = {
        "artifact_version": ARTIFACT_VERSION,
        "features_version": FEATURES_VERSION,
        "labels": list(arrays.labels),
        "temperatures": arrays.temperatures,
        "uncertain_below": arrays.uncertain_below,
        "about": arrays.about,
    }
    np.savez_compressed(
        path,
        meta=_as_bytes(json.dumps(about, ensure_ascii=False, sort_keys=True)),
        keys=_as_bytes("\n".join(f"{family}\t{key}" for family, key in arrays.keys)),
        lexicon=_as_bytes("\n".join("\t".join(row) for row in arrays.lexicon)),
        weights=arrays.weights.astype(np.float16),
        bias=arrays.bias.astype(np.float32),
    )


def load_arrays(path: Path) -> ModelArrays:
    """Reads and checks an artifact; raises `ArtifactError` naming the file and the fix."""
    fix = "train one with `medusa-gateway classifier train`"
    try:
        with np.load(path, allow_pickle=False) as stored:
            meta = json.loads(_as_text(stored["meta"]))
            keys = tuple(_pair(line) for line in _as_text(stored["keys"]).split("\n"))
            lexicon = tuple(_triple(line) for line in _as_text(stored["lexicon"]).split("\n"))
            weights = stored["weights"].astype(np.float32)
            bias = stored["bias"].astype(np.float32)
        versions = (meta["artifact_version"], meta["features_version"])
        labels, below = tuple(meta["labels"]), float(meta["uncertain_below"])
        temperatures = {group: float(meta["temperatures"][group]) for group in GROUPS} if versions == _reads() else {}
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such classifier artifact; {fix}") from None
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path}: not a classifier artifact ({error}); {fix}") from error
    if versions != _reads():
        raise ArtifactError(
            f"{path}: artifact version {versions[0]}, features version {versions[1]}; this gateway reads"
            f" {ARTIFACT_VERSION} and {FEATURES_VERSION}: {fix}"
        )
    if weights.shape != (len(keys) + 1, len(labels)) or bias.shape != (len(labels),) or min(temperatures.values()) <= 0:
        raise ArtifactError(
            f"{path}: arrays don't fit together (weights {weights.shape}, {len(keys)} keys,"
            f" {len(labels)} labels); {fix}"
        )
    return ModelArrays(labels, keys, weights, bias, temperatures, below, lexicon, meta.get("about", {}))


def _reads() -> tuple[int, int]:
    """The versions of artifact and features that can be read."""
    return ARTIFACT_VERSION, FEATURES_VERSION


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)


def _as_text(array: np.ndarray) -> str:
    if not isinstance(array, np.ndarray):
        raise TypeError("a part is not an array")
    return array.astype(np.uint8).tobytes().decode("utf-8", "surrogatepass")


def _pair(line: str) -> tuple[str, str]:
    family, _, key = line.partition("\t")
    return family, key


def _triple(line: str) -> tuple[str, str, str]:
    language, form, concept = line.split("\t")
    return language, form, concept
