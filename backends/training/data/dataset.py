"""Answers of the backbone and its hidden states over them, cached on disk.

The cache is a folder with one flat row axis over all answer tokens: row ``j`` of an answer holds the final-norm hidden
state that predicts ``answer[j]`` (what ``lm_head`` is fed). Given that row and the pending token ``answer[j]``, head
``i`` has to say ``answer[j + 1 + i]``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.json_lines import read_objects

HIDDEN_FILE = "hidden.bf16"
CHUNKS_FILE = "chunks.jsonl"
HELD_OUT_SHARE = 0.05


class AnswersError(ValueError):
    """A prompts or answers file that can't be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt and what the backbone answered, as token ids."""

    id: str
    label: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    temperature: float = 0.0

    @property
    def held_out(self) -> bool:
        """Kept for evaluation: a fixed 5% of the prompts, chosen by their id so that every run leaves out the same."""
        digest = hashlib.sha256(self.id.encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a file that this program writes. A torn tail (a killed writer) ends it quietly.

    Raises :class:`AnswersError` for a line in the middle that is not a JSON object.
    """
    return (record for _, record in read_objects(path, AnswersError, torn_end=True))


def read_answers(
    paths: Iterable[Path],
    *,
    vocab_size: int | None = None,
    max_length: int | None = None,
    log: Callable[[str], object] = lambda line: None,
) -> list[Answer]:
    """Answers of one or more files, in order. Those that nothing can be learnt from are left out; ``log`` is told.

    ``vocab_size`` and ``max_length``: of the model that is to read them. Raises :class:`AnswersError` naming file and
    line of a bad record.
    """
    answers = []
    for path in paths:
        total, left_out = 0, Counter[str]()
        for number, record in read_objects(path, AnswersError):
            answer = parse_answer(f"{path}:{number}", record, vocab_size)
            total += 1
            if not answer.prompt_ids or len(answer.answer_ids) < 2:
                left_out["without a prompt, or of fewer than 2 tokens"] += 1
            elif max_length is not None and len(answer.prompt_ids) + len(answer.answer_ids) > max_length:
                left_out[f"longer than the model's {max_length} tokens"] += 1
            else:
                answers.append(answer)
        if not total:
            raise AnswersError(f"{path}: no answers in it; have some made with: medusa-gateway heads answers")
        for reason, count in left_out.items():
            log(f"{path}: {count} of {total} answers left out: {reason}")
    return answers


def parse_answer(where: str, record: Mapping[str, Any], vocab_size: int | None = None) -> Answer:
    """Raises :class:`AnswersError` saying ``where``."""
    missing = [name for name in ("id", "prompt_ids", "answer_ids") if name not in record]
    if missing:
        raise AnswersError(f"{where}: no {' and no '.join(missing)}; an answer has id, prompt_ids and answer_ids")
    for name in ("prompt_ids", "answer_ids"):
        ids = record[name]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise AnswersError(f"{where}: {name} must be a list of token ids")
        if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            of = "" if vocab_size is None else f" of {vocab_size}: it was made by another model"
            raise AnswersError(f"{where}: token {wrong} of {name} is outside the vocabulary{of}")
    temperature = record.get("temperature") or 0.0
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise AnswersError(f"{where}: temperature must be a number, 0 or more")
    return Answer(
        record_id(where, record),
        record_text(where, record, "label"),
        tuple(record["prompt_ids"]),
        tuple(record["answer_ids"]),
        float(temperature),
    )


def record_id(where: str, record: Mapping[str, Any]) -> str:
    """1 and "1" are the same id. Raises :class:`AnswersError`."""
    found = record["id"]
    if not isinstance(found, str | int) or isinstance(found, bool):
        raise AnswersError(f"{where}: id must be a string or a whole number")
    return str(found)


def record_text(where: str, record: Mapping[str, Any], name: str) -> str:
    """A string that may be left out. Raises :class:`AnswersError`."""
    found = record.get(name)
    if not isinstance(found, str | None):
        raise AnswersError(f"{where}: {name} must be a string, or left out")
    return found or ""


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states over answers. ``hidden`` [rows, H] bf16, ``tokens`` [rows] int64, ``starts`` [answers + 1].

    ``dropped``: indices of answers that are not trained on (:mod:`backends.training.data.cleaning`).
    """

    answers: tuple[Answer, ...]
    hidden: torch.Tensor
    tokens: torch.Tensor
    starts: np.ndarray
    dropped: frozenset[int] = frozenset()

    @property
    def training_indices(self) -> list[int]:
        return [i for i, answer in enumerate(self.answers) if not answer.held_out and i not in self.dropped]

    def rows_of(self, answer_index: int) -> slice:
        return slice(int(self.starts[answer_index]), int(self.starts[answer_index + 1]))

    def targets(self, num_heads: int) -> torch.Tensor:
        """What head ``i`` has to say at each row, -1 where the answer ends before: [num_heads, rows] int64."""
        rows = len(self.tokens)
        ends = torch.from_numpy(np.repeat(self.starts[1:], np.diff(self.starts)))
        position = torch.arange(rows)
        targets = torch.full((num_heads, rows), -1, dtype=torch.int64)
        for head in range(num_heads):
            target_row = position + 1 + head
            inside = target_row < ends
            targets[head, inside] = self.tokens[target_row[inside]]
        return targets

    def select(self, *, held_out: bool) -> torch.Tensor:
        """Row numbers of the held-out or of the training answers, [n] int64; last rows (no target) left out."""
        held_indices = [i for i, answer in enumerate(self.answers) if answer.held_out]
        parts = [
            torch.arange(int(self.starts[i]), int(self.starts[i + 1]) - 1)
            for i in (held_indices if held_out else self.training_indices)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def cache_hidden_states(
    model: Any,
    answers: Sequence[Answer],
    folder: Path,
    *,
    backbone_fingerprint: str,
    tokens_per_batch: int = 4096,
    answers_per_chunk: int = 64,
    progress: Callable[[int], object] = lambda rows: None,
) -> None:
    """Append the hidden states of ``answers`` to the cache in ``folder``, going on where an earlier run stopped.

    ``progress`` is called with the rows of each finished chunk. Raises :class:`AnswersError` when the folder holds
    the states of another backbone or of other answers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done_answers, done_rows = _check_chunks(folder, answers, backbone_fingerprint)
    hidden_size = model.config.hidden_size
    with (folder / HIDDEN_FILE).open("ab") as hidden_file, (folder / CHUNKS_FILE).open("a") as chunks_file:
        # A killed run may have left rows of an unfinished chunk behind.
        hidden_file.truncate(done_rows * hidden_size * 2)
        for begin in range(done_answers, len(answers), answers_per_chunk):
            chunk = answers[begin : begin + answers_per_chunk]
            states = _forward(model, chunk, tokens_per_batch)
            hidden_file.write(states.view(torch.int16).numpy().tobytes())
            hidden_file.flush()
            record = {
                "answers": len(chunk),
                "rows": len(states),
                "sha256": _digest(chunk),
                "backbone": backbone_fingerprint,
            }
            chunks_file.write(json.dumps(record) + "\n")
            chunks_file.flush()
            progress(len(states))


def load_hidden_states(
    folder: Path, answers: Sequence[Answer], *, hidden_size: int, backbone_fingerprint: str
) -> HiddenStates:
    """The cached states of the first answers, as far as the cache reaches. The hidden tensor is mapped, not read.

    Raises :class:`AnswersError` when the cache is empty or belongs to another backbone or other answers.
    """
    done_answers, rows = _check_chunks(folder, answers, backbone_fingerprint)
    if not done_answers:
        raise AnswersError(f"{folder}: no hidden states cached yet")
    answers = tuple(answers[:done_answers])
    mapped = np.memmap(folder / HIDDEN_FILE, dtype=np.int16, mode="c", shape=(rows, hidden_size))
    tokens = np.concatenate([np.asarray(answer.answer_ids, dtype=np.int64) for answer in answers])
    starts = np.concatenate([[0], np.cumsum([len(answer.answer_ids) for answer in answers])]).astype(np.int64)
    return HiddenStates(answers, torch.from_numpy(mapped).view(torch.bfloat16), torch.from_numpy(tokens), starts)


def _check_chunks(folder: Path, answers: Sequence[Answer], backbone_fingerprint: str) -> tuple[int, int]:
    """How many answers and rows the cache holds, after comparing each chunk with the answers given."""
    path = folder / CHUNKS_FILE
    done_answers = done_rows = 0
    if not path.exists():
        return 0, 0
    for record in read_jsonl(path):
        if not {"answers", "rows", "sha256", "backbone"} <= record.keys():
            raise AnswersError(f"{path} is no list of cached states; choose another folder or delete it")
        chunk = answers[done_answers : done_answers + record["answers"]]
        if record["backbone"] != backbone_fingerprint:
            raise AnswersError(f"{folder} holds hidden states of another backbone; choose another folder or delete it")
        if len(chunk) < record["answers"] and done_answers + len(chunk) == len(answers):
            break
        if record["sha256"] != _digest(chunk):
            raise AnswersError(f"{folder} holds hidden states of other answers; choose another folder or delete it")
        done_answers += record["answers"]
        done_rows += record["rows"]
    return done_answers, done_rows


def _digest(answers: Sequence[Answer]) -> str:
    content = [[answer.id, answer.prompt_ids, answer.answer_ids] for answer in answers]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@torch.inference_mode()
def _forward(model: Any, answers: Sequence[Answer], tokens_per_batch: int) -> torch.Tensor:
    """Final-norm hidden states of the rows that predict answer tokens, in the order given: [rows, H] bf16."""
    device = model.get_input_embeddings().weight.device
    by_length = sorted(range(len(answers)), key=lambda i: len(answers[i].prompt_ids) + len(answers[i].answer_ids))
    states: list[torch.Tensor | None] = [None] * len(answers)
    batch: list[int] = []
    for rank, index in enumerate(by_length):
        batch.append(index)
        longest = _length(answers[index])
        next_longest = _length(answers[by_length[rank + 1]]) if rank + 1 < len(by_length) else 0
        if next_longest and next_longest * (len(batch) + 1) <= tokens_per_batch:
            continue
        # Padding on the right needs no mask: causal attention never looks there.
        ids = torch.zeros((len(batch), longest), dtype=torch.int64)
        for row, i in enumerate(batch):
            sequence = answers[i].prompt_ids + answers[i].answer_ids[:-1]
            ids[row, : len(sequence)] = torch.tensor(sequence)
        hidden = model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
        for row, i in enumerate(batch):
            first = len(answers[i].prompt_ids) - 1
            span = hidden[row, first : first + len(answers[i].answer_ids)]
            states[i] = span.to("cpu", torch.bfloat16)
        batch = []
    return torch.cat([state for state in states if state is not None])


def _length(answer: Answer) -> int:
    return len(answer.prompt_ids) + len(answer.answer_ids) - 1
