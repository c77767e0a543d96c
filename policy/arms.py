"""Which arm answers a request: upstreams of one model that decode differently. Pure: state, evidence, time and chance
come in; the choice and the next state go out.

The arm with the lowest expected time is taken, by what was measured at the load that stands now. What it costs to know
that is bounded: each arm answers :data:`COLD_REQUESTS` of a class before anything is compared, and after that other
arms than the best get no more than the class's control share of its requests, one at a time. One such request is always
kept back for the moment when the speed of the arm in use changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from policy.spec import Objective
from policy.statistics.arm_book import ArmFigures

WantedArm = Literal["auto", "plain", "speculative"]

COLD_REQUESTS = 3
"""Of each arm and class, before arms are compared."""
DEAD_BAND = 0.02
"""An arm stays while no other is better by more than this part of its time."""
HOLD_S = 2.0
"""And for so long after a change, unless another is better by :data:`CLEAR`."""
CLEAR = 0.25
RESERVE = 1.0
MOST_CREDIT = 3.0
"""In requests to other arms than the best. What was not asked for long is not caught up with at once."""


@dataclass(frozen=True, slots=True)
class ArmView:
    """An arm as one request sees it. ``load``: of its least loaded backend. ``figures`` None: nothing is known.

    ``suspect``: its last request failed. ``per_hour``: the price of its backend.
    """

    name: str
    plain: bool
    load: float
    load_bucket: str
    figures: ArmFigures | None = None
    suspect: bool = False
    per_hour: float = 1.0


@dataclass(frozen=True, slots=True)
class ArmWishes:
    """What is asked of the choice. ``share``: of the class's requests that may go to other arms than the best.

    ``wanted``: by the policy's method, or the client's. ``in_fallback``: speculation of the class does not pay;
    ``probe``: then the share that still speculates. ``probe_due``: none did for long.
    """

    objective: Objective = "latency"
    share: float = 0.0
    wanted: WantedArm = "auto"
    prompt_tokens: int = 0
    answer_tokens: float = 128.0
    in_fallback: bool = False
    probe: float = 0.0
    probe_due: bool = False


@dataclass(frozen=True, slots=True)
class ArmState:
    """Of one (model, class). ``asked``: requests by arm. ``credit``: requests that may go to other arms."""

    held: str | None = None
    since: float = 0.0
    credit: float = RESERVE
    asked: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Weighed:
    """An arm's evidence, and what it comes to. ``value`` None: nothing to compare by."""

    view: ArmView
    value: float | None
    expected_s: float | None


@dataclass(frozen=True, slots=True)
class ArmChoice:
    """``rule``: in a word why. ``judged``: its time, against the plain arm's, tells whether speculation pays."""

    name: str
    rule: str
    reason: str
    weighed: tuple[Weighed, ...]
    judged: bool = False


