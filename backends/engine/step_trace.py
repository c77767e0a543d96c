"""What the steps of one sequence did, for a client that asked for it (:attr:`GenerationRequest.trace`)."""

from __future__ import annotations

from collections.abc import Sequence

from backends.speculation.tree_builder import HEADS, Draft
from backends.types import StepTrace, TracedToken

MOST_TRACED_STEPS = 2048
"""Of one sequence; what comes after is not traced."""


class StepTracer:
    """Gathers the steps of one sequence until they are taken. It only looks: no token hangs on it."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._steps: list[StepTrace] = []
        self._count = 0

    def note_token(self, text_length: int) -> None:
        """One more token was added; the answer's text now has so many characters."""
        self._ends.append(text_length)

    def note_step(
        self, tokens: Sequence[int], result_rows: Sequence[int], draft: Draft, prompt_rows: int, ms: float
    ) -> None:
        """The step that added ``tokens`` is over.

        ``result_rows[i]``: the row (root 0) that token i was drawn at, so from the second on the candidate that holds
        the token before it. ``prompt_rows``: of a step in which the prompt ended, else 0.
        """
        ends, self._ends = self._ends, []
        self._count += 1
        if self._count > MOST_TRACED_STEPS:
            return
        traced = []
        for index, (token, end) in enumerate(zip(tokens, ends, strict=True)):
            if index + 1 < len(tokens):
                node = result_rows[index + 1] - 1
                source = draft.sources[node]
                source = f"head {index + 1}" if source == HEADS else source
                traced.append(TracedToken(token, end, source, index + 1, round(draft.survivals[node], 4)))
            else:
                traced.append(TracedToken(token, end))
        nodes = len(draft.tokens)
        step = StepTrace(self._count, prompt_rows or 1 + nodes, nodes, round(ms, 3), tuple(traced))
        self._steps.append(step)

    def take(self) -> tuple[StepTrace, ...]:
        """The steps since the last call."""
        steps, self._steps = tuple(self._steps), []
        return steps
