"""Drawing tokens: keyed random numbers, and logit processors that see the true history of each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from backends.sampling.rows import RowSampler, RowSampling
from backends.sampling.splitmix import splitmix64
from backends.types import SamplingParams

_HIGHEST = np.finfo(np.float32).max


def keyed_uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of one (seed, absolute position), by two rounds of SplitMix64 (Steele et al., 2014).

    Sampling at a position never depends on how many numbers were drawn before, which makes it independent of the tree.
    """
    return (splitmix64(splitmix64(seed) ^ position) >> 11) * 2.0**-53


@dataclass(slots=True)
class LogitProcessor:
    """Penalties, biases and bans of one sequence, applied to the logits of one row.

    Order: ``logit_bias``, repetition penalty (Keskar et al., 2019, over prompt and answer), then frequency and presence
    penalties (OpenAI's definition, over the answer), then the ban on ending before ``min_tokens``.
    """

    params: SamplingParams
    prompt_ids: NDArray[np.int64]
    ending_ids: NDArray[np.int64]
    counts: Counter[int] = field(default_factory=Counter)
    _bias: tuple[NDArray[np.int64], NDArray[np.float32]] = field(init=False)

    def __post_init__(self) -> None:
        bias = self.params.logit_bias
        self._bias = (np.fromiter(bias.keys(), np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias)))

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return bool(
            params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
            or params.logit_bias
            or params.min_tokens
        )

    def apply(self, row: NDArray[np.float32], ahead: SequenceOf[int]) -> None:
        """Change ``row`` [V] in place. ``ahead``: tokens accepted in this step, before this row's."""
        params = self.params
        ids, values = self._bias
        row[ids] += values
        counts = self.counts + Counter(ahead) if ahead else self.counts
        seen = np.fromiter(counts.keys(), np.int64, len(counts))
        if params.repetition_penalty != 1.0:
            both = np.union1d(self.prompt_ids, seen)
            old = row[both]
            penalty = np.float32(params.repetition_penalty)
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                changed = np.where(old > 0, old / penalty, old * penalty)
            # A tiny penalty overflows; one infinite logit would make the softmax of the row undefined.
            row[both] = np.minimum(changed, _HIGHEST)
        if len(seen) and (params.frequency_penalty or params.presence_penalty):
            times = np.fromiter(counts.values(), np.float32, len(counts))
            row[seen] -= np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty)
        if sum(counts.values()) < params.min_tokens:
            row[self.ending_ids] = -np.inf


class Visit(NamedTuple):
    """One row whose token is to be drawn: its row in the logits, the position of that token, and the row's history."""

    row: int
    position: int
    params: SamplingParams
    processor: LogitProcessor | None
    ahead: SequenceOf[int]


def draw_tokens(runner: RowSampler, logits: torch.Tensor, visits: SequenceOf[Visit]) -> list[int]:
    """One token for each visit from ``logits`` [R, V]; a row's token depends on that row and its visit only."""
    for visit in visits:
        if visit.processor is not None or not visit.params.greedy:
            break
    else:
        return runner.argmax(logits, [visit.row for visit in visits])
    tokens = [0] * len(visits)
    plain = [i for i, visit in enumerate(visits) if visit.processor is None]
    processed = [i for i, visit in enumerate(visits) if visit.processor is not None]
    if plain:
        for i, token in zip(plain, _draw(runner, logits, [visits[i] for i in plain]), strict=True):
            tokens[i] = token
    if processed:
        rows = logits[[visits[i].row for i in processed]].cpu()
        for at, i in enumerate(processed):
            visit = visits[i]
            assert visit.processor is not None
            visit.processor.apply(rows[at].numpy(), visit.ahead)
        moved = [Visit(at, visits[i].position, visits[i].params, None, ()) for at, i in enumerate(processed)]
        for i, token in zip(processed, _draw(runner, rows, moved), strict=True):
            tokens[i] = token
    return tokens


def _draw(runner: RowSampler, logits: torch.Tensor, visits: SequenceOf[Visit]) -> list[int]:
    tokens = [0] * len(visits)
    greedy = [i for i, visit in enumerate(visits) if visit.params.greedy]
    drawn = [i for i, visit in enumerate(visits) if not visit.params.greedy]
    if greedy:
        chosen = runner.argmax(logits, [visits[i].row for i in greedy])
        for i, token in zip(greedy, chosen, strict=True):
            tokens[i] = token
    if drawn:
        picked = [visits[i] for i in drawn]
        params = RowSampling(
            temperature=np.array([visit.params.temperature for visit in picked], np.float32),
            top_k=np.array([visit.params.top_k for visit in picked], np.int32),
            top_p=np.array([visit.params.top_p for visit in picked], np.float32),
            min_p=np.array([visit.params.min_p for visit in picked], np.float32),
            uniform=np.array([keyed_uniform(visit.params.seed, visit.position) for visit in picked], np.float64),
        )
        for i, token in zip(drawn, runner.sample(logits, [visit.row for visit in picked], params), strict=True):
            tokens[i] = token
    return tokens
