"""Chat completions as answers of Anthropic's Messages API, whole and streamed."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.interfaces.chat import NULL, ChatAnswer, ChatChoice, Message, ToolCall, event, read_answer
from gateway.wire.errors import APIError, ErrorDetail
from gateway.wire.responses import Usage

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: APIError) -> bytes:
    """How this API tells of a failure."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode(_error(kind, error.message))


def whole(body: bytes) -> bytes:
    """The answer of a chat completion's ``body``."""
    answer = read_answer(body)
    choice = answer.choices[0]
    message = _opening(answer)
    message["content"] = _blocks(choice.message)
    message |= _stop(choice)
    message["usage"] = _usage(answer.usage)
    message["decoding"] = answer.decoding
    return msgspec.json.encode(message)


class MessagesWriter:
    """``message_start``, blocks, ``message_delta``, ``message_stop``. One block is open at a time."""

    def __init__(self) -> None:
        self._begun = False
        self._blocks = 0
        self._open: str | None = None
        self._end = ChatChoice(finish_reason="length")
        self._usage: Usage | None = None
        self._decoding = NULL

    def take(self, chunk: ChatAnswer) -> bytes:
        out = b""
        self._usage = chunk.usage or self._usage
        if chunk.decoding != NULL:
            self._decoding = chunk.decoding
        if not self._begun:
            self._begun = True
            message = _opening(chunk) | {"content": [], "stop_reason": None, "stop_sequence": None}
            message["usage"] = _usage(chunk.usage)
            out = event("message_start", {"type": "message_start", "message": message})
        for choice in chunk.choices:
            out += self._add(choice.delta)
            if choice.finish_reason is not None:
                self._end = choice
        return out

    def fail(self, error: ErrorDetail) -> bytes:
        return event("error", _error("api_error", error.message))

    def end(self) -> bytes:
        data = {"type": "message_delta", "delta": _stop(self._end), "usage": _usage(self._usage)}
        data["decoding"] = self._decoding
        return self._close() + event("message_delta", data) + event("message_stop", {"type": "message_stop"})

    def _add(self, delta: Message) -> bytes:
        out = b""
        if delta.reasoning_content:
            out += self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out += self._delta({"type": "thinking_delta", "thinking": delta.reasoning_content})
        if delta.content:
            out += self._enter("text", {"type": "text", "text": ""})
            out += self._delta({"type": "text_delta", "text": delta.content})
        for call in delta.tool_calls or ():
            out += self._enter(f"tool {call.index}", _tool_use(call, {}))
            if call.function.arguments:
                out += self._delta({"type": "input_json_delta", "partial_json": call.function.arguments})
        return out

    def _enter(self, name: str, block: dict[str, Any]) -> bytes:
        """Open the block ``name``, unless it is open."""
        if self._open == name:
            return b""
        out = self._close()
        self._open = name
        data = {"type": "content_block_start", "index": self._blocks, "content_block": block}
        return out + event("content_block_start", data)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        data = {"type": "content_block_delta", "index": self._blocks, "delta": delta}
        return event("content_block_delta", data)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._blocks += 1
        return event("content_block_stop", {"type": "content_block_stop", "index": self._blocks - 1})


def _opening(answer: ChatAnswer) -> dict[str, Any]:
    return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model}


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content:
        blocks.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    return blocks + [_called(each) for each in message.tool_calls or ()]


def _called(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments or "{}"
    try:
        return _tool_use(call, msgspec.json.decode(arguments))
    except msgspec.DecodeError:
        # Cut by max_tokens: this API has no place for half a call.
        return {"type": "text", "text": arguments}


def _tool_use(call: ToolCall, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id or "", "name": call.function.name or "", "input": arguments}


def _stop(choice: ChatChoice) -> dict[str, Any]:
    by_string = choice.finish_reason == "stop" and isinstance(choice.stop_reason, str)
    reason = "stop_sequence" if by_string else _STOP_REASONS.get(choice.finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": choice.stop_reason if by_string else None}


def _usage(usage: Usage | None) -> dict[str, int]:
    """In this API what is read from the cache is no part of ``input_tokens``."""
    usage = usage or Usage(0, 0, 0)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}