def choose_arm(
    state: ArmState, views: Sequence[ArmView], wishes: ArmWishes, draw: float, now: float
) -> tuple[ArmState, ArmChoice]:
    """``views``: at least one, all of which could answer. ``draw``: uniform in [0, 1), the request's own.

    An arm whose last request failed is left at once, if there is another.
    """
    weighed = tuple(_weigh(view, wishes) for view in views)
    sound = [each for each in weighed if not each.view.suspect] or list(weighed)
    plain = [each for each in sound if each.view.plain]
    drafting = [each for each in sound if not each.view.plain]
    best_drafting = _best(drafting)

    def chosen(each: Weighed, rule: str, reason: str, state: ArmState) -> tuple[ArmState, ArmChoice]:
        name = each.view.name
        judged = not each.view.plain and (best_drafting is None or each is best_drafting) and wishes.wanted == "auto"
        asked = {**state.asked, name: state.asked.get(name, 0) + 1}
        return replace(state, asked=asked), ArmChoice(name, rule, reason, weighed, judged)

    if wishes.wanted == "plain" and plain:
        return chosen(_best(plain) or plain[0], "method", "the plain arm was asked for", state)
    if wishes.wanted == "speculative" and drafting:
        sound, plain = drafting, []
    if len(sound) == 1:
        why = "the only arm that can take it"
        if len(sound) < len(weighed):
            why += f"; left out: {', '.join(each.view.name for each in weighed if each not in sound)}"
        return chosen(sound[0], "only", why, state)
    if wishes.in_fallback and plain:
        if drafting and (wishes.probe_due or draw >= 1.0 - wishes.probe):
            return chosen(
                best_drafting or drafting[0],
                "probe",
                "its class is in fallback, and this request probes whether speculation pays again",
                state,
            )
        return chosen(_best(plain) or plain[0], "fallback", "speculation does not pay for its class", state)
    cold = [each for each in sound if _cold(each, state)]
    if cold:
        first = min(cold, key=lambda each: state.asked.get(each.view.name, 0))
        why = f"request {state.asked.get(first.view.name, 0) + 1} of {COLD_REQUESTS} that make its arm known"
        return chosen(first, "cold", why, state)
    state = replace(state, credit=min(state.credit + wishes.share, MOST_CREDIT))
    best = _best(sound) or sound[0]
    others = [each for each in sound if each.view.name != (state.held or best.view.name)]
    if (asked := _asked_again(others, state.credit, draw)) is not None:
        told = "never measured" if asked.view.figures is None else f"last heard of {asked.view.figures.age_s:.0f} s ago"
        why = f"asked again, {told}; at most {wishes.share:.3g} of its class's requests are"
        return chosen(asked, "asked again", why, replace(state, credit=state.credit - 1.0))
    kept = next((each for each in sound if each.view.name == state.held), None)
    if kept is not None and kept is not best and _stays(kept, best, now - state.since):
        gain = _gain(kept, best)
        why = f"'{best.view.name}' would be better by {gain:.1%}, which is too little or too soon for a change"
        return chosen(kept, "held", why, state)
    if best.view.name != state.held:
        state = replace(state, held=best.view.name, since=now)
    return chosen(best, "best", f"the best of {len(sound)} arms by {wishes.objective}", state)


def _weigh(view: ArmView, wishes: ArmWishes) -> Weighed:
    figures = view.figures
    if figures is None:
        return Weighed(view, None, None)
    expected = figures.expected_s(wishes.prompt_tokens, wishes.answer_tokens)
    if wishes.objective == "throughput" and figures.per_token_s is not None:
        return Weighed(view, figures.per_token_s / max(1.0 - figures.failure_share, 0.01), expected)
    return Weighed(view, expected * (view.per_hour if wishes.objective == "cost" else 1.0), expected)


def _best(among: Sequence[Weighed]) -> Weighed | None:
    # min() keeps the first of equals, which is the order of the operator's file.
    known = [each for each in among if each.value is not None]
    return min(known, key=lambda each: each.value or 0.0) if known else None


def _cold(each: Weighed, state: ArmState) -> bool:
    known = 0.0 if each.view.figures is None else each.view.figures.requests
    return known < COLD_REQUESTS - 0.5 and state.asked.get(each.view.name, 0) < COLD_REQUESTS


def _asked_again(others: Sequence[Weighed], credit: float, draw: float) -> Weighed | None:
    """The arm to ask out of turn, if any: one that is in doubt as soon as there is credit; else, of what goes beyond
    the reserve and at a moment that nobody can foresee, the one not heard of for longest."""
    doubted = [each for each in others if each.view.figures is None or each.view.figures.doubted]
    if doubted and credit >= RESERVE:
        return max(doubted, key=_age)
    if others and credit >= RESERVE + 1.0 and draw < 0.5:
        return max(others, key=_age)
    return None


def _age(each: Weighed) -> float:
    return float("inf") if each.view.figures is None else each.view.figures.age_s


def _gain(kept: Weighed, best: Weighed) -> float:
    return 0.0 if kept.value is None or best.value is None or kept.value <= 0 else 1.0 - best.value / kept.value


def _stays(kept: Weighed, best: Weighed, held_s: float) -> bool:
    if kept.value is None:
        return False
    gain = _gain(kept, best)
    return gain <= DEAD_BAND or (held_s < HOLD_S and gain <= CLEAR)
