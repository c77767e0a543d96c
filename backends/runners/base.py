"""What the engine asks of a model, whatever runs it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from backends.heads.expansion import LEAST_SURVIVAL
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
    """

    kind: str
    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    vocab_size: int
    num_pages: int
    max_rows: int
    max_context: int

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


class HeadsRunner(Protocol):
    """Medusa heads bound to a runner's weights."""

    num_heads: int

    def propose(
        self,
        hidden: torch.Tensor,
        contexts: list[list[int]],
        k: int,
        trees: Sequence[CandidateTree | None] = (),
        *,
        rows: Sequence[int] | None = None,
        least: float = LEAST_SURVIVAL,
    ) -> list[Proposals]:
        """Guesses for n sequences: ``contexts`` are their tokens so far, the last one *pending* (not yet run); ``rows``
        of ``hidden`` [.., H] (None: all, in order) are the final-norm states at the positions before the pending
        tokens. ``contexts`` must not be changed. ``trees``: the shapes that will be drafted, where they are known
        before (empty: nowhere); heads that look at drafted tokens follow those, and elsewhere their likeliest guesses,
        as far as these survive with a chance of ``least``."""
        ...
