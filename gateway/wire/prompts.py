"""From messages or prompts to token ids."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar, cast

from backends.types import ChatTokenizer, ModelInfo, NoChatTemplate, PromptTooLong
from gateway.wire.errors import InvalidRequest
from gateway.wire.requests import ChatMessage, CompletionRequest
from gateway.wire.validation import overlong_prompt

Prompt = str | list[int]
T = TypeVar("T")

_MESSAGE_CHARS = 64
"""What a message costs besides its text, in characters: templates are slow programs."""


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """As chat templates and other servers know it: text only, and ``developer`` under its older name ``system``."""
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.text, **({} if message.name is None else {"name": message.name})}


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """:func:`plain_message` of each."""
    return [plain_message(message) for message in messages]


def split_prompts(body: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion request, each a string or token ids. Raises :class:`InvalidRequest` for a mixture."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    kinds = {type(each) for each in body.prompt}
    if len(kinds) > 1:
        raise InvalidRequest(
            "'prompt' mixes strings, token ids or lists of token ids; send one kind only.",
            param="prompt",
            code="invalid_type",
        )
    if kinds == {str}:
        return list(cast(list[Prompt], body.prompt))
    if kinds == {int}:
        return [_not_empty(cast(list[int], body.prompt), "prompt")]
    lists = cast(list[list[int]], body.prompt)
    return [_not_empty(ids, f"prompt[{i}]") for i, ids in enumerate(lists)]


def refuse_unknown_ids(prompts: list[Prompt], vocab_size: int, field: str = "prompt") -> None:
    """Raises :class:`InvalidRequest` for a token id that the model doesn't know."""
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, list) and max(prompt) >= vocab_size:
            param = field if len(prompts) == 1 else f"{field}[{i}]"
            raise InvalidRequest(
                f"'{param}' has token id {max(prompt)}, but the vocabulary ends at {vocab_size - 1}.", param=param
            )


def _not_empty(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise InvalidRequest(f"'{param}' has no tokens; send at least one.", param=param)
    return ids


async def encode_messages(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    inline_chars: int,
    info: ModelInfo,
    variables: Mapping[str, Any] | None = None,
    *,
    continues: bool = False,
) -> tuple[int, ...]:
    """Apply the chat template, with ``variables`` for it to read. ``continues``: the last message is left open, and the
    answer goes on from it. Much text, or many messages, are a thread's work, so that they hold up nobody's stream.

    Raises :class:`InvalidRequest` for messages that the template refuses, or that can't fit the model's context.
    """
    more: dict[str, Any] = {"variables": variables} if variables else {}
    if continues:
        more["continues"] = True
    chars = sum(len(message["content"]) for message in messages) + (len(str(variables)) if variables else 0)
    small = chars <= inline_chars and len(messages) * _MESSAGE_CHARS <= max(inline_chars, _MESSAGE_CHARS)
    try:
        ids = await _run(small, partial(tokenizer.encode_chat, messages, info.max_model_len - 1, **more))
    except PromptTooLong as error:
        raise _does_not_fit(error, info, "messages") from None
    except NoChatTemplate:
        raise InvalidRequest(f"{info.name} has no chat template; use /v1/completions.", param="messages") from None
    except ValueError as error:
        raise InvalidRequest(f"The model's chat template refuses these messages: {error}", param="messages") from None
    return tuple(ids)


async def encode_prompts(
    tokenizer: ChatTokenizer, prompts: list[Prompt], inline_chars: int, info: ModelInfo
) -> tuple[tuple[int, ...], ...]:
    """Token ids of every prompt. Raises :class:`InvalidRequest` for one without tokens, or that can't fit.

    What they are together decides where they are tokenised, see :func:`encode_messages`.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    small = sum(map(len, texts)) <= inline_chars and len(texts) * _MESSAGE_CHARS <= max(inline_chars, _MESSAGE_CHARS)

    def encode() -> tuple[tuple[int, ...], ...]:
        encoded: list[tuple[int, ...]] = []
        for i, prompt in enumerate(prompts):
            param = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            try:
                ids = tokenizer.encode(prompt, info.max_model_len - 1) if isinstance(prompt, str) else prompt
            except PromptTooLong as error:
                raise _does_not_fit(error, info, param) from None
            if not ids:
                raise InvalidRequest(f"'{param}' has no tokens; send at least one.", param=param)
            encoded.append(tuple(ids))
        return tuple(encoded)

    return await _run(small, encode)


async def _run(here: bool, work: Callable[..., T], *args: Any) -> T:
    return work(*args) if here else await asyncio.get_running_loop().run_in_executor(_threads(), work, *args)


@cache
def _threads() -> ThreadPoolExecutor:
    """Threads of its own: what waits here must not keep asyncio's from looking up a host name, say. As many long texts
    at once as leave the engine cores; the others wait their turn."""
    return ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2), "tokenise")


def _does_not_fit(error: PromptTooLong, info: ModelInfo, param: str) -> InvalidRequest:
    return overlong_prompt(info, f"at least {error.tokens}", param)
