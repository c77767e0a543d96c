"""What a client asks for, whichever backend answers it: made by an endpoint, answered by the pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from backends.grammar.spec import GrammarSpec
from backends.types import ChatTokenizer, Decoder, DecodingPlan, TokenGrammar
from gateway.serving.results import ChoiceResult
from gateway.serving.streaming import ChoiceWriter
from gateway.wire.requests import GenerationFields
from gateway.wire.structured import asked_format


class Grammars(Protocol):
    """See :class:`backends.grammar.compiler.GrammarCompiler`."""

    def open(self, spec: GrammarSpec) -> TokenGrammar:
        """Raises :class:`GrammarRefused`. Takes milliseconds."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine, the tokenizer of its model, and what opens grammars for its tokens; None: free text is all it can."""

    decoder: Decoder
    tokenizer: ChatTokenizer
    grammars: Grammars | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What identifies a response of an engine and goes into its every chunk."""

    id: str
    created: int
    model: str
    prompt_tokens: int
    plan: DecodingPlan


class Call(ABC):
    """What differs between the endpoints. Made from a validated body; ``prompts`` counts prompts, not choices.

    Knows no backend: the same call may be tried on several.
    """

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]
    continues: bool = False
    """Whether an answer goes on from its prompt's text."""
    body: GenerationFields
    prompts: int
    logprobs: int | None
    prompt: Any
    """What is to be answered, as an upstream is sent it: plain messages, or ``prompt`` as it came."""
    estimated_tokens: list[int]
    """Of each prompt: exact for token ids, a guess by length for text."""

    @property
    def sequences(self) -> int:
        """How many places the request needs."""
        return self.prompts * (self.body.n or 1)

    @property
    def traced(self) -> bool:
        """Whether the client wants to be told what each step did."""
        return self.body.decoding is not None and bool(self.body.decoding.trace)

    def answer_format(self) -> GrammarSpec | None:
        """What the answer must look like; None: free text. Raises :class:`InvalidRequest`."""
        return asked_format(self.body, ignore_eos=bool(self.body.ignore_eos))

    @abstractmethod
    async def encode(self, served: ServedModel, inline_chars: int) -> Sequence[tuple[int, ...]]:
        """Token ids of each prompt."""

    @abstractmethod
    def choice_writer(self) -> ChoiceWriter:
        """The writer of one streamed choice."""

    @abstractmethod
    def response(self, answer: Answer, results: Sequence[ChoiceResult]) -> bytes:
        """The whole body of a response that is not streamed."""
