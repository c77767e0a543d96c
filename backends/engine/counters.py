"""Counts of decoding. Each step of a sequence is told once, as a :class:`SequenceStep`; the request's own report
(:class:`RequestCounts`) and the statistics (:class:`CounterBook`) are sums of these."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from backends.runners.base import Proposals
from backends.types import DecodeCounters


class StepTimes(NamedTuple):
    """What a decode step took: all its sequences, each of whose clients has waited for the whole of it."""

    # By the cost table: a vanilla step of the same sequences, and this one with its drafts, corrected by calibration.
    vanilla_ms: float
    spent_ms: float
    # By the clock, without the part of prompts.
    measured_ms: float
    # Sequences that share it.
    num_sequences: int


@dataclass(slots=True)
class SequenceStep:
    """One sequence's part of one decode step."""

    # Tokens that the step added to the answer; all but the last were candidates.
    emitted: list[int]
    # Candidates verified, and those that were accepted, by who guessed them.
    num_drafted: int
    # Those of the verified ones that a grammar forced.
    num_drafted_of_grammar: int
    accepted_by: Mapping[str, int]
    # The heads' guesses that stood against ``emitted``; None: the heads were not asked.
    proposals: Proposals | None
    # What its own drafts cost over its share of a vanilla step, by the cost table.
    drafting_ms: float


@dataclass(slots=True)
class RequestCounts:
    """Sums over one request's decode steps, behind :class:`backends.types.GenerationStats`."""

    # All steps that gave tokens, the end of the prompt among them.
    steps: int = 0
    # Of these: with candidates.
    medusa_steps: int = 0
    drafted: int = 0
    drafted_of_grammar: int = 0
    accepted: int = 0
    accepted_by: dict[str, int] = field(default_factory=dict)
    # Candidates of the largest draft.
    most_nodes: int = 0
    # What vanilla decoding of the same tokens would have taken, and what the steps took, by the cost table.
    vanilla_ms: float = 0.0
    spent_ms: float = 0.0
    # Of the engine's own time: its share of what vanilla steps would have taken more, or less.
    saved_ms: float = 0.0

    def add(self, step: SequenceStep, times: StepTimes) -> None:
        """``steps`` is not counted here: it holds though statistics fail."""
        drafted = step.num_drafted
        self.medusa_steps += drafted > 0
        self.drafted += drafted
        self.drafted_of_grammar += step.num_drafted_of_grammar
        self.accepted += len(step.emitted) - 1
        for source, accepted in step.accepted_by.items():
            self.accepted_by[source] = self.accepted_by.get(source, 0) + accepted
        self.most_nodes = max(self.most_nodes, drafted)
        self.vanilla_ms += len(step.emitted) * times.vanilla_ms
        self.spent_ms += times.spent_ms
        self.saved_ms += (len(step.emitted) - 1) * times.vanilla_ms / times.num_sequences - step.drafting_ms


class CounterBook:
    """One :class:`DecodeCounters` per statistics key. Thread-safe: what is taken is gone from the book."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[str, DecodeCounters] = {}

    def take(self) -> dict[str, DecodeCounters]:
        with self._lock:
            taken, self._by_key = self._by_key, {}
        return taken

    def add_step(self, key: str, step: SequenceStep, times: StepTimes, *, control: bool) -> None:
        """Times are counted by share, so that those of all sequences add up to the clock's. ``control``: the request
        decodes vanilla throughout."""
        tokens, drafted = len(step.emitted), step.num_drafted
        share_ms = times.vanilla_ms / times.num_sequences
        vanilla_us = round(share_ms * 1e3 * tokens)
        measured_us = round(times.measured_ms / times.num_sequences * 1e3)
        with self._lock:
            counters = self._by_key.get(key)
            if counters is None:
                counters = self._by_key[key] = DecodeCounters()
            counters.steps += 1
            counters.medusa_steps += drafted > 0
            counters.rows += 1 + drafted
            counters.emitted_tokens += tokens
            counters.drafted_tokens += drafted
            counters.accepted_tokens += tokens - 1
            counters.vanilla_us += vanilla_us
            counters.spent_us += round((share_ms + step.drafting_ms) * 1e3)
            counters.measured_us += measured_us
            if control:
                counters.control_steps += 1
                counters.control_tokens += tokens
                counters.control_vanilla_us += vanilla_us
                counters.control_measured_us += measured_us
            if step.proposals is not None:
                _count_hits(counters, step.emitted, step.proposals)


def _count_hits(counters: DecodeCounters, emitted: list[int], proposals: Proposals) -> None:
    """Attempts and hits by head, along the emitted tokens as far as guesses follow them."""
    siblings = 0
    for head, token in enumerate(emitted):
        if siblings < 0:
            return
        if head == len(counters.attempts):
            counters.attempts.append(0)
            counters.hits.append([])
        counters.attempts[head] += 1
        guesses, hits = proposals.tokens_of(siblings), counters.hits[head]
        # A request whose tree is wide makes the heads guess more for all in its batch.
        hits.extend([0] * (len(guesses) - len(hits)))
        rank = guesses.index(token) if token in guesses else None
        if rank is not None:
            hits[rank] += 1
        # A list that follows every guess follows a missed one too.
        follows_any = rank is not None or not proposals.look_ahead
        siblings = proposals.following(siblings)[rank or 0] if follows_any else -1
