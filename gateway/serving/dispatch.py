"""From a request to a backend, and to the next one when that fails before it has said anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from litestar import Request
from litestar.response.base import ASGIResponse

from gateway.request_record import record_of
from gateway.routing.choice import Candidate, Choice, choose, in_the_running
from gateway.serving.arms import ChosenArm
from gateway.serving.backend import Backend
from gateway.serving.call import Call
from gateway.serving.controller import Controller
from gateway.serving.pipeline import Attempt
from gateway.serving.planning import prompt_to_classify, turn_of
from gateway.serving.state import GatewayState
from gateway.serving.targets import UpstreamTarget
from gateway.upstream.errors import UpstreamFailure, UpstreamUnavailable
from gateway.wire.errors import APIError, InvalidRequest, QueueFull, Unavailable
from gateway.wire.hops import hops_of
from gateway.wire.requests import GenerationFields
from gateway.wire.validation import requested_max_tokens
from policy.spec import RequestFacts


@dataclass(frozen=True, slots=True)
class RoutedTo:
    """``backend`` None: nobody can take it; :func:`refusal` says so to the client."""

    class_name: str
    backend: Backend | None
    choice: Choice
    arm: ChosenArm | None = None


def route(
    call: Call,
    request: Request[Any, Any, Any],
    gateway: GatewayState,
    class_name: str | None = None,
    failed: Mapping[str, str] | None = None,
    *,
    dry: bool = False,
) -> RoutedTo:
    """Where ``call`` would go now. ``failed``: backends that failed on it, and how. ``dry``: it is only asked.

    Raises ModelNotFound or, for a class that there is not, InvalidRequest."""
    backends = gateway.backends.of_model(call.body.model)
    if class_name is None:
        class_name = _classified(call, request, gateway)
    hops = hops_of(request)
    candidates = [_candidate(each, call, hops, failed or {}) for each in backends]
    arm = _arm(call, request, gateway, class_name, candidates, dry=dry)
    choice = choose(candidates, class_name, call.sequences, None if arm is None else arm.choice.name)
    return RoutedTo(class_name, None if choice.name is None else gateway.backends[choice.name], choice, arm)


def _arm(
    call: Call,
    request: Request[Any, Any, Any],
    gateway: GatewayState,
    class_name: str,
    candidates: Sequence[Candidate],
    *,
    dry: bool,
) -> ChosenArm | None:
    """Which of the ways to decode that the model's upstreams offer; None where they say nothing of it, or none can."""
    body, offers = call.body, []
    for each in in_the_running(candidates, class_name, call.sequences) if any(each.arm for each in candidates) else ():
        backend = gateway.backends[each.name]
        if isinstance(backend, UpstreamTarget) and (offer := backend.offer(each)) is not None:
            offers.append(offer)
    if not offers:
        return None
    facts = RequestFacts(
        request_id="",
        model=body.model,
        class_name=class_name,
        tenant=request.scope.get("state", {}).get("tenant", ""),
        turn=turn_of(body),
        prompt_tokens=max(call.estimated_tokens, default=0),
        temperature=body.temperature,
        load=min(each.candidate.load for each in offers),
    )
    method = (body.decoding.method if body.decoding else None) or "auto"
    _, most_tokens = requested_max_tokens(body) or ("", None)
    return gateway.controller.arms.choose(facts, offers, method, most_tokens, dry=dry)


def _classified(call: Call, request: Request[Any, Any, Any], gateway: GatewayState) -> str:
    record, began = record_of(request.scope), gateway.telemetry.clock()
    record.model = call.body.model
    record.class_name = class_of(call.body, gateway.controller)
    record.classified = began, gateway.telemetry.clock()
    hinted = call.body.decoding is not None and call.body.decoding.class_ is not None
    if record.content is not None:
        record.content["gen_ai.input.messages"] = call.prompt
    record.class_source = "request" if hinted else "classifier"
    return record.class_name


async def dispatch(call: Call, request: Request[Any, Any, Any], gateway: GatewayState) -> ASGIResponse:
    """Answer ``call`` by the backend that suits it best.

    A backend that fails before its first byte is left out and the request goes to another, at most ``retries`` times;
    after that the client is told of the last failure. A refusal of the request itself is never tried elsewhere.
    """
    failed: dict[str, str] = {}
    last: APIError | None = None
    class_name: str | None = None
    while True:
        routed = route(call, request, gateway, class_name, failed)
        class_name, backend = routed.class_name, routed.backend
        if backend is None:
            raise last or refusal(call, routed, gateway)
        several = len(routed.choice.verdicts) > 1
        why = f"backend {backend.name}: {routed.choice.reason}" if several else None
        try:
            return await Attempt(call, backend, class_name, why, request, gateway, routed.arm).answer()
        except (UpstreamFailure, Unavailable, QueueFull) as error:
            last = error
            failed[backend.name] = error.code or "error"
            # What it said or was to do is no part of the next one's answer.
            record = record_of(request.scope)
            record.plan, record.stats, record.first_token_at = None, None, None
            record.output_tokens, record.finish_reasons = 0, ()
            if gateway.admission.draining or len(failed) > gateway.backends.retries:
                raise


def refusal(call: Call, routed: RoutedTo, gateway: GatewayState) -> APIError:
    """Why no backend can take ``call``, as its client should know it."""
    model, choice = call.body.model, routed.choice
    backends = gateway.backends.of_model(model)
    if choice.blocked == "full":
        # Counts its own places, so it knows best when there will be room again.
        for each in backends:
            try:
                gateway.admission.admit(call.sequences, each.places).close()
            except APIError as error:
                return error
    if choice.blocked == "lacks":
        fields = [name for each in backends for name in each.lacking(call.body)]
        return InvalidRequest(
            f"No backend of {model} can serve this request ({choice.reason}); leave out what they can't do.",
            param=fields[0] if fields else None,
            code="unsupported_parameter",
        )
    waits = [each.retry_after_s for each in backends if each.retry_after_s is not None]
    if not waits:
        return Unavailable(f"The engine of {model} has stopped.")
    return UpstreamUnavailable(
        f"No backend of {model} can be asked now: {choice.reason}.",
        headers={"retry-after": str(max(1, min(60, round(min(waits) or 1))))},
    )


def _candidate(backend: Backend, call: Call, hops: int, failed: Mapping[str, str]) -> Candidate:
    candidate = backend.candidate(call.body, hops)
    return replace(candidate, failed=failed[backend.name]) if backend.name in failed else candidate


def class_of(body: GenerationFields, controller: Controller) -> str:
    """The class that the client names, or the classifier. Raises :class:`InvalidRequest` for one that is none."""
    hint = body.decoding.class_ if body.decoding else None
    if hint is not None and hint not in controller.known_classes:
        raise InvalidRequest(
            f"'decoding.class' is '{hint}', which is no class of the policy; use one of: "
            f"{', '.join(controller.known_classes)}.",
            param="decoding.class",
        )
    return hint or controller.class_of(prompt_to_classify(body))
