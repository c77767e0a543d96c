"""Grammars opened for the answers of a call, in threads of their own: neither the event loop nor a step waits."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from backends.grammar.spec import GrammarRefused, GrammarSpec
from backends.types import TokenGrammar
from gateway.serving.call import ServedModel
from gateway.wire.errors import InvalidRequest

# A schema takes half a second at worst. Two threads: one that does must not hold up all others.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="grammar")


async def open_grammars(served: ServedModel, spec: GrammarSpec | None, count: int) -> tuple[TokenGrammar, ...]:
    """One for each of ``count`` answers; none where ``spec`` is None. Raises :class:`InvalidRequest`."""
    if spec is None:
        return ()
    grammars = served.grammars
    if grammars is None:
        raise InvalidRequest(
            f"'{spec.param}' is not supported by {served.decoder.info.name}; leave it out.",
            param=spec.param,
            code="unsupported_parameter",
        )
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_THREADS, lambda: tuple(grammars.open(spec) for _ in range(count)))
    except GrammarRefused as error:
        raise InvalidRequest(str(error), param=error.param, code=error.code) from None
