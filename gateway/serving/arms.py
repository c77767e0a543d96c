"""The choice among upstreams that decode differently, with its memory, and what becomes of their measurements."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.routing.choice import Candidate
from gateway.routing.spec import Variant
from gateway.upstream.meter import Measured
from gateway.wire.responses import ArmEvidence, ArmReport
from policy.arms import ArmChoice, ArmState, ArmView, ArmWishes, WantedArm, Weighed, choose_arm
from policy.decision import temperature_of
from policy.runtime import PolicyRuntime
from policy.spec import RequestFacts
from policy.statistics.aggregate import Statistics
from policy.statistics.arm_book import counters_of, failure, load_bucket
from policy.statistics.counters import StatsKey, temperature_bucket

DEFAULT_ANSWER_TOKENS = 128.0
PROBE_EVERY_S = 5.0
"""A class in fallback is probed at least this often, if there is any traffic, however small its share of probes."""

_system_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Offer:
    """A backend that could answer, and how it decodes. ``load``: without the request that asks."""

    candidate: Candidate
    variant: Variant
    max_running: int
    per_hour: float
    suspect: bool


@dataclass(frozen=True, slots=True)
class ChosenArm:
    """``note`` is told once how the request went: measured, or None for a failure of the upstream's."""

    choice: ArmChoice
    report: ArmReport
    note: Callable[[Measured | None], None]


class ArmControl:
    """Used from one event loop only. ``draw``: uniform in [0, 1)."""

    def __init__(
        self,
        policy: PolicyRuntime,
        statistics: Statistics,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        draw: Callable[[], float] = _system_random.random,
    ) -> None:
        self._policy, self._statistics = policy, statistics
        self._clock, self._wall_clock, self._draw = clock, wall_clock, draw
        self._states: dict[tuple[str, str], ArmState] = {}
        self._probed_at: dict[tuple[str, str], float] = {}

    def choose(
        self, facts: RequestFacts, offers: Sequence[Offer], asked: str, most_tokens: int | None, *, dry: bool = False
    ) -> ChosenArm:
        """``offers``: at least one. ``asked``: the client's ``decoding.method``. ``dry``: nothing is remembered."""
        now, name = self._clock(), (facts.model, facts.class_name)
        spec, book = self._policy.spec, self._statistics.arms
        _, settings = spec.select(facts)
        of_class = spec.of_class(facts.class_name)
        bucket = temperature_bucket(temperature_of(settings, facts))
        fallback = self._statistics.live.fallbacks.get(name)
        in_fallback = fallback is not None and fallback.mode == "fallback"
        wanted: WantedArm = "auto"
        if "vanilla" in (asked, settings.method):
            wanted = "plain"
        elif "medusa" in (asked, settings.method):
            wanted = "speculative"
        answer = book.answer_tokens(*name) or DEFAULT_ANSWER_TOKENS
        due = now - self._probed_at.get(name, -math.inf) >= PROBE_EVERY_S
        wishes = ArmWishes(
            objective=of_class.objective,
            share=of_class.control,
            wanted=wanted,
            prompt_tokens=facts.prompt_tokens,
            answer_tokens=answer if most_tokens is None else min(answer, most_tokens),
            in_fallback=in_fallback,
            probe=of_class.fallback.probe,
            probe_due=in_fallback and of_class.fallback.probe > 0 and due,
        )
        views = [self._view(facts, bucket, among, now) for among in _by_arm(offers)]
        state, choice = choose_arm(self._states.get(name) or ArmState(), views, wishes, self._draw(), now)
        if not dry:
            self._states[name] = state
            if choice.rule == "probe":
                self._probed_at[name] = now
        chosen = next(each.view for each in choice.weighed if each.view.name == choice.name)

        def note(measured: Measured | None) -> None:
            self._learn(facts, bucket, choice, chosen.load_bucket, measured)

        return ChosenArm(choice, _report(choice, chosen), note)

    def _view(self, facts: RequestFacts, bucket: str, among: Sequence[Offer], now: float) -> ArmView:
        sound = [each for each in among if not each.suspect] or among
        nearest = min(sound, key=lambda each: each.candidate.load)
        load = nearest.candidate.load + 1 / nearest.max_running
        at, variant = load_bucket(load), nearest.variant
        figures = self._statistics.arms.figures(facts.model, facts.class_name, bucket, variant.name, at, now)
        return ArmView(
            variant.name, variant.plain, load, at, figures, all(each.suspect for each in among), nearest.per_hour
        )

    def _learn(self, facts: RequestFacts, bucket: str, choice: ArmChoice, load: str, measured: Measured | None) -> None:
        now = self._clock()
        key = StatsKey.of_upstream(facts.model, facts.class_name, bucket, choice.name, load)
        if measured is None:
            self._statistics.add_own({key.encode(): failure()}, now, self._wall_clock())
            return
        found = {key.encode(): counters_of(**measured._asdict())}
        plain = next((each.view.name for each in choice.weighed if each.view.plain), None)
        if choice.judged and plain is not None and measured.gap_tokens > 0:
            figures = self._statistics.arms.figures(*key[:3], plain, load, now)
            if figures is not None and figures.per_token_s is not None:
                spent_s = measured.first_s + measured.gap_s
                plain_s = figures.expected_first_s(measured.prompt_tokens) + figures.per_token_s * measured.gap_tokens
                judged = counters_of(**measured._asdict())
                # Of plain decoding, which the evidence for a fallback is counted in.
                judged.steps = measured.tokens
                judged.spent_us, judged.vanilla_us = round(spent_s * 1e6), round(plain_s * 1e6)
                found[StatsKey(facts.model, facts.class_name, bucket, "upstream").encode()] = judged
        self._statistics.add_own(found, now, self._wall_clock())


def _by_arm(offers: Sequence[Offer]) -> list[list[Offer]]:
    arms: dict[str, list[Offer]] = {}
    for each in offers:
        arms.setdefault(each.variant.name, []).append(each)
    return list(arms.values())


def _report(choice: ArmChoice, chosen: ArmView) -> ArmReport:
    return ArmReport(
        choice.name,
        "plain" if chosen.plain else "speculative",
        choice.rule,
        choice.reason,
        [_evidence(each) for each in choice.weighed],
    )


def _evidence(weighed: Weighed) -> ArmEvidence:
    view, figures = weighed.view, weighed.view.figures

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e3, 2)

    known: dict[str, Any] = {}
    if figures is not None:
        known = {
            "expected_ms": ms(weighed.expected_s),
            "first_token_ms": ms(figures.first_s),
            "ms_per_token": ms(figures.per_token_s),
            "requests": round(figures.requests, 1),
            "failure_share": round(figures.failure_share, 4),
            "age_s": round(figures.age_s, 1),
            "measured_at_load": figures.load,
        }
    return ArmEvidence(view.name, round(view.load, 3), view.load_bucket, suspect=view.suspect, **known)
