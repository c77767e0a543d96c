"""Chat completions as answers of OpenAI's Responses API, whole and streamed."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.interfaces.chat import NULL, ChatAnswer, ChatChoice, Message, ToolCall, event, read_answer
from gateway.interfaces.responses_request import ResponsesRequest
from gateway.wire.errors import ErrorDetail
from gateway.wire.responses import Usage

_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}


def whole(body: bytes, asked: ResponsesRequest) -> bytes:
    """The answer to ``asked``, of a chat completion's ``body``."""
    answer = read_answer(body)
    choice = answer.choices[0]
    items = _Items(answer.id)
    output = [items.finished(each, "completed") for each in items.of(choice.message, choice)]
    response = _Response(asked, answer).at_end(choice.finish_reason, output, answer.usage, answer.decoding)
    return msgspec.json.encode(response)


class _Response:
    """The response object: what was asked for, and what became of it."""

    def __init__(self, asked: ResponsesRequest, answer: ChatAnswer) -> None:
        text, reasoning = asked.text, asked.reasoning
        choice = asked.tool_choice
        self._same: dict[str, Any] = {
            "id": answer.id,
            "object": "response",
            "created_at": answer.created,
            "model": answer.model,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": _shown_format(asked), "verbosity": text and text.verbosity},
            "tool_choice": "auto" if choice is None else choice,
            "tools": asked.tools or [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "top_logprobs": asked.top_logprobs or 0,
            "truncation": "disabled",
            "user": asked.user,
        }

    def under_way(self) -> dict[str, Any]:
        return self._same | {"status": "in_progress", "output": [], "usage": None}

    def at_end(
        self, finish_reason: str | None, output: list[dict[str, Any]], usage: Usage | None, decoding: msgspec.Raw
    ) -> dict[str, Any]:
        cut = _CUT.get(finish_reason or "")
        if cut and output:
            output[-1]["status"] = "incomplete"
        return self._same | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": cut} if cut else None,
            "output": output,
            "usage": _usage(usage),
            "decoding": decoding,
        }

    def failed(self, error: ErrorDetail, output: list[dict[str, Any]]) -> dict[str, Any]:
        told = {"code": "server_error", "message": error.message}
        return self._same | {"status": "failed", "error": told, "output": output, "usage": None}


class _Item:
    """An item of the output while it grows. ``kind``: reasoning, message or function_call."""

    def __init__(self, kind: str, item_id: str, call: ToolCall | None = None) -> None:
        self.kind, self.id = kind, item_id
        self.call_id = call.id or item_id if call else ""
        self.name = call.function.name or "" if call else ""
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class _Items:
    """Names items, and writes them down."""

    def __init__(self, response_id: str) -> None:
        self._suffix = response_id.partition("_")[2]
        self._count = 0

    def new(self, kind: str, call: ToolCall | None = None) -> _Item:
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = _Item(kind, f"{prefix}_{self._suffix}_{self._count}", call)
        self._count += 1
        return item

    def of(self, message: Message, choice: ChatChoice) -> list[_Item]:
        """The items of a whole message."""
        items: list[_Item] = []
        if message.reasoning_content:
            items.append(self.new("reasoning"))
            items[-1].texts.append(message.reasoning_content)
        if message.content or not message.tool_calls:
            items.append(self.new("message"))
            items[-1].texts.append(message.content or "")
            items[-1].logprobs += (choice.logprobs and choice.logprobs.content) or []
        for call in message.tool_calls or ():
            items.append(self.new("function_call", call))
            items[-1].texts.append(call.function.arguments or "")
        return items

    @staticmethod
    def begun(item: _Item) -> dict[str, Any]:
        return _written(item, "in_progress", [], "")

    @staticmethod
    def finished(item: _Item, status: str) -> dict[str, Any]:
        return _written(item, status, [item.part(item.text, item.logprobs)], item.text)


def _written(item: _Item, status: str, parts: list[dict[str, Any]], arguments: str) -> dict[str, Any]:
    same = {"id": item.id, "type": item.kind, "status": status}
    if item.kind == "function_call":
        return same | {"call_id": item.call_id, "name": item.name, "arguments": arguments}
    if item.kind == "reasoning":
        return same | {"summary": [], "content": parts}
    return same | {"role": "assistant", "content": parts}


