"""What a chat request asks of tools, thoughts and the chat template, for the model that answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from backends.types import ChatTokenizer
from gateway.tools.forced import is_forced
from gateway.tools.reader import AnswerForm
from gateway.tools.rendering import template_messages, template_tools
from gateway.tools.template import END_THINK, THINK, CallStyle, TemplateFacts
from gateway.wire.errors import InvalidRequest
from gateway.wire.prompts import plain_message
from gateway.wire.requests import ChatCompletionRequest, ChatMessage
from gateway.wire.structured import asked_formats
from gateway.wire.tools import check_tools

_OURS = frozenset({"messages", "tools", "add_generation_prompt", "documents", "continue_final_message"})
"""Variables of templates that have fields of their own, or none."""
_NO_THOUGHTS = ("none", "minimal")


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a chat template is given, and what the answer to it may hold."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    form: AnswerForm

    def form_after(self, tail: str) -> AnswerForm:
        """``tail``: the end of the prompt's text, where some templates begin the thoughts, or skip them."""
        if not self.form.thinks:
            return self.form
        end = tail.rstrip()
        return replace(self.form, thinks=not end.endswith(END_THINK), thinking=end.endswith(THINK))


def facts_of(tokenizer: ChatTokenizer) -> TemplateFacts:
    return _facts(tokenizer.chat_template or "", tokenizer.template_variables)


_facts = lru_cache(maxsize=64)(TemplateFacts.of)


def check_chat(body: ChatCompletionRequest) -> None:
    """The rules that span fields. Raises :class:`InvalidRequest`."""
    check_tools(body)
    # A forced call has no text whose form could be asked for; a free answer may be either.
    free = body.tools and body.tool_choice != "none" and not is_forced(body)
    if free and (formats := asked_formats(body)):
        raise InvalidRequest(
            f"'{formats[0].param}' and 'tools' both say what the answer must look like; send one of them, or "
            "tool_choice none, or required.",
            param=formats[0].param,
        )
    if body.ignore_eos and is_forced(body):
        raise InvalidRequest(
            "'ignore_eos' would write on after the call that 'tool_choice' asks for; leave it out.", param="ignore_eos"
        )
    last = body.messages[-1]
    if body.continue_final_message:
        if last.role != "assistant" or not last.text.strip() or last.tool_calls:
            raise InvalidRequest(
                "'continue_final_message' goes on from the last message: it must be the assistant's, with text.",
                param="continue_final_message",
            )
        if body.add_generation_prompt:
            raise InvalidRequest(
                "'add_generation_prompt' begins a new message, and 'continue_final_message' goes on with the last; "
                "send one of them.",
                param="add_generation_prompt",
            )
    elif body.add_generation_prompt is False:
        raise InvalidRequest(
            "'add_generation_prompt' false is not supported without continue_final_message; leave it out.",
            param="add_generation_prompt",
            code="unsupported_parameter",
        )


def template_input(body: ChatCompletionRequest, facts: TemplateFacts, *, thinking: bool | None = None) -> TemplateInput:
    """For a model whose template is ``facts``'s. ``thinking``: asked for or not, where the template can be told.

    Raises :class:`InvalidRequest` for what the model can't do.
    """
    offered = () if body.tool_choice == "none" else body.tools or ()
    variables = _variables(body, facts)
    if thinking is not None and "enable_thinking" in facts.variables:
        variables.setdefault("enable_thinking", thinking)
    if offered and facts.knows_tools:
        variables["tools"] = template_tools(offered)
    forced = is_forced(body)
    if offered and not forced and facts.style is CallStyle.UNKNOWN:
        raise InvalidRequest(
            "'tools' with tool_choice auto is not supported for this model: its way to write calls is not known here. "
            "Ask with tool_choice required or for a named function, or send tool_choice none.",
            param="tools",
            code="unsupported_parameter",
        )
    constrained = forced or bool(asked_formats(body))
    form = AnswerForm(
        names=frozenset(each.function.name for each in offered),
        style=facts.style if offered and not forced else None,
        forced=forced,
        one_call=body.parallel_tool_calls is False,
        # What a grammar holds from its first token has no thoughts.
        thinks=facts.thinks and not constrained and not body.continue_final_message,
    )
    return TemplateInput(template_messages(body.messages, offered, facts), variables, form)


def upstream_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """As another server of this API takes them."""
    sent = []
    for message in messages:
        plain = plain_message(message)
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": each.id,
                    "type": "function",
                    "function": {"name": each.function.name, "arguments": each.function.arguments},
                }
                for each in message.tool_calls
            ]
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        sent.append(plain)
    return sent


def _variables(body: ChatCompletionRequest, facts: TemplateFacts) -> dict[str, Any]:
    given = dict(body.chat_template_kwargs or {})
    for name in given:
        if name in _OURS or name not in facts.variables:
            raise InvalidRequest(
                f"'chat_template_kwargs.{name[:100]}' is not supported: "
                + ("it has a field of its own." if name in _OURS else "this model's chat template reads no such name."),
                param=f"chat_template_kwargs.{name[:100]}",
                code="unsupported_parameter",
            )
    effort = body.reasoning_effort
    if effort is None:
        return given
    if "reasoning_effort" in facts.variables:
        return {"reasoning_effort": effort, **given}
    if "enable_thinking" in facts.variables:
        return {"enable_thinking": effort not in _NO_THOUGHTS, **given}
    if effort not in _NO_THOUGHTS:
        raise InvalidRequest(
            "'reasoning_effort' is not supported: this model's chat template takes none. Leave it out.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return given
