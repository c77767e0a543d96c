"""What an engine tells of its steps and of when things happened to a sequence: values that it has anyway."""

from __future__ import annotations

from itertools import count

from backends.cost.step_cost import StepCost
from backends.speculation.batch_gate import DraftGate
from backends.tree import CandidateTree
from backends.types import DecodingPlan
from tests.support.engine_helpers import Recorder, ScriptedHeads, decode, make_core, one_thread, request  # noqa: F401

PROMPT = tuple(range(10, 40))


class Ticking:
    """One second later at every look."""

    def __init__(self) -> None:
        self._ticks = count(1)

    def __call__(self) -> float:
        return float(next(self._ticks))


def test_a_sequence_knows_when_it_left_the_queue_began_to_answer_and_ended() -> None:
    recorder = Recorder()
    core = make_core(clock=Ticking(), max_running=1)
    core.add(request("first", PROMPT, max_tokens=3, ignore_eos=True))
    core.add(request("second", PROMPT, max_tokens=3, ignore_eos=True))
    recorder.take(core.step())
    assert core.load().oldest_wait_s > 0
    while core.has_work:
        recorder.take(core.step())
    first, second = (recorder[name].last.stats for name in ("first", "second"))
    assert first is not None and second is not None
    for stats in (first, second):
        assert stats.admitted_at is not None and stats.first_token_at is not None and stats.finished_at is not None
        assert stats.admitted_at < stats.first_token_at < stats.finished_at
    assert second.admitted_at is not None and first.finished_at is not None
    assert second.admitted_at > first.finished_at, "one at a time: the second waits for the first"
    assert core.load().oldest_wait_s == 0.0


def test_a_sequence_that_ends_in_the_queue_was_never_admitted() -> None:
    recorder = Recorder()
    core = make_core(clock=Ticking(), max_running=1)
    core.add(request("runs", PROMPT, max_tokens=30, ignore_eos=True))
    core.add(request("late", PROMPT, deadline_s=5.0))
    while recorder["late"].chunks == []:
        recorder.take(core.step())
    stats = recorder["late"].last.stats
    assert stats is not None
    assert (stats.admitted_at, stats.first_token_at) == (None, None)
    assert stats.finished_at is not None


def test_steps_are_told_by_kind_with_rows_and_times() -> None:
    answers = {PROMPT: decode([request("r", PROMPT, ignore_eos=True)])["r"].tokens}
    core = make_core(heads=ScriptedHeads(answers), clock=Ticking(), prefill_rows=64)
    plan = DecodingPlan(num_heads=2, tree=CandidateTree.parse("2x1"))
    core.add(request("r", PROMPT, plan, ignore_eos=True))
    core.step()
    core.step()
    prefill, verification = core.accounting.samples
    assert (prefill.kind, prefill.rows) == ("prefill", len(PROMPT))
    assert (verification.kind, verification.rows) == ("verification", 1 + 4)
    assert verification.seconds > 0
    assert verification.vanilla_s == core.cost.forward_ms(1) / 1e3
    core.abort("r")
    core.accounting.samples.clear()
    core.add(request("plain", PROMPT, max_tokens=3, ignore_eos=True))
    while core.has_work:
        core.step()
    assert [sample.kind for sample in core.accounting.samples] == ["prefill", "vanilla", "vanilla"]


def test_pauses_of_a_sequence_have_their_times() -> None:
    """Heads that are dear and always wrong, of which the best was expected: each pause of drafting is told."""
    dear = StepCost(rows=((1, 1.0), (64, 1.5)), heads=((1, 0.5),))
    gate = DraftGate(dear, ((0.9,), (0.8,), (0.7,)))
    core = make_core(heads=ScriptedHeads({}, hit_rate=0.0), cost=dear, clock=Ticking(), gate=gate)
    recorder = Recorder()
    core.add(request("r", PROMPT, DecodingPlan(num_heads=4), max_tokens=60, ignore_eos=True))
    while core.has_work:
        recorder.take(core.step())
    stats = recorder["r"].last.stats
    assert stats is not None
    assert len(stats.paused_at) >= 1
    assert list(stats.paused_at) == sorted(set(stats.paused_at))
    assert f"went vanilla {len(stats.paused_at)} time(s)" in stats.reason


def test_a_probe_asks_the_heads_though_the_gate_is_closed() -> None:
    """It is there to find out whether they pay again, which a gate that asks once in 64 steps would take minutes to."""
    dear = StepCost(rows=((1, 1.0), (64, 1.5)), heads=((1, 0.5),))
    asked = {}
    for probe in (False, True):
        heads = ScriptedHeads({})
        core = make_core(heads=heads, cost=dear, clock=Ticking(), gate=DraftGate(dear, ((0.01,), (0.01,))))
        core.add(
            request("r", PROMPT, DecodingPlan(num_heads=2, lookup=False, probe=probe), max_tokens=8, ignore_eos=True)
        )
        while core.has_work:
            core.step()
        asked[probe] = len(heads.calls)
    # The pause after six steps that brought nothing is the sequence's own, and holds for probes as well.
    assert asked == {False: 0, True: 6}
