"""What a chat template says of its model: whether it knows tools, how the model writes calls, and where it thinks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

THINK, END_THINK = "<think>", "</think>"


class CallStyle(Enum):
    """How a model writes that it calls a tool."""

    TAGGED = "tagged"
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` beside text: Hermes, Qwen 2 and 3."""
    WHOLE = "whole"
    """The whole answer is a call, or a list of calls, in JSON: Llama 3, Mistral."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """``variables``: the names that the template reads. ``knows_tools``: it shows them to the model; else they are
    described in the system message. ``thinks``: it has marks for thoughts."""

    variables: frozenset[str]
    knows_tools: bool
    style: CallStyle
    thinks: bool

    @classmethod
    def of(cls, source: str, variables: frozenset[str]) -> TemplateFacts:
        knows = "tools" in variables
        return cls(variables, knows, _style(source) if knows else CallStyle.TAGGED, END_THINK in source)


def _style(source: str) -> CallStyle:
    if "<function=" in source or "<arg_key>" in source:
        return CallStyle.UNKNOWN
    if "<tool_call>" in source:
        return CallStyle.TAGGED
    if "[TOOL_CALLS]" in source or "<|python_tag|>" in source or '"parameters"' in source:
        return CallStyle.WHOLE
    return CallStyle.UNKNOWN
