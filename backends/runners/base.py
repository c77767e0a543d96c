"""What the engine asks of a model, whatever runs it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from backends.heads.expansion import LEAST_SURVIVAL
from backends.heads.module import MedusaHeads
from backends.heads.residual import ResidualHeads
from backends.runners.batch import StepBatch
from backends.sampling.rows import RowSampler
from backends.tree import CandidateTree


class Proposals:
    """The heads' best guesses for one sequence, as lists of siblings, best first.

    ``tokens`` [lists, k] int, ``probabilities`` [lists, k] float; list 0 follows the pending token. ``below``
    [lists, k] int: the list that follows a guess, -1 for none. None: the heads don't look at drafted tokens, so there
    is one list for each head, and it follows whatever the head before guessed. ``levels``: heads that have run; None:
    all.

    Kept in arrays of the standard library: every step reads a few short rows, and right after a forward numpy's code
    has to be fetched from memory first.
    """

    __slots__ = ("_below", "_probabilities", "_tokens", "k", "levels", "lists")

    def __init__(
        self,
        tokens: NDArray[np.int32],
        probabilities: NDArray[np.float32],
        below: NDArray[np.int32] | None = None,
        levels: int | None = None,
    ) -> None:
        rows = array("i", below.astype(np.int32).tobytes()) if below is not None else None
        self._set(
            array("i", tokens.astype(np.int32).tobytes()),
            array("f", probabilities.astype(np.float32).tobytes()),
            rows,
            tokens.shape[1],
            levels,
        )

    @classmethod
    def of_memory(
        cls, tokens: array[int], probabilities: array[float], below: array[int], k: int, levels: int
    ) -> Proposals:
        """From rows of ``k`` one behind the other: C ints and floats."""
        found = cls.__new__(cls)
        found._set(tokens, probabilities, below, k, levels)
        return found

    def _set(
        self, tokens: array[int], probabilities: array[float], below: array[int] | None, k: int, levels: int | None
    ) -> None:
        self._tokens, self._probabilities, self._below = tokens, probabilities, below
        self.k, self.lists, self.levels = k, len(tokens) // k, levels

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Where tokens (C ints), probabilities (floats) and lists below (C ints; 0: see ``below``) lie, as long as this
        object does."""
        below = 0 if self._below is None else self._below.buffer_info()[0]
        return self._tokens.buffer_info()[0], self._probabilities.buffer_info()[0], below

    def tokens_of(self, index: int) -> list[int]:
        """One list's guesses."""
        return self._tokens[index * self.k : (index + 1) * self.k].tolist()

    def probabilities_of(self, index: int) -> list[float]:
        return self._probabilities[index * self.k : (index + 1) * self.k].tolist()

    def best_probability(self, index: int) -> float:
        return self._probabilities[index * self.k]

    def following(self, index: int) -> list[int]:
        """``below`` of one list, whatever the heads."""
        if self._below is not None:
            return self._below[index * self.k : (index + 1) * self.k].tolist()
        return [index + 1 if index + 1 < self.lists else -1] * self.k

    @property
    def look_ahead(self) -> bool:
        """Whether a list follows one guess, not all of the list above it."""
        return self._below is not None

    @property
    def tokens(self) -> NDArray[np.int32]:
        return np.array(self._tokens, np.int32).reshape(self.lists, self.k)

    @property
    def probabilities(self) -> NDArray[np.float32]:
        return np.array(self._probabilities, np.float32).reshape(self.lists, self.k)

    @property
    def below(self) -> NDArray[np.int32] | None:
        return None if self._below is None else np.array(self._below, np.int32).reshape(self.lists, self.k)


def best_guesses(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` best columns of logits [..., V], best first, and their softmax probabilities: [..., k] each."""
    best = logits.topk(min(k, logits.shape[-1]), dim=-1)
    # A row that says nothing guesses nothing: books of drafting must not be multiplied by what is not a number.
    return best.indices, torch.exp(best.values - logits.logsumexp(dim=-1, keepdim=True)).nan_to_num(0.0)


def best_tokens(
    logits: torch.Tensor, k: int, draft_ids: NDArray[np.int32] | None
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """:func:`best_guesses` on the CPU, columns being told as tokens: ``draft_ids`` [V'], None when V' is all."""
    columns, probabilities = best_guesses(logits, k)
    ids = columns.to("cpu", torch.int32).numpy()
    return ids if draft_ids is None else draft_ids[ids], probabilities.cpu().numpy()


class ModelRunner(RowSampler, Protocol):
    """A model with its KV pool of ``num_pages`` pages and, after them, ``scratch_slots`` slots for candidate nodes.

    Every method's result for one row is bitwise the same whatever other rows are in the call.

    ``kind``, ``software`` and ``threads`` tell runners apart whose steps take different times: the runner's name, the
    versions of what it runs on, and the CPU threads that it computes with.

    ``runs_ahead``: :meth:`forward` and :meth:`logits` return while a device still works on them, and everything asked
    later is done after them. The engine then launches a step before it makes text of the one before.

    ``row_buckets``: the numbers of rows that steps are filled up to, ascending, so that all of a bucket take the same
    time (:mod:`backends.cost.device_cost`); empty: every row counts.
    """

    kind: str
    software: str
    runs_ahead: bool
    row_buckets: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    vocab_size: int
    num_pages: int
    max_rows: int
    max_context: int

    @property
    def threads(self) -> int: ...

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Run the rows, store their keys and values; returns final-norm hidden states [outputs, H], which the next
        call may overwrite."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``lm_head`` of hidden states [n, H] -> [n, V] float32, which the next call may overwrite."""
        ...

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        """Copy keys and values between slots in every layer."""
        ...

    def embed(self, token_ids: list[int]) -> torch.Tensor:
        """The tokens' input embeddings [n, H]."""
        ...

    def bind_heads(self, heads: MedusaHeads | ResidualHeads) -> HeadsRunner:
        """Heads that guess by this runner's weights, in whatever operations suit its device;
        :func:`backends.runners.torch_heads.heads_in_torch` does it for every runner."""
        ...


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """What heads are asked in one call, for n sequences."""

    hidden: torch.Tensor
    """Final-norm hidden states [R, H] in the runner's dtype, as a forward gave them."""
    contexts: list[list[int]]
    """The n sequences' tokens so far. The last one is *pending*: drawn, but not yet run. Must not be changed."""
    k: int
    """Guesses wanted in each list, best first; a smaller draft vocabulary gives fewer."""
    trees: Sequence[CandidateTree | None] = ()
    """The n shapes that will be drafted; None, or an empty sequence for all: not known before. Heads that look at
    drafted tokens follow the guesses that a shape has below it, and without a shape the likeliest."""
    rows: Sequence[int] | None = None
    """The n rows of ``hidden``: each the state at the position before a pending token. None: rows 0 to n - 1."""
    min_survival: float = LEAST_SURVIVAL
    """Where the likeliest are followed: the smallest chance, from 0 to 1, that a guess and all above it are right."""

    @property
    def states(self) -> torch.Tensor:
        """The rows of ``hidden`` that are meant, [n, H]."""
        return self.hidden if self.rows is None else self.hidden[list(self.rows)]

    @property
    def pending(self) -> list[int]:
        """The n pending tokens."""
        return [context[-1] for context in self.contexts]


class HeadsRunner(Protocol):
    """Heads bound to a runner's weights."""

    num_heads: int

    def propose(self, request: ProposalRequest) -> list[Proposals]:
        """The guesses for each sequence of the request, in its order."""
        ...
