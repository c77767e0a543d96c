"""One call from its checked body to its answer, stage by stage, whichever backend answers.

Check, admit, measure, charge, decide, plan, start, stream or gather; what the answer has cost is settled at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from litestar import Request
from litestar.response.base import ASGIResponse

from gateway.admission import Ticket
from gateway.auth.charging import charge, refuse_early
from gateway.request_record import note_asked, record_of
from gateway.serving.arms import ChosenArm
from gateway.serving.backend import Backend, Parameters, Plan, Prepared, Prompts, Running
from gateway.serving.call import Call
from gateway.serving.generation import unless_disconnected
from gateway.serving.planning import deadline_of, turn_of
from gateway.serving.state import GatewayState
from gateway.wire.event_stream import EventStream
from gateway.wire.hops import hops_of
from gateway.wire.request_id import request_id_of
from gateway.wire.validation import requested_max_tokens, sampling_params
from policy.decision import Decision
from policy.records import DecisionRecord
from policy.spec import RequestFacts
from policy.statistics.snapshot import KeyStats

_EXPLAINED = "explain-"


@dataclass(frozen=True, slots=True)
class Decided:
    """A call's facts, the policy's decision on them, and the plan that came of it and of the client's wishes.

    ``stats``: what the decision looked at, as it was then; None where an upstream decodes.
    """

    facts: RequestFacts
    decision: Decision
    plan: Plan
    stats: KeyStats | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call on one backend. ``why`` it was chosen; None: the model has no other. ``arm``: see ``serving.arms``."""

    call: Call
    backend: Backend
    class_name: str
    why: str | None
    request: Request[Any, Any, Any]
    gateway: GatewayState
    arm: ChosenArm | None = None

    async def answer(self) -> ASGIResponse:
        """Have the backend answer, streamed or not.

        A stream's response starts only with its first chunk that says something: until then a failure still gets its
        proper status, and the request may still go elsewhere.
        """
        call, backend, gateway, scope = self.call, self.backend, self.gateway, self.request.scope
        arrived = gateway.clock()
        parameters = self._parameters()
        note_asked(record_of(scope), call.body, parameters.most_tokens)
        record_of(scope).backend = backend.name
        # Before a place is taken: what can't be done at all is refused first, then whom the limits keep out anyway.
        backend.check_options(call.body.decoding)
        refuse_early(scope, gateway.access)
        ticket = gateway.admission.admit(call.sequences, backend.places)
        try:
            prompts = await backend.measure(call, parameters, gateway.settings)
            await charge(
                scope,
                gateway.access,
                ticket,
                prompt_tokens=prompts.total,
                answer_tokens=prompts.answer,
                named=parameters.max_tokens is not None,
            )
            running = self._start(parameters, prompts, ticket, arrived)
        except BaseException:
            ticket.close()
            raise
        return await self._respond(running)

    async def explain(self, ticket: Ticket) -> dict[str, Any]:
        """The same stages, dry: what would be done, and why. ``ticket``: of those that only ask."""
        call, backend, gateway = self.call, self.backend, self.gateway
        parameters = self._parameters()
        backend.check_options(call.body.decoding)
        await charge(self.request.scope, gateway.access, ticket, prompt_tokens=0, answer_tokens=0, named=False)
        # Paid for, whatever becomes of it.
        ticket.used_tokens = 0
        prompts = await backend.measure(call, parameters, gateway.settings)
        decided = self._decide(prompts, _EXPLAINED + gateway.new_id(), own_places=0, dry=True)
        facts, stats, decision = decided.facts, decided.stats, decided.decision
        deadline = deadline_of(call.body.decoding, gateway.settings.deadline_s, decision)
        return {
            "facts": {name: getattr(facts, name) for name in type(facts).__slots__ if name != "request_id"},
            "decision": decision.as_dict(),
            "plan": decided.plan.as_dict(),
            "deadline": None if deadline is None else deadline._asdict(),
            "notes": _notes(decision, facts),
            "statistics": None if stats is None else stats.as_dict(gateway.controller.clock()),
        }

    def _parameters(self) -> Parameters:
        """What contradicts itself is refused here, in our words, whichever backend would see it."""
        body = self.call.body
        sampling = sampling_params(body, self.backend.info, self.gateway.settings, self.call.logprobs)
        return Parameters(sampling, requested_max_tokens(body), self.call.answer_format())

    def _decide(self, prompts: Prompts, answer_id: str, *, own_places: int, dry: bool = False) -> Decided:
        """The policy's word, and the client's. ``dry``: only asked; nothing is remembered of it."""
        call, info, controller = self.call, self.backend.info, self.gateway.controller
        facts = RequestFacts(
            request_id=answer_id,
            model=info.name,
            class_name=self.class_name,
            # Set by whatever authenticates requests; without it there is one tenant, without a name.
            tenant=self.request.scope.get("state", {}).get("tenant", ""),
            turn=turn_of(call.body),
            prompt_tokens=prompts.longest,
            temperature=call.body.temperature,
            load=self.backend.load(own_places),
            model_heads=info.num_heads,
        )
        decision = controller.decide(facts, dry=dry)
        plan = self.backend.plan(call, facts, decision, self.why, self.arm)
        stats = None
        if plan.decoding is not None:
            stats = controller.statistics.live.find(facts.model, facts.class_name, decision.bucket)
        return Decided(facts, decision, plan, stats)

    def _start(self, parameters: Parameters, prompts: Prompts, ticket: Ticket, arrived: float) -> Running:
        """Decide, keep the decision where it can be asked for, and send the call off."""
        call, gateway, record = self.call, self.gateway, record_of(self.request.scope)
        controller, clock = gateway.controller, gateway.telemetry.clock
        client_id = request_id_of(self.request.scope, gateway.new_id)
        answer_id = record.answer_id = call.id_prefix + gateway.new_id()
        deciding = clock()
        decided = self._decide(prompts, answer_id, own_places=call.sequences)
        record.decided = deciding, clock()
        record.decision, record.plan, record.stats = decided.decision, decided.plan.decoding, decided.stats
        deadline = deadline_of(call.body.decoding, gateway.settings.deadline_s, decided.decision)
        record.deadline, record.control_share = deadline, decided.decision.control_share
        prepared = Prepared(
            call=call,
            parameters=parameters,
            prompts=prompts,
            answer_id=answer_id,
            created=int(gateway.wall_clock()),
            deadline=deadline,
            deadline_s=None if deadline is None else max(deadline.seconds - (gateway.clock() - arrived), 0.0),
            seed=gateway.new_seed() if call.body.seed is None else call.body.seed,
            request_id=client_id,
            hops=hops_of(self.request),
            ticket=ticket,
            record=record,
            telemetry=gateway.telemetry,
            settle=lambda report, saved_s: controller.finish(answer_id, decided.facts, report, saved_s),
        )
        kept = DecisionRecord(
            answer_id,
            decided.facts,
            decided.decision,
            gateway.wall_clock(),
            decided.plan.as_dict(),
            backend=self.backend.name,
            deadline=None if deadline is None else deadline._asdict(),
        )
        controller.record(kept, client_id)
        record.submitted_at = clock()
        return decided.plan.start(prepared)

    async def _respond(self, running: Running) -> ASGIResponse:
        """Streamed on, or gathered."""
        receive = self.request.receive
        try:
            if self.call.body.stream:
                await unless_disconnected(receive, running.begin())
                return EventStream(running.events(), close=running.close)
            await unless_disconnected(receive, running.gather())
            running.close()
            return ASGIResponse(body=await running.body(), media_type="application/json", status_code=200)
        except BaseException:
            running.close()
            raise


def _notes(decision: Decision, facts: RequestFacts) -> list[str]:
    """What may turn out otherwise for a request that is really made."""
    if not decision.control_share:
        return []
    return [
        f"{decision.control_share:.3g} of the requests of class {facts.class_name} are drawn at random to decode "
        "vanilla, to compare with; their records and answers say so"
    ]
