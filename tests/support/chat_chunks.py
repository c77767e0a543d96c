"""Events of a chat's stream, as the translations of other APIs get them."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.interfaces.chat import EventTranslator, EventWriter


def chunk(delta: dict[str, Any], finish_reason: str | None = None, answer_id: str = "x_1") -> dict[str, Any]:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return {"id": answer_id, "created": 5, "model": "m", "choices": choices}


def call_of(index: int, **function: Any) -> dict[str, Any]:
    """A delta with a piece of a tool's call; its first piece has the name."""
    call_id = {"id": f"call_{index}"} if "name" in function else {}
    return {"tool_calls": [{"index": index, **call_id, "function": function}]}


THOUGHTS_TEXT_AND_CALLS: tuple[Any, ...] = (
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "hm"}),
    chunk({"content": "Let me "}),
    chunk({"content": "see."}),
    chunk(call_of(0, name="look", arguments="")),
    chunk(call_of(0, arguments='{"at":')),
    chunk(call_of(0, arguments="1}")),
    chunk(call_of(1, name="go", arguments="{}")),
    chunk({}, "tool_calls"),
    {"id": "x_1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}},
    b"[DONE]",
)


def translated(writer: EventWriter, *chunks: Any) -> list[bytes]:
    """The events that ``writer`` makes of ``chunks`` (JSON values, or bytes as they are)."""
    translate = EventTranslator(writer)
    raw = b"".join(
        translate(b"data: %b\n\n" % (each if isinstance(each, bytes) else msgspec.json.encode(each))) for each in chunks
    )
    return [block for block in raw.split(b"\n\n") if block]
