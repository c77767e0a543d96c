"""``POST /v1/chat/completions`` and ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request, post
from litestar.response.base import ASGIResponse

from gateway.auth.guard import needs
from gateway.serving.call import Answer, Call, ServedModel
from gateway.serving.dispatch import dispatch
from gateway.serving.results import ChoiceResult, decoding_report, usage
from gateway.serving.state import gateway_of
from gateway.serving.streaming import ChatChoiceWriter, CompletionChoiceWriter
from gateway.upstream.payload import tokens_of
from gateway.wire.logprobs import CompletionLogprobsWriter, chat_logprobs
from gateway.wire.prompts import encode_messages, encode_prompts, plain_messages, refuse_unknown_ids, split_prompts
from gateway.wire.request_body import BodyDecoder, off_the_loop, read_json
from gateway.wire.requests import ChatCompletionRequest, CompletionRequest
from gateway.wire.responses import AssistantMessage, ChatChoice, ChatCompletion, Completion, CompletionChoice
from gateway.wire.validation import chat_logprobs as wanted_chat_logprobs
from gateway.wire.validation import refuse_best_of

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
CHAT_BODIES = BodyDecoder(ChatCompletionRequest, {f"POST {COMPLETION_PATH}": CompletionRequest})
COMPLETION_BODIES = BodyDecoder(CompletionRequest, {f"POST {CHAT_PATH}": ChatCompletionRequest})


class ChatCall(Call):
    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"

    def __init__(self, body: ChatCompletionRequest) -> None:
        self.body = body
        self.prompts = 1
        self.logprobs = wanted_chat_logprobs(body)
        self.prompt = self._messages = plain_messages(body.messages)
        self.estimated_tokens = [tokens_of(sum(len(each["content"]) for each in self._messages))]

    async def encode(self, served: ServedModel, inline_chars: int) -> Sequence[tuple[int, ...]]:
        return [await encode_messages(served.tokenizer, self._messages, inline_chars, served.decoder.info)]

    def choice_writer(self) -> ChatChoiceWriter:
        return ChatChoiceWriter()

    def response(self, answer: Answer, results: Sequence[ChoiceResult]) -> bytes:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(result.text),
                logprobs=None if self.logprobs is None else chat_logprobs(result.logprobs),
                finish_reason=result.finish_reason,
                stop_reason=result.stop_reason,
            )
            for index, result in enumerate(results)
        ]
        return msgspec.json.encode(
            ChatCompletion(
                id=answer.id,
                created=answer.created,
                model=answer.model,
                choices=choices,
                usage=usage(answer.prompt_tokens, results),
                decoding=decoding_report(answer.plan, results),
            )
        )


class CompletionCall(Call):
    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    prompt_field = "prompt"
    continues = True

    def __init__(self, body: CompletionRequest) -> None:
        refuse_best_of(body)
        self.body = body
        self.prompt, self._prompts = body.prompt, split_prompts(body)
        self.estimated_tokens = [tokens_of(len(each)) if isinstance(each, str) else len(each) for each in self._prompts]
        self.prompts = len(self._prompts)
        self.logprobs = body.logprobs

    async def encode(self, served: ServedModel, inline_chars: int) -> Sequence[tuple[int, ...]]:
        info = served.decoder.info
        refuse_unknown_ids(self._prompts, info.vocab_size)
        return await encode_prompts(served.tokenizer, self._prompts, inline_chars, info)

    def choice_writer(self) -> CompletionChoiceWriter:
        return CompletionChoiceWriter()

    def response(self, answer: Answer, results: Sequence[ChoiceResult]) -> bytes:
        choices = [
            CompletionChoice(
                index=index,
                text=result.text,
                logprobs=None if self.logprobs is None else CompletionLogprobsWriter().write(result.logprobs),
                finish_reason=result.finish_reason,
                stop_reason=result.stop_reason,
            )
            for index, result in enumerate(results)
        ]
        return msgspec.json.encode(
            Completion(
                id=answer.id,
                created=answer.created,
                model=answer.model,
                choices=choices,
                usage=usage(answer.prompt_tokens, results),
                decoding=decoding_report(answer.plan, results),
            )
        )


def chat_call(body: bytes) -> ChatCall:
    """Raises :class:`InvalidRequest`, as :func:`completion_call` does."""
    return ChatCall(CHAT_BODIES.decode(body))


def completion_call(body: bytes) -> CompletionCall:
    return CompletionCall(COMPLETION_BODIES.decode(body))


@post(CHAT_PATH, status_code=200, opt=needs("inference"))
async def create_chat_completion(request: Request[Any, Any, Any]) -> ASGIResponse:
    call = await off_the_loop(chat_call, await read_json(request))
    return await dispatch(call, request, gateway_of(request))


@post(COMPLETION_PATH, status_code=200, opt=needs("inference"))
async def create_completion(request: Request[Any, Any, Any]) -> ASGIResponse:
    call = await off_the_loop(completion_call, await read_json(request))
    return await dispatch(call, request, gateway_of(request))