class ResponsesWriter:
    """Numbered events in OpenAI's order. One item is open at a time."""

    def __init__(self, asked: ResponsesRequest) -> None:
        self._asked = asked
        self._number = 0
        self._response: _Response | None = None
        self._items = _Items("")
        self._open: _Item | None = None
        self._open_call = -1
        self._output: list[dict[str, Any]] = []
        self._finish_reason: str | None = "length"
        self._usage: Usage | None = None
        self._decoding = NULL

    def take(self, chunk: ChatAnswer) -> bytes:
        out = b""
        self._usage = chunk.usage or self._usage
        if chunk.decoding != NULL:
            self._decoding = chunk.decoding
        if self._response is None:
            self._response, self._items = _Response(self._asked, chunk), _Items(chunk.id)
            begun = self._response.under_way()
            out = self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        for choice in chunk.choices:
            out += self._add(choice.delta, (choice.logprobs and choice.logprobs.content) or [])
            self._finish_reason = choice.finish_reason or self._finish_reason
        return out

    def fail(self, error: ErrorDetail) -> bytes:
        told = {"code": error.code, "message": error.message, "param": error.param}
        out = self._event("error", **told)
        if self._response is not None:
            out += self._event("response.failed", response=self._response.failed(error, self._output))
        return out

    def end(self) -> bytes:
        assert self._response is not None, "a stream has a first event"
        out = b""
        if self._open is None and not self._output:
            out = self._enter("message")
        cut = self._finish_reason in _CUT
        out += self._close("incomplete" if cut else "completed")
        response = self._response.at_end(self._finish_reason, self._output, self._usage, self._decoding)
        return out + self._event("response.incomplete" if cut else "response.completed", response=response)

    def _add(self, delta: Message, logprobs: list[dict[str, Any]]) -> bytes:
        out = b""
        if delta.reasoning_content:
            out += self._enter("reasoning") + self._grow("response.reasoning_text.delta", delta.reasoning_content)
        if delta.content or logprobs:
            out += self._enter("message")
            assert self._open is not None
            self._open.logprobs += logprobs
            out += self._grow("response.output_text.delta", delta.content or "", logprobs=logprobs)
        for call in delta.tool_calls or ():
            out += self._enter("function_call", call)
            if call.function.arguments:
                out += self._grow("response.function_call_arguments.delta", call.function.arguments)
        return out

    def _enter(self, kind: str, call: ToolCall | None = None) -> bytes:
        """Open an item, unless it is open."""
        same_call = call is None or call.index == self._open_call
        if self._open is not None and self._open.kind == kind and same_call:
            return b""
        out = self._close("completed")
        item = self._open = self._items.new(kind, call)
        self._open_call = -1 if call is None else call.index
        out += self._event("response.output_item.added", output_index=self._index, item=self._items.begun(item))
        if kind != "function_call":
            out += self._event("response.content_part.added", **self._place(), part=item.part("", []))
        return out

    def _grow(self, name: str, text: str, **more: Any) -> bytes:
        assert self._open is not None
        self._open.texts.append(text)
        return self._event(name, **self._place(), delta=text, **more)

    def _close(self, status: str) -> bytes:
        item = self._open
        if item is None:
            return b""
        text, place = item.text, self._place()
        done = self._items.finished(item, status)
        if item.kind == "function_call":
            out = self._event("response.function_call_arguments.done", **place, name=item.name, arguments=text)
        else:
            if item.kind == "reasoning":
                out = self._event("response.reasoning_text.done", **place, text=text)
            else:
                out = self._event("response.output_text.done", **place, text=text, logprobs=item.logprobs)
            out += self._event("response.content_part.done", **place, part=done["content"][0])
        out += self._event("response.output_item.done", output_index=self._index, item=done)
        self._output.append(done)
        self._open = None
        return out

    @property
    def _index(self) -> int:
        """Of the open item."""
        return len(self._output)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        place: dict[str, Any] = {"item_id": self._open.id, "output_index": self._index}
        return place if self._open.kind == "function_call" else place | {"content_index": 0}

    def _event(self, kind: str, /, **data: Any) -> bytes:
        out = event(kind, {"type": kind, "sequence_number": self._number, **data})
        self._number += 1
        return out


def _shown_format(asked: ResponsesRequest) -> dict[str, Any]:
    wanted = asked.text.format if asked.text else None
    if wanted is None:
        return {"type": "text"}
    return {name: value for name, value in msgspec.to_builtins(wanted).items() if value is not None}


def _usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    details = usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": details.reasoning_tokens if details else 0},
        "total_tokens": usage.total_tokens,
    }
