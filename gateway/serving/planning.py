"""From the policy's decision and what a client asked for to a decoding plan. Pure."""

from __future__ import annotations

from typing import NamedTuple

from backends.tree import CandidateTree, TreeError
from backends.types import DecodingPlan, ModelInfo
from gateway.wire.errors import InvalidRequest
from gateway.wire.prompts import plain_messages
from gateway.wire.requests import ChatCompletionRequest, CompletionRequest, DecodingOptions, GenerationFields
from policy.decision import Decision
from policy.spec import Turn
from policy.statistics.counters import Arm

CLIENT_RULE = "request"
_FIRST_TURNS, _LAST_TURNS = 16, 48


class Deadline(NamedTuple):
    """``set_by``: "client", "policy" or "gateway" (``--deadline``)."""

    seconds: float
    set_by: str

    @property
    def words(self) -> str:
        """What goes behind "deadline"."""
        whose = {"client": "the client", "policy": "the policy", "gateway": "this gateway's --deadline"}[self.set_by]
        return f" of {self.seconds:g} s, set by {whose}"


def deadline_of(options: DecodingOptions | None, gateway_s: float | None, decision: Decision) -> Deadline | None:
    """The client may shorten the operator's deadline, never lengthen it; nor may a policy lengthen the flag's."""
    asked = options.deadline_ms if options else None
    limits = {"client": asked / 1000 if asked else None, "policy": decision.deadline_s, "gateway": gateway_s}
    given = [Deadline(seconds, set_by) for set_by, seconds in limits.items() if seconds is not None]
    return min(given, key=lambda deadline: deadline.seconds, default=None)


def check_options(options: DecodingOptions | None, info: ModelInfo) -> None:
    """Raises :class:`InvalidRequest` for options that contradict each other or that the model ``info`` can't carry out,
    whatever the policy says: a client that asked for something specific gets it or is told, never something else in
    silence.
    """
    if options is None:
        return
    if options.method == "vanilla":
        _refuse_drafting(options)
        return
    if info.num_heads == 0:
        _refuse_heads(options, info)
        return
    if options.heads is not None and options.heads > info.num_heads:
        raise InvalidRequest(
            f"'decoding.heads' is {options.heads}, but {info.name} has {info.num_heads} heads; ask for at most that.",
            param="decoding.heads",
        )
    if options.tree is None:
        return
    tree, heads = _read_tree(options.tree, info), options.heads or info.num_heads
    if tree.depth > heads:
        raise InvalidRequest(
            f"'decoding.tree' is {tree.depth} levels deep, but only {heads} heads are used; make the tree "
            f"shallower{'' if options.heads is None else ' or raise decoding.heads'}.",
            param="decoding.tree",
        )


def plan_for(options: DecodingOptions | None, info: ModelInfo, decision: Decision) -> DecodingPlan:
    """How a request is decoded on the model ``info``, and why. ``options`` have passed :func:`check_options`.

    Raises :class:`InvalidRequest` for what the policy doesn't allow.
    """
    options = options or DecodingOptions()
    asked = options.asked_fields()
    refuse_what_policy_forbids(options, asked, decision)
    if options.method == "vanilla":
        return DecodingPlan(
            method="vanilla",
            num_heads=0,
            max_nodes=0,
            rule=CLIENT_RULE,
            reason="; ".join(["the request set method", *_shown(decision)]),
            policy_version=decision.policy_version,
        )
    # Acceptance says how drafts are judged, not that there must be any.
    if info.num_heads == 0 or not asked or (asked == ["acceptance"] and decision.method == "vanilla"):
        return _as_decided(options, decision)
    if options.tree is not None:
        tree = CandidateTree.parse(options.tree)
        heads, nodes = tree.depth, len(tree)
    else:
        # What the client left open is the policy's: the decided shape, or, if that is vanilla, its upper bounds.
        decided = decision.method == "medusa"
        tree = decision.tree if decided and options.heads is None else None
        heads = options.heads or (decision.num_heads if decided else decision.most_heads)
        nodes = decision.max_nodes if decided and options.heads is None else decision.most_nodes
    if nodes > decision.most_nodes or heads > decision.most_heads:
        raise InvalidRequest(
            f"'decoding.tree' has {nodes} nodes on {heads} levels, but the policy allows {decision.most_nodes} nodes "
            f"on {decision.most_heads}; make it smaller.",
            param="decoding.tree",
            code="not_allowed_by_policy",
        )
    return DecodingPlan(
        method="medusa",
        num_heads=heads,
        tree=tree,
        max_nodes=nodes,
        lookup=decision.lookup if options.lookup is None else options.lookup,
        acceptance=options.acceptance or decision.acceptance,
        rule=CLIENT_RULE,
        reason="; ".join([f"the request set {', '.join(asked)}", *_shown(decision)]),
        policy_version=decision.policy_version,
    )


