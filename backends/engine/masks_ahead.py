"""Masks of grammars, computed in a thread while the forward of their rows runs: nobody then waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

from backends.speculation.verify import VerifyRequest
from backends.types import TokenGrammar


class MasksAhead:
    """For one engine. The library lets go of Python's lock while it computes a mask, as runners do in a forward."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    @contextmanager
    def during(self, requests: Iterable[VerifyRequest]) -> Iterator[None]:
        """Prepares the masks that these rows are sure to need; all are ready, or given up, at the end.

        That is the mask of each drawn root: every step visits it, as vanilla decoding does, so the grammar sees the
        same calls. Which candidates are visited is not known before; and greedy rows seldom need a mask.
        """
        grammars = [
            request.processor.grammar
            for request in requests
            if request.processor is not None and request.processor.grammar is not None and not request.params.greedy
        ]
        if not grammars:
            yield
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="medusa-masks")
        at_work = self._threads.submit(_prepare, grammars)
        try:
            yield
        finally:
            wait([at_work])


def _prepare(grammars: list[TokenGrammar]) -> None:
    for grammar in grammars:
        grammar.prepare()
