"""From messages or prompts to token ids."""

from __future__ import annotations

import asyncio
from typing import cast

from backends.types import ChatTokenizer
from gateway.errors import InvalidRequest
from gateway.openai_types import ChatMessage, CompletionRequest

Prompt = str | list[int]


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """Messages as chat templates know them: text only, and ``developer`` under its older name ``system``."""
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text,
            **({} if message.name is None else {"name": message.name}),
        }
        for message in messages
    ]


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


def refuse_unknown_ids(prompts: list[Prompt], vocab_size: int) -> None:
    """Raises :class:`InvalidRequest` for a token id that the model doesn't know."""
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, list) and max(prompt) >= vocab_size:
            param = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            raise InvalidRequest(
                f"'{param}' has token id {max(prompt)}, but the vocabulary ends at {vocab_size - 1}.", param=param
            )


def _not_empty(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise InvalidRequest(f"'{param}' has no tokens; send at least one.", param=param)
    return ids


async def encode_messages(
    tokenizer: ChatTokenizer, messages: list[dict[str, str]], inline_chars: int
) -> tuple[int, ...]:
    """Apply the chat template. A long text is tokenised in a thread, so that it holds up nobody's stream."""
    chars = sum(len(message["content"]) for message in messages)
    try:
        ids = (
            tokenizer.encode_chat(messages)
            if chars <= inline_chars
            else await asyncio.to_thread(tokenizer.encode_chat, messages)
        )
    except ValueError as error:
        raise InvalidRequest(f"The model's chat template refuses these messages: {error}", param="messages") from None
    return tuple(ids)


async def encode_prompts(
    tokenizer: ChatTokenizer, prompts: list[Prompt], inline_chars: int
) -> tuple[tuple[int, ...], ...]:
    """Token ids of every prompt. Raises :class:`InvalidRequest` for a prompt without tokens."""
    encoded: list[tuple[int, ...]] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids = (
                tokenizer.encode(prompt)
                if len(prompt) <= inline_chars
                else await asyncio.to_thread(tokenizer.encode, prompt)
            )
            if not ids:
                param = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
                raise InvalidRequest(f"'{param}' has no tokens; send at least one.", param=param)
        else:
            ids = prompt
        encoded.append(tuple(ids))
    return tuple(encoded)
