"""The sequences of one HTTP request as one stream of chunks, and their end: finished, failed, or cut short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from backends.types import (
    ENGINE_FAILED,
    GRAMMAR_LIMIT,
    GRAMMAR_STUCK,
    NOT_FINITE,
    Decoder,
    EngineStopped,
    GenerationHandle,
    GenerationRequest,
    TokenChunk,
)
from gateway.admission import Ticket
from gateway.wire.errors import APIError, ClientDisconnected, EngineFailure, InvalidRequest, Unavailable, shutting_down

logger = logging.getLogger("gateway")

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]


class Generation:
    """Owns the engine handles and the admission ticket of one request.

    :meth:`close` is synchronous and idempotent because it runs where nothing can be awaited: in a cancelled scope when
    the client leaves, or after the response is over.
    """

    def __init__(
        self, decoder: Decoder, requests: Sequence[GenerationRequest], ticket: Ticket, client_id: str = ""
    ) -> None:
        """Submits every sequence. Raises :class:`Unavailable`, with nothing left submitted, if the engine is gone.

        ``client_id``: by what the client knows the request (x-request-id), for the log.
        """
        if ticket.aborted:
            raise shutting_down()
        self._ticket = ticket
        self._requests, self._client_id = requests, client_id
        self._handles: list[GenerationHandle] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._closed = False
        self._shutting_down = False
        self._counted = [0] * len(requests)
        self.unfinished = len(requests)
        try:
            for request in requests:
                self._handles.append(decoder.submit(request))
        except EngineStopped as error:
            self.close()
            raise Unavailable(f"The engine of {decoder.info.name} has stopped.") from error
        except BaseException:
            self.close()
            raise
        ticket.on_abort = self._abort_for_shutdown

    def close(self) -> None:
        """Abort what still runs and give the places back."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.abort()
        for pump in self._pumps:
            pump.cancel()
        self._ticket.close()

    async def chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """(index of the sequence, chunk) in the order in which they come, until every sequence has finished.

        Raises an :class:`APIError` as soon as any sequence fails: half of the choices are no answer.
        """
        if len(self._handles) == 1:
            async for chunk in self._handles[0]:
                self._check(0, chunk)
                yield 0, chunk
        else:
            async for index, chunk in self._merged():
                self._check(index, chunk)
                yield index, chunk
        if self.unfinished:
            raise self._cut_short()

    def _check(self, index: int, chunk: TokenChunk) -> None:
        self._ticket.used_tokens = (self._ticket.used_tokens or 0) + chunk.num_tokens - self._counted[index]
        self._counted[index] = chunk.num_tokens
        reason = chunk.finish_reason
        if reason is None:
            return
        if reason == "error":
            logger.error("request %s: the engine failed on %s", self._client_id, self._requests[index].request_id)
            if chunk.error in (GRAMMAR_LIMIT, GRAMMAR_STUCK):
                raise InvalidRequest(f"No answer: {chunk.error}.", code="grammar_failed")
            # One of two constants, whatever the engine says: no exception's words reach a client.
            raise EngineFailure(f"No answer: {NOT_FINITE if chunk.error == NOT_FINITE else ENGINE_FAILED}.")
        if reason == "abort":
            raise self._cut_short()
        self.unfinished -= 1
        self._ticket.finish_one()

    def _cut_short(self) -> APIError:
        if self._shutting_down:
            return shutting_down(mid_answer=True)
        return Unavailable("The engine aborted this request; send it again.", code="engine_aborted")

    def _abort_for_shutdown(self) -> None:
        self._shutting_down = True
        for handle in self._handles:
            handle.abort()

    async def _merged(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """All handles at once. The queue is bounded by what the sequences may generate, so it needs no other bound."""
        queue: asyncio.Queue[tuple[int, TokenChunk | Exception | None]] = asyncio.Queue()

        async def pump(index: int, handle: GenerationHandle) -> None:
            try:
                async for chunk in handle:
                    queue.put_nowait((index, chunk))
                queue.put_nowait((index, None))
            except Exception as error:
                queue.put_nowait((index, error))

        if self._closed:
            return
        self._pumps += [asyncio.ensure_future(pump(i, handle)) for i, handle in enumerate(self._handles)]
        running = len(self._pumps)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, or :class:`ClientDisconnected` at once when the client leaves, with ``work`` cancelled.

    To be called after the request body was read: what ``receive`` says next can only be that the client left.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected("The client left.")
    finally:
        watcher.cancel()
        task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