def arm_of(plan: DecodingPlan, decision: Decision) -> Arm:
    """Whose books the request's counters go to."""
    if plan.rule != CLIENT_RULE:
        return decision.arm
    return "control" if plan.method == "vanilla" else "client"


def prompt_to_classify(body: GenerationFields) -> list[dict[str, str]] | str | None:
    """What the classifier should see: the messages, or the first prompt; None if there are only token ids.

    Of a very long conversation only its ends: the classifier looks at a few turns, and streams wait for it.
    """
    if isinstance(body, ChatCompletionRequest):
        messages = body.messages
        if len(messages) > _FIRST_TURNS + _LAST_TURNS:
            messages = messages[:_FIRST_TURNS] + messages[-_LAST_TURNS:]
        return plain_messages(messages)
    assert isinstance(body, CompletionRequest)
    first = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    return first if isinstance(first, str) else None


def turn_of(body: GenerationFields) -> Turn:
    """Whether the conversation has had an answer before."""
    spoken = isinstance(body, ChatCompletionRequest) and any(each.role == "assistant" for each in body.messages)
    return "later" if spoken else "first"


def _as_decided(options: DecodingOptions, decision: Decision) -> DecodingPlan:
    # A client may always insist on an answer that is not lossy.
    acceptance = decision.acceptance if options.acceptance is None else "exact"
    return DecodingPlan(
        method=decision.method,
        num_heads=decision.num_heads,
        tree=decision.tree,
        max_nodes=decision.max_nodes,
        lookup=decision.lookup and options.lookup is not False,
        acceptance=acceptance,
        probe=decision.probes,
        rule=decision.rule,
        reason=decision.reason,
        policy_version=decision.policy_version,
    )


def _shown(decision: Decision) -> list[str]:
    """What the policy changed in spite of the client's plan."""
    return [stage.reason for stage in decision.stages if stage.name == "temperature"]


def refuse_what_policy_forbids(options: DecodingOptions, asked: list[str], decision: Decision) -> None:
    """``asked``: the fields by which the client takes the plan into its own hands."""
    taken = [*asked, *(["class"] if options.class_ is not None else [])]
    if taken and not decision.client_override:
        raise InvalidRequest(
            f"'decoding.{taken[0]}' is not for requests to choose here (policy, {decision.rule}); leave it out.",
            param=f"decoding.{taken[0]}",
            code="not_allowed_by_policy",
        )
    if options.heads is not None and decision.most_heads and options.heads > decision.most_heads:
        raise InvalidRequest(
            f"'decoding.heads' is {options.heads}, but the policy allows {decision.most_heads}; ask for at most that.",
            param="decoding.heads",
            code="not_allowed_by_policy",
        )


def _refuse_drafting(options: DecodingOptions) -> None:
    for name in ("heads", "tree"):
        if getattr(options, name) is not None:
            raise InvalidRequest(
                f"'decoding.{name}' has no effect with method vanilla; leave it out or ask for medusa.",
                param=f"decoding.{name}",
            )
    if options.acceptance == "typical":
        raise InvalidRequest(
            "'decoding.acceptance' must be exact with method vanilla, which drafts nothing.",
            param="decoding.acceptance",
        )
    if options.lookup:
        raise InvalidRequest(
            "'decoding.lookup' has no effect with method vanilla, which drafts nothing; leave it out.",
            param="decoding.lookup",
        )


def _refuse_heads(options: DecodingOptions, info: ModelInfo) -> None:
    for name, asked in (("method", options.method == "medusa"), ("heads", options.heads), ("tree", options.tree)):
        if asked:
            raise InvalidRequest(
                f"'decoding.{name}' asks for Medusa heads, but {info.name} has none; leave it out or start the "
                "gateway with --heads.",
                param=f"decoding.{name}",
            )


def _read_tree(shape: str | list[list[int]], info: ModelInfo) -> CandidateTree:
    try:
        tree = CandidateTree.parse(shape)
    except TreeError as error:
        raise InvalidRequest(f"'decoding.tree' can't be used: {error}.", param="decoding.tree") from None
    if (widest := max(tree.ranks_per_depth)) > info.vocab_size:
        raise InvalidRequest(
            f"'decoding.tree' needs {widest} guesses of one head, but the vocabulary has {info.vocab_size} tokens.",
            param="decoding.tree",
        )
    return tree
