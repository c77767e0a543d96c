"""Runs inside a checkout of an earlier version: answers `earlier.Earlier`, a JSON line each. Never imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from gateway.classifier.lexicon import Lexicon, read_lexicon
from gateway.classifier.training.dataset import read_examples
from gateway.classifier.training.fit import FeatureMatrix, fit_weights, is_generated, with_generated


def main(path: Path, generated: int | None) -> None:
    """Reads the rows in `path`, then answers {train, held, without} with the labels of `held` until the input ends."""
    rows = read_examples(path)
    examples = with_generated(rows, generated)
    matrix = FeatureMatrix.of(examples, Lexicon(read_lexicon()))
    made = [(i, example.lang) for i, example in enumerate(examples) if is_generated(example)]
    for line in sys.stdin:
        asked = json.loads(line)
        train = np.array(asked["train"] + [i for i, lang in made if lang not in asked["without"]])
        held = np.array(asked["held"])
        found = fit_weights(matrix, train).logits(matrix.rows(held)).argmax(axis=1)
        print(json.dumps([matrix.labels[i] for i in found.tolist()]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
