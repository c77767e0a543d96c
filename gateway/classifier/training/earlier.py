"""An earlier version of the classifier, from a checkout of it, scored beside this one on the same held-out rows.

It runs in a process of its own (`earlier_worker.py`, by path, with that checkout on the path), trains on the same data
with its own features and its own generated prompts, and answers for the rows that are asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gateway.classifier.training.dataset import DataError, Example
from gateway.classifier.training.fit import is_generated

WORKER = Path(__file__).with_name("earlier_worker.py")


class Earlier:
    """Predicts rows as the classifier of the checkout in `directory` does. Close it when done.

    ``generated``: how many generated prompts it adds; as many as it usually does if None.
    """

    def __init__(
        self, directory: Path, examples: Sequence[Example], labels: Sequence[str], generated: int | None = None
    ) -> None:
        if not (directory / "gateway" / "classifier" / "training" / "fit.py").is_file():
            raise DataError(
                f"--before {directory}: no gateway/classifier/training there; give a checkout of an earlier version"
            )
        self._examples, self._labels = examples, list(labels)
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8", delete=False) as file:
            for example in examples:
                if not is_generated(example):
                    row = {"id": example.id, "source": example.source, "label": example.label, "lang": example.lang}
                    file.write(json.dumps(row | {"messages": example.chat()}) + "\n")
        self._rows = Path(file.name)
        self._position = {}
        for index, example in enumerate(examples):
            if not is_generated(example):
                self._position[index] = len(self._position)
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(self._rows), *([] if generated is None else [str(generated)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(directory.resolve())},
        )

    def predict(self, train: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Label indices of the rows `held`, by a model of the rows `train`; of generated prompts by its own."""
        known = {self._examples[i].lang for i in train.tolist()}
        asked = {
            "train": [self._position[i] for i in train.tolist() if i in self._position],
            "held": [self._position[i] for i in held.tolist()],
            # A language that no row has left is held out: no generated prompt may teach it.
            "without": sorted({self._examples[i].lang for i in held.tolist()} - known),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise DataError("--before: the earlier version ended without an answer; see its error above")
        return np.array([self._labels.index(label) for label in json.loads(answer)])

    def close(self) -> None:
        """Ends the process and removes its rows."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._rows.unlink(missing_ok=True)
