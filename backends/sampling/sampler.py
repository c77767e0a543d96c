"""Drawing tokens: keyed random numbers, and logit processors that see the true history of each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from backends.sampling.rows import NO_TOKEN, RowSampler, RowSampling
from backends.sampling.splitmix import splitmix64
from backends.types import SamplingParams, TokenGrammar

_HIGHEST = np.finfo(np.float32).max
# How many more of the best tokens of a greedy row a grammar is asked about, before its mask is computed: an argmax
# takes 10 to 40 us, a mask 30 to 300.
_TRIES = 3


def keyed_uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of one (seed, absolute position), by two rounds of SplitMix64 (Steele et al., 2014).

    Sampling at a position never depends on how many numbers were drawn before, which makes it independent of the tree.
    """
    return (splitmix64(splitmix64(seed) ^ position) >> 11) * 2.0**-53


@dataclass(slots=True)
class LogitProcessor:
    """Penalties, biases, bans and the grammar of one sequence, applied to the logits of one row.

    Order: ``logit_bias``, repetition penalty (Keskar et al., 2019, over prompt and answer), then frequency and presence
    penalties (OpenAI's definition, over the answer), then the ban on ending before ``min_tokens``, then the grammar's
    mask. A grammar that is complete ends the answer before ``min_tokens``: nothing else may follow.

    The grammar's state is moved on along a step's path as its rows are visited, in the order in which vanilla decoding
    would ask it, so that its limits are met at the same token. A greedy row needs no mask where the best token is
    allowed, which :meth:`allows` knows at once.
    """

    params: SamplingParams
    prompt_ids: NDArray[np.int64]
    ending_ids: NDArray[np.int64]
    counts: Counter[int] = field(default_factory=Counter)
    grammar: TokenGrammar | None = None
    _bias: tuple[NDArray[np.int64], NDArray[np.float32]] = field(init=False)
    _has_penalties: bool = field(init=False)
    _accepted: int = 0
    _told: int = 0
    """Tokens of this step that the grammar has been told, but :meth:`accept` has not."""

    def __post_init__(self) -> None:
        self._has_penalties = self.wanted(self.params)
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
        self.adjust(row, ahead)
        self.mask(row, ahead)

    @property
    def has_penalties(self) -> bool:
        """Whether :meth:`adjust` changes anything."""
        return self._has_penalties

    def adjust(self, row: NDArray[np.float32], ahead: SequenceOf[int]) -> None:
        """All of :meth:`apply` but the grammar's mask."""
        if self._has_penalties:
            self._apply_penalties(row, ahead)

    def mask(self, row: NDArray[np.float32], ahead: SequenceOf[int]) -> None:
        """The grammar's mask alone."""
        if self.grammar is not None:
            self._tell(self.grammar, ahead)
            self.grammar.mask(row)

    def allows(self, token: int, ahead: SequenceOf[int]) -> bool:
        """Whether the grammar's mask would leave ``token`` as it is."""
        if self.grammar is None:
            return True
        self._tell(self.grammar, ahead)
        return self.grammar.allows(token)

    def accept(self, token: int) -> None:
        """``token`` is now part of the answer; call it for each, in their order."""
        self.counts[token] += 1
        self._accepted += 1
        if self.grammar is not None:
            if self._told:
                self._told -= 1
            else:
                self.grammar.advance(token)

    @property
    def complete(self) -> bool:
        """Whether the answer has all that its grammar asks for, which may have been told more than is accepted."""
        return self.grammar is not None and self.grammar.complete_after == self._accepted

    def _tell(self, grammar: TokenGrammar, ahead: SequenceOf[int]) -> None:
        for token in ahead[self._told :]:
            grammar.advance(token)
            self._told += 1

    def _apply_penalties(self, row: NDArray[np.float32], ahead: SequenceOf[int]) -> None:
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
    # By the logits as they are: also of greedy rows that only have a grammar, which may well allow the best token.
    plain = [i for i, visit in enumerate(visits) if visit.processor is None or _only_grammar(visit, visit.processor)]
    for i, token in zip(plain, _draw(runner, logits, [visits[i] for i in plain]), strict=True):
        tokens[i] = token
    tried = set(plain)
    left = []
    for i, visit in enumerate(visits):
        if visit.processor is not None and not (i in tried and visit.processor.allows(tokens[i], visit.ahead)):
            left.append(i)
    if left:
        rows = logits[[visits[i].row for i in left]].cpu()
        forbidden = [tokens[i] if i in tried else NO_TOKEN for i in left]
        for i, token in zip(left, _draw_processed(runner, rows, [visits[i] for i in left], forbidden), strict=True):
            tokens[i] = token
    return tokens


def _only_grammar(visit: Visit, processor: LogitProcessor) -> bool:
    return visit.params.greedy and not processor.has_penalties


def _draw_processed(
    runner: RowSampler, rows: torch.Tensor, visits: SequenceOf[Visit], forbidden: SequenceOf[int]
) -> list[int]:
    """``rows`` [n, V]: the visits' own, which are changed. ``forbidden``: each one's best token, where it is known and
    not allowed; else :data:`NO_TOKEN`."""
    tokens = [NO_TOKEN] * len(visits)
    arrays = [row.numpy() for row in rows]
    greedy, to_mask = [], []
    for at, visit in enumerate(visits):
        assert visit.processor is not None
        visit.processor.adjust(arrays[at], visit.ahead)
        (greedy if visit.params.greedy else to_mask).append(at)
        _forbid(arrays[at], forbidden[at])
    for _ in range(_TRIES):
        if not greedy:
            break
        refused = []
        for at, token in zip(greedy, runner.argmax(rows, greedy), strict=True):
            visit = visits[at]
            if visit.processor is None or visit.processor.allows(token, visit.ahead):
                tokens[at] = token
            else:
                _forbid(arrays[at], token)
                refused.append(at)
        greedy = refused
    to_mask += greedy
    for at in to_mask:
        visit = visits[at]
        if visit.processor is not None:
            visit.processor.mask(arrays[at], visit.ahead)
    moved = [Visit(at, visits[at].position, visits[at].params, None, ()) for at in to_mask]
    for at, token in zip(to_mask, _draw(runner, rows, moved), strict=True):
        tokens[at] = token
    return tokens


def _forbid(row: NDArray[np.float32], token: int) -> None:
    if token != NO_TOKEN:
        row[token] = -np.inf


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
