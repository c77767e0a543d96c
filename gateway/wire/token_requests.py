"""What clients may send to ``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from gateway.wire.no_op import RequestStruct, no_op
from gateway.wire.requests import ChatMessage, ModelName, TokenId


class TokenizeRequest(RequestStruct, kw_only=True):
    """``prompt`` or ``messages``. ``model`` may be left out where one is served."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: Annotated[Any, no_op(True, why="prompts in text get those that the model wants")] = None
    add_generation_prompt: Annotated[Any, no_op(True, why="an answer is always asked for")] = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestStruct, kw_only=True):
    tokens: list[TokenId]
    model: ModelName | None = None


class Detokenized(Struct):
    prompt: str
