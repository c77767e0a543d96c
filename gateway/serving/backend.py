"""What the pipeline asks of a backend, and what goes from stage to stage: the same for engines and for upstreams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from backends.grammar.spec import GrammarSpec
from backends.types import DecodingPlan, ModelInfo, SamplingParams, TokenGrammar
from gateway.admission import Places, Ticket
from gateway.routing.choice import Candidate
from gateway.serving.arms import ChosenArm
from gateway.serving.call import Call
from gateway.serving.planning import Deadline
from gateway.settings import GatewaySettings
from gateway.wire.requests import DecodingOptions, GenerationFields
from gateway.wire.responses import DecodingReport, RemoteReport
from policy.decision import Decision
from policy.spec import RequestFacts
from telemetry.request import RequestRecord
from telemetry.service import Telemetry


@dataclass(frozen=True, slots=True)
class Parameters:
    """What the body says of sampling, checked. ``max_tokens``: the limit that the client named, by the name it used.
    ``format``: what the answer must look like; None: free text."""

    sampling: SamplingParams
    max_tokens: tuple[str, int] | None
    format: GrammarSpec | None = None

    @property
    def most_tokens(self) -> int | None:
        return None if self.max_tokens is None else self.max_tokens[1]


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the prompts of a call come to, in tokens: counted by an engine, estimated for an upstream.

    ``answer``: the most that may be generated, over all sequences. ``token_ids`` and ``budgets`` (the most tokens of
    an answer) are of each prompt, and empty for an upstream. ``grammars``: one for each sequence; none for free text.
    """

    total: int
    longest: int
    answer: int
    token_ids: Sequence[tuple[int, ...]] = ()
    budgets: Sequence[int] = ()
    grammars: Sequence[TokenGrammar] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that was admitted, paid for and decided on: all that it takes to start it.

    ``deadline``: as it was set; ``deadline_s``: what is left of it. ``seed``: the client's, or drawn. ``request_id``:
    by what the client knows the request. ``settle`` keeps the report of what was done, and the seconds of an engine
    that this saved.
    """

    call: Call
    parameters: Parameters
    prompts: Prompts
    answer_id: str
    created: int
    deadline: Deadline | None
    deadline_s: float | None
    seed: int
    request_id: str
    hops: int
    ticket: Ticket
    record: RequestRecord
    telemetry: Telemetry
    settle: Callable[[DecodingReport | RemoteReport, float], None]


class Running(Protocol):
    """An answer under way: either gathered into a body, or begun and streamed.

    ``close`` is synchronous and idempotent: it ends what still runs and gives the places back.
    """

    async def gather(self) -> None:
        """Wait until all of it is there."""
        ...

    async def body(self) -> bytes:
        """Settle what was gathered, and write it as one response."""
        ...

    async def begin(self) -> None:
        """Wait until it says something: until then a failure still gets its proper status."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """What was begun, to its end; settled there, and closed."""
        ...

    def close(self) -> None: ...


class Plan(Protocol):
    """How a backend would answer one call, and why."""

    @property
    def decoding(self) -> DecodingPlan | None:
        """None for an upstream, which decodes as it will."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """As ``/admin/decisions`` and ``/v1/decoding/explain`` show it."""
        ...

    def start(self, prepared: Prepared) -> Running:
        """Send it off. Raises an :class:`APIError`, with nothing left running."""
        ...


class Backend(Protocol):
    """Something that serves a model: an engine of this process, or another server."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def places(self) -> Places: ...

    @property
    def max_running(self) -> int: ...

    @property
    def healthy(self) -> bool: ...

    @property
    def max_model_len(self) -> int | None:
        """None: not known."""
        ...

    @property
    def retry_after_s(self) -> float | None:
        """When it may be well again; None for an engine, which never is."""
        ...

    def load(self, own_places: int) -> float:
        """The share of it that others use, as a policy's rules see it; above 1 where requests wait.

        ``own_places``: how many of its places the call holds that this is asked for."""
        ...

    def candidate(self, body: GenerationFields, hops: int = 0) -> Candidate:
        """As the choice of a backend sees it. ``hops``: gateways that the request has come through."""
        ...

    def lacking(self, body: GenerationFields) -> Sequence[str]:
        """Names of the fields of ``body`` that it can't honour."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """For operators."""
        ...

    # The stages of an answer, in their order.

    def check_options(self, options: DecodingOptions | None) -> None:
        """Raises :class:`InvalidRequest` for what it could never do, whatever the policy says."""
        ...

    async def measure(self, call: Call, parameters: Parameters, settings: GatewaySettings) -> Prompts:
        """Raises :class:`InvalidRequest` for prompts that don't fit."""
        ...

    def plan(
        self, call: Call, facts: RequestFacts, decision: Decision, why: str | None, arm: ChosenArm | None = None
    ) -> Plan:
        """Put the client's own wishes in. ``why``: why this backend was chosen; ``arm``: and its arm, of upstreams that
        decode differently. Raises :class:`InvalidRequest`."""
        ...
