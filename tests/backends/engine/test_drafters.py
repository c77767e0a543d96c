"""The seam for further drafters: one that this test makes guesses beside heads and prompt lookup, in the same trees."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest

from backends.cost.step_cost import StepCost
from backends.engine.core import EngineCore
from backends.engine.drafters import DraftingCall
from backends.engine.sequence import Sequence
from backends.engine.step_plan import Outcome, StepPlan
from backends.speculation.tree_builder import Chain, Offer
from backends.types import DecodingPlan, GenerationRequest, GenerationStats
from tests.support.engine_helpers import Recorder, ScriptedHeads, decode, make_core, one_thread, request  # noqa: F401

# A bias keeps the answers to a few tokens, so that they repeat and are looked up.
BIAS = dict.fromkeys((7, 8, 9), 60.0)
PROMPTS = ([7, 8, 9, 10, 11, 12] * 5, [40, 41, 42, 7, 8], [9, 50, 51, 8, 7, 9, 8])


class Script:
    """Knows the answers, and says every second time what comes next; else, junk."""

    name = "script"

    def __init__(self, answers: dict[tuple[int, ...], SequenceOf[int]]) -> None:
        self.answers = answers
        self.accepted, self.calls, self.broken = 0, 0, False

    def propose(self, call: DraftingCall) -> list[Chain | None]:
        if self.broken:
            raise RuntimeError("out of script")
        self.calls += 1
        return [self._guess(outcome.scheduled.sequence) for outcome in call.outcomes]

    def _guess(self, sequence: Sequence) -> Chain | None:
        answer = self.answers.get(sequence.request.prompt_token_ids)
        if answer is None:
            return None
        done = sequence.num_generated
        tokens = list(answer[done : done + 3]) if done % 2 else [99, 98]
        return Chain(tokens, [0.9] * len(tokens))

    def observe(self, plan: StepPlan, outcomes: SequenceOf[Outcome]) -> None:
        self.accepted += sum(outcome.accepted_by.get(self.name, 0) for outcome in outcomes)

    def cost_ms(self, offers: SequenceOf[Offer]) -> float:
        assert offers and all(isinstance(offer, Chain) for offer in offers)
        return 0.01

    def use_cost(self, cost: StepCost) -> None:
        pass

    def begin(self, sequence: Sequence) -> None:
        assert sequence.num_computed_tokens < len(sequence.tokens)

    @property
    def is_behind(self) -> bool:
        return self.accepted == 0

    def keep_up(self) -> None:
        pass


def requests_of(plan: DecodingPlan, temperature: float) -> list[GenerationRequest]:
    return [
        request(f"r{i}", prompt, plan, max_tokens=40, temperature=temperature, seed=i, logit_bias=BIAS, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]


def run(core: EngineCore, requests: SequenceOf[GenerationRequest], recorder: Recorder) -> dict[str, GenerationStats]:
    for each in requests:
        core.add(each)
    while core.has_work:
        recorder.take(core.step())
        core.check_integrity()
    found = {each.request_id: recorder[each.request_id].last.stats for each in requests}
    return {name: stats for name, stats in found.items() if stats is not None}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_third_drafter_stands_beside_heads_and_lookup(temperature: float) -> None:
    expected = decode(requests_of(DecodingPlan(method="vanilla"), temperature))
    requests = requests_of(DecodingPlan(num_heads=2, max_nodes=16), temperature)
    answers = {each.prompt_token_ids: expected[each.request_id].tokens for each in requests}
    script, recorder = Script(answers), Recorder()
    core = make_core(
        heads=ScriptedHeads(answers, num_heads=2, hit_rate=0.5), observer=recorder.observe, drafters=[script]
    )
    stats = run(core, requests, recorder)
    for each in requests:
        assert recorder[each.request_id].tokens == expected[each.request_id].tokens
        assert recorder[each.request_id].logits == expected[each.request_id].logits
        found = stats[each.request_id]
        assert sum(found.accepted_by.values()) == found.accepted_draft_tokens
        assert found.accepted_lookup_tokens == found.accepted_by.get("lookup", 0)
    by_name = {name: sum(each.accepted_by.get(name, 0) for each in stats.values()) for name in ("heads", "script")}
    assert by_name["script"] == script.accepted > 10
    assert by_name["heads"] > 0
    assert set().union(*(each.accepted_by for each in stats.values())) <= {"heads", "lookup", "script"}


def test_it_drafts_alone_too_and_its_failure_is_its_own() -> None:
    expected = decode(requests_of(DecodingPlan(method="vanilla"), 0.0))
    requests = requests_of(DecodingPlan(lookup=False), 0.0)
    script, recorder = (
        Script({each.prompt_token_ids: expected[each.request_id].tokens for each in requests}),
        Recorder(),
    )
    stats = run(make_core(observer=recorder.observe, drafters=[script]), requests, recorder)
    assert all(set(each.accepted_by) == {"script"} and each.medusa_steps for each in stats.values())
    script.broken, recorder = True, Recorder()
    core = make_core(observer=recorder.observe, drafters=[script])
    stats = run(core, requests_of(DecodingPlan(), 0.0), recorder)
    assert core.optional.failures()["script"] == 1
    for each in requests:
        assert recorder[each.request_id].tokens == expected[each.request_id].tokens
    assert sum(each.accepted_by.get("lookup", 0) for each in stats.values()) > 0


def test_a_client_that_wants_vanilla_is_not_drafted_for() -> None:
    script, recorder = Script({}), Recorder()
    run(
        make_core(observer=recorder.observe, drafters=[script]),
        requests_of(DecodingPlan(method="vanilla"), 0.0),
        recorder,
    )
    assert script.calls == 0
