"""``POST /v1/chat/completions`` and ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from litestar import Request, post
from litestar.response.base import ASGIResponse

from backends.grammar.spec import GrammarSpec
from backends.types import ChatTokenizer, PositionLogprobs
from gateway.auth.guard import needs
from gateway.serving.call import Answer, Call, ServedModel
from gateway.serving.chat_answers import ReadChoiceWriter, message_of
from gateway.serving.dispatch import dispatch
from gateway.serving.results import ChoiceResult, usage, whole_report
from gateway.serving.state import gateway_of
from gateway.serving.streaming import ChatChoiceWriter, ChoiceWriter, CompletionChoiceWriter
from gateway.tools.asked import check_chat, facts_of, template_input, upstream_messages
from gateway.tools.forced import forced_call
from gateway.tools.reader import AnswerForm
from gateway.tools.template import END_THINK
from gateway.upstream.payload import tokens_of
from gateway.wire.logprobs import CompletionLogprobsWriter, chat_logprobs, prompt_positions
from gateway.wire.prompts import encode_messages, encode_prompts, refuse_unknown_ids, split_prompts
from gateway.wire.request_body import BodyDecoder, off_the_loop, read_json
from gateway.wire.requests import ChatCompletionRequest, CompletionRequest
from gateway.wire.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from gateway.wire.validation import chat_logprobs as wanted_chat_logprobs
from gateway.wire.validation import check_echo, refuse_best_of

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
CHAT_BODIES = BodyDecoder(ChatCompletionRequest, {f"POST {COMPLETION_PATH}": CompletionRequest})
COMPLETION_BODIES = BodyDecoder(CompletionRequest, {f"POST {CHAT_PATH}": ChatCompletionRequest})


_TAIL = 8
"""Tokens at a prompt's end in which it may open thoughts."""


def new_hex() -> str:
    return uuid4().hex


class ChatCall(Call):
    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"
    thinking: bool | None = None
    """Whether thoughts are asked for, where the model's template can be told; None: as it likes."""

    def __init__(self, body: ChatCompletionRequest, new_id: Callable[[], str] = new_hex) -> None:
        check_chat(body)
        self.body = self._chat = body
        self.prompts = 1
        self.logprobs = wanted_chat_logprobs(body)
        self.prompt = upstream_messages(body.messages)
        self.continues = bool(body.continue_final_message)
        self.estimated_tokens = [tokens_of(sum(len(each.text) for each in body.messages))]
        self._new_id = new_id
        self._forced = forced_call(body)
        self._form, self._end_id = AnswerForm(), None

    def answer_format(self) -> GrammarSpec | None:
        return self._forced or super().answer_format()

    async def encode(self, served: ServedModel, inline_chars: int) -> Sequence[tuple[int, ...]]:
        tokenizer, info = served.tokenizer, served.decoder.info
        asked = template_input(self._chat, facts_of(tokenizer), thinking=self.thinking)
        ids = await encode_messages(
            tokenizer, asked.messages, inline_chars, info, asked.variables, continues=self.continues
        )
        self._form = asked.form_after(tokenizer.decode(ids[-_TAIL:]) if asked.form.thinks else "")
        self._end_id = tokenizer.id_of(END_THINK) if self._form.thinks else None
        return [ids]

    def choice_writer(self) -> ChoiceWriter:
        return ChatChoiceWriter() if self._form.is_plain else ReadChoiceWriter(self._form, self._new_id, self._end_id)

    def _message(self, result: ChoiceResult) -> AssistantMessage:
        if self._form.is_plain:
            return AssistantMessage(result.text)
        return message_of(result, self._form, self._new_id, self._end_id)

    def response(self, answer: Answer, results: Sequence[ChoiceResult]) -> bytes:
        choices = [
            ChatChoice(
                index=index,
                message=self._message(result),
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
                usage=usage(answer.prompt_tokens, results, self.prompts),
                decoding=whole_report(answer.plan, results, trace=self.traced),
            )
        )


class _Echoed(NamedTuple):
    """The prompts as an engine's model has read them."""

    tokenizer: ChatTokenizer
    token_ids: Sequence[Sequence[int]]


class CompletionCall(Call):
    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    prompt_field = "prompt"
    continues = True

    def __init__(self, body: CompletionRequest) -> None:
        refuse_best_of(body)
        check_echo(body)
        self.body = self._completion = body
        self._echoed: _Echoed | None = None
        self.prompt, self._prompts = body.prompt, split_prompts(body)
        self.estimated_tokens = [tokens_of(len(each)) if isinstance(each, str) else len(each) for each in self._prompts]
        self.prompts = len(self._prompts)
        self.logprobs = body.logprobs

    async def encode(self, served: ServedModel, inline_chars: int) -> Sequence[tuple[int, ...]]:
        info = served.decoder.info
        refuse_unknown_ids(self._prompts, info.vocab_size)
        token_ids = await encode_prompts(served.tokenizer, self._prompts, inline_chars, info)
        self._echoed = _Echoed(served.tokenizer, token_ids) if self._completion.echo else None
        return token_ids

    def choice_writer(self) -> CompletionChoiceWriter:
        return CompletionChoiceWriter()

    def response(self, answer: Answer, results: Sequence[ChoiceResult]) -> bytes:
        if self._completion.max_tokens == 0:
            results = [result.without_answer() for result in results]
        choices = [
            CompletionChoice(
                index=index,
                text=self._echo_of(index) + result.text,
                logprobs=self._logprobs_of(index, result),
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
                usage=usage(answer.prompt_tokens, results, self.prompts),
                decoding=whole_report(answer.plan, results, trace=self.traced),
            )
        )

    def _echo_of(self, index: int) -> str:
        if self._echoed is None:
            return ""
        number = index // (self.body.n or 1)
        prompt = self._prompts[number]
        return prompt if isinstance(prompt, str) else self._echoed.tokenizer.decode(self._echoed.token_ids[number])

    def _logprobs_of(self, index: int, result: ChoiceResult) -> CompletionLogprobs | None:
        if self.logprobs is None:
            return None
        prompt: list[PositionLogprobs] = []
        if self._echoed is not None:
            token_ids = self._echoed.token_ids[index // (self.body.n or 1)]
            prompt = prompt_positions(self._echoed.tokenizer, token_ids, result.prompt_scores)
        return CompletionLogprobsWriter().write(result.logprobs, prompt)


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
