"""The batched loop: speculation changes nothing, and whatever goes wrong with one request stays with it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from backends.models.tokenizer import HfTokenizer
from backends.runners.base import ModelRunner
from backends.runners.batch import PAGE_SIZE
from backends.sampling.sampler import LogitProcessor, Visit, draw_tokens
from backends.tree import CandidateTree
from backends.types import ENGINE_FAILED, DecodingPlan, GenerationRequest, SamplingParams
from tests.support.engine_helpers import (
    CONTEXT,
    EOS,
    FLAT_COST,
    RUNNERS,
    Recorded,
    Recorder,
    ScriptedHeads,
    any_runner,
    chunk_batch,
    decode,
    make_core,
    random_prompt,
    random_tree,
    request,
    shared_runner,
    tokenizer,
)

VANILLA = DecodingPlan(method="vanilla", num_heads=0)
DRAFT_ALL = DecodingPlan(num_heads=4, tree=CandidateTree.parse("3x2x1x1"))


def random_sampling(rng: random.Random) -> dict[str, Any]:
    """Any mixture of everything that a request can ask for, except stop strings."""
    chosen: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 20, 33, 40]), "seed": rng.getrandbits(64)}
    if rng.random() < 0.6:
        chosen["temperature"] = rng.choice([0.2, 0.8, 1.3])
        chosen["top_k"] = rng.choice([0, 0, 12])
        chosen["top_p"] = rng.choice([1.0, 0.9])
        chosen["min_p"] = rng.choice([0.0, 0.02])
    if rng.random() < 0.4:
        chosen["presence_penalty"] = rng.choice([0.0, 1.0])
        chosen["frequency_penalty"] = rng.choice([0.0, 0.6, -0.2])
        chosen["repetition_penalty"] = rng.choice([1.0, 1.2])
        chosen["logit_bias"] = {rng.randrange(4, 98): rng.choice([-5.0, 3.0])}
    if rng.random() < 0.2:
        # The end becomes likely, so that it falls inside accepted blocks.
        chosen["logit_bias"] = {EOS: 4.0}
    chosen["min_tokens"] = min(rng.choice([0, 0, 5]), chosen["max_tokens"])
    chosen["ignore_eos"] = rng.random() < 0.3
    chosen["logprobs"] = rng.choice([None, 0, 3])
    return chosen


def stops_inside(rng: random.Random, answer: Recorded) -> dict[str, Any]:
    """Stop strings and ids that do occur in an answer, and some that don't."""
    text, tokens = answer.text, answer.tokens
    chosen: dict[str, Any] = {}
    if len(text) > 4 and rng.random() < 0.5:
        start = rng.randrange(len(text) - 2)
        chosen["stop"] = ("never!!", text[start : start + rng.randint(1, 3)])
    if len(tokens) > 2 and rng.random() < 0.3:
        chosen["stop_token_ids"] = (rng.choice(tokens), 259)
    return chosen


def random_plan(rng: random.Random) -> DecodingPlan:
    if rng.random() < 0.2:
        return VANILLA
    tree = None if rng.random() < 0.3 else random_tree(rng, rng.randint(1, 24), depth=5, ranks=3)
    return DecodingPlan(num_heads=rng.randint(1, 4), tree=tree, max_nodes=rng.randint(1, 24))


def vanilla_alone(requests: list[GenerationRequest], runner: ModelRunner) -> Recorder:
    return decode([replace(each, plan=VANILLA) for each in requests], runner=runner, max_running=1)


def same_answer(found: Recorded, reference: Recorded) -> None:
    """Tokens, the very bits of the logits that they came from, and all that the client sees."""
    assert found.tokens == reference.tokens
    assert found.positions == reference.positions
    assert found.logits == reference.logits
    assert found.sent_ids == reference.sent_ids == reference.tokens
    assert found.text == reference.text
    assert found.logprobs == reference.logprobs
    assert found.ending == reference.ending


def unlike_prompts(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Prompts of which none begins like another, so that scripted heads know whose answer they see."""
    return [(first, *random_prompt(rng, 0, 45)) for first in rng.sample(range(4, 98), count)]


@pytest.mark.parametrize(
    ("kind", "architecture", "dtype", "seed"),
    [
        *(("native", "llama", torch.float32, seed) for seed in range(6)),
        ("native", "qwen2", torch.bfloat16, 6),
        ("native", "qwen3", torch.bfloat16, 7),
        ("native", "mistral", torch.float32, 8),
        ("transformers", "llama", torch.float32, 9),
        ("transformers", "qwen3", torch.bfloat16, 10),
    ],
)
def test_speculation_changes_nothing(kind: str, architecture: str, dtype: torch.dtype, seed: int) -> None:
    """Random trees, batches, chunks and options against each request alone without speculation."""
    rng, runner = random.Random(seed), shared_runner(kind, architecture, dtype)
    requests = [
        request(f"r{i}", prompt, random_plan(rng), **random_sampling(rng))
        for i, prompt in enumerate(unlike_prompts(rng, 18))
    ]
    without_stops = vanilla_alone(requests, runner)
    requests = [
        replace(each, sampling=replace(each.sampling, **stops_inside(rng, without_stops[each.request_id])))
        for each in requests
    ]
    reference = vanilla_alone(requests, runner)
    answers = {each.prompt_token_ids: without_stops[each.request_id].tokens for each in requests}
    found = decode(
        requests,
        runner=runner,
        heads=ScriptedHeads(answers, seed=seed),
        join=lambda: rng.random() < 0.4,
        max_running=rng.choice([2, 5, 14]),
        prefill_rows=rng.choice([5, 24]),
    )
    for each in requests:
        same_answer(found[each.request_id], reference[each.request_id])
        check_stats(each, found[each.request_id])
    accepted = sum(found[each.request_id].last.stats.accepted_draft_tokens for each in requests)
    assert accepted > 20, "nothing was accepted: this run proves nothing"


def naive_decode(runner: ModelRunner, each: GenerationRequest) -> Recorded:
    """Without the engine: the whole text is run again for every token, and drawn by the definitions."""
    found, params, prompt = Recorded(), each.sampling, each.prompt_token_ids
    while len(found.tokens) < params.max_tokens and found.tokens[-1:] != [EOS]:
        text = [*prompt, *found.tokens]
        hidden = runner.forward(chunk_batch(runner, range(CONTEXT // PAGE_SIZE), text, 0))
        logits = runner.logits(hidden)[-1]
        processor = LogitProcessor(
            params, np.unique(np.array(prompt, np.int64)), np.array([EOS], np.int64), Counter(found.tokens)
        )
        found.tokens += draw_tokens(runner, logits[None].clone(), [Visit(0, len(text), params, processor, ())])
        found.positions.append(len(text))
        found.logits.append(logits.numpy().tobytes())
    return found


@pytest.mark.parametrize("kind", RUNNERS)
def test_vanilla_is_plain_decoding(kind: str) -> None:
    """What speculation is compared with elsewhere is itself right: positions, history, chunks and cache."""
    runner, rng = shared_runner(kind), random.Random(21)
    options = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5, "top_k": 20},
        {"temperature": 1.1, "seed": 6, "frequency_penalty": 0.8, "repetition_penalty": 1.2, "logit_bias": {EOS: 3.0}},
        {"temperature": 0.0, "presence_penalty": 1.0, "min_tokens": 4, "logit_bias": {EOS: 8.0}},
    ]
    requests = [request(f"r{i}", random_prompt(rng, 10, 40), max_tokens=18, **each) for i, each in enumerate(options)]
    found = decode(requests, runner=runner, prefill_rows=7)
    for each in requests:
        expected = naive_decode(runner, each)
        assert found[each.request_id].tokens == expected.tokens
        assert found[each.request_id].positions == expected.positions
        assert found[each.request_id].logits == expected.logits


def check_stats(each: GenerationRequest, found: Recorded) -> None:
    stats = found.last.stats
    assert stats is not None
    assert stats.emitted_tokens == len(found.tokens) == found.last.num_tokens
    assert stats.emitted_tokens == stats.steps + stats.accepted_draft_tokens
    assert stats.accepted_draft_tokens <= stats.drafted_tokens
    assert stats.medusa_steps <= stats.steps
    limit = 0 if each.plan.method == "vanilla" else len(each.plan.tree or "x" * each.plan.max_nodes)
    assert stats.max_nodes <= limit
    assert stats.method == each.plan.method
    assert stats.lossless


def whole_answer(prompt: tuple[int, ...], **sampling: Any) -> Recorded:
    return decode([request("alone", prompt, **sampling)])["alone"]


def speculative(each: GenerationRequest, answer: list[int], **options: Any) -> Recorded:
    """The request with heads that are always right at rank 0 or 1."""
    heads = ScriptedHeads({each.prompt_token_ids: answer}, hit_rate=1.0)
    return decode([replace(each, plan=DRAFT_ALL)], heads=heads, **options)[each.request_id]


PROMPT = (40, 50, 60, 70)


class TestEndsInsideABlock:
    """The answer ends in the middle of an accepted block: nothing behind the end may be seen or counted."""

    @pytest.fixture
    def answer(self) -> Recorded:
        answer = whole_answer(PROMPT, temperature=0.9, seed=3, max_tokens=30, ignore_eos=True)
        assert len(set(answer.tokens[:12])) > 8
        return answer

    @pytest.mark.parametrize("last", range(1, 9))
    def test_at_a_stop_token(self, answer: Recorded, last: int) -> None:
        token = answer.tokens[last]
        used = answer.tokens.index(token) + 1
        asked = request(
            "r", PROMPT, temperature=0.9, seed=3, max_tokens=30, stop_token_ids=(token,), logprobs=2, ignore_eos=True
        )
        found = speculative(asked, answer.tokens)
        assert found.ending == ("stop", token, used)
        assert found.sent_ids == answer.tokens[:used]
        assert (
            found.text
            == whole_answer(PROMPT, temperature=0.9, seed=3, max_tokens=used, ignore_eos=True).text[: len(found.text)]
        )
        assert [entry.chosen.token_id for entry in found.logprobs] == answer.tokens[: used - 1]

    @pytest.mark.parametrize("max_tokens", range(1, 12))
    def test_at_max_tokens(self, answer: Recorded, max_tokens: int) -> None:
        asked = request("r", PROMPT, temperature=0.9, seed=3, max_tokens=max_tokens, ignore_eos=True)
        found = speculative(asked, answer.tokens)
        assert found.ending == ("length", None, max_tokens)
        assert found.sent_ids == answer.tokens[:max_tokens]

    @pytest.mark.parametrize("start", range(1, 8))
    def test_at_a_stop_string(self, answer: Recorded, start: int) -> None:
        stop = answer.text[start : start + 3]
        asked = request("r", PROMPT, temperature=0.9, seed=3, max_tokens=30, stop=(stop,), logprobs=0, ignore_eos=True)
        found = speculative(asked, answer.tokens)
        assert found.text == answer.text[: answer.text.index(stop)]
        assert found.ending[:2] == ("stop", stop)
        assert answer.text.startswith("".join(chunk.text for chunk in found.chunks))
        assert [entry.chosen.token_id for entry in found.logprobs] == answer.tokens[: len(found.logprobs)]

    def test_stop_strings_wait_for_min_tokens_too(self, answer: Recorded) -> None:
        """One that is complete with token ``min_tokens`` does not end the answer, one that needs a later token does."""
        place = next(i for i in range(3, 12) if answer.tokens.count(answer.tokens[i]) == 1 and answer.tokens[i] < 98)
        stop = tokenizer().decode([answer.tokens[place]])
        for min_tokens, ends in ((place, True), (place + 1, False)):
            options = {"stop": (stop,), "min_tokens": min_tokens, "max_tokens": 30, "temperature": 0.9, "seed": 3}
            found = speculative(request("r", PROMPT, ignore_eos=True, **options), answer.tokens)
            assert (found.ending == ("stop", stop, place + 1)) is ends

    def test_at_the_end_of_text_and_not_before_min_tokens(self) -> None:
        likely_end = {"logit_bias": {EOS: 30.0}, "max_tokens": 12}
        assert whole_answer(PROMPT, **likely_end).ending == ("stop", EOS, 1)
        for min_tokens in (1, 2, 5, 11):
            free = whole_answer(PROMPT, **likely_end, min_tokens=min_tokens)
            assert free.ending == ("stop", EOS, min_tokens + 1)
            assert EOS not in free.tokens[:-1]
            found = speculative(request("r", PROMPT, **likely_end, min_tokens=min_tokens), [*free.tokens, 9, 9, 9])
            same_answer(found, free)
        ignored = whole_answer(PROMPT, **likely_end, ignore_eos=True)
        assert ignored.tokens == [EOS] * 12
        assert ignored.ending == ("length", None, 12)


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    asked = request("r", PROMPT, temperature=1.2, seed=8, max_tokens=9, logprobs=4, frequency_penalty=1.5)
    found = decode([asked])["r"]
    assert len(found.logprobs) == 9
    for entry, token, raw in zip(found.logprobs, found.tokens, found.logits, strict=True):
        log_p = torch.log_softmax(torch.frombuffer(bytearray(raw), dtype=torch.float32), -1)
        assert entry.chosen.token_id == token
        assert entry.chosen.logprob == pytest.approx(float(log_p[token]), abs=1e-5)
        best = log_p.topk(4)
        assert [top.token_id for top in entry.top] == best.indices.tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert entry.chosen.token_bytes == tokenizer().token_bytes(token)


def test_right_heads_save_steps_and_see_the_right_states() -> None:
    """With heads that know everything, a step gives a whole path; the heads get the state before the pending token."""
    answer = whole_answer(PROMPT, max_tokens=40, ignore_eos=True).tokens
    chain = DecodingPlan(num_heads=4, tree=CandidateTree.parse("5x1x1x1"))
    heads = ScriptedHeads({PROMPT: answer}, hit_rate=1.0, ranks=1)
    found = decode([request("r", PROMPT, chain, max_tokens=40, ignore_eos=True)], heads=heads)["r"]
    stats = found.last.stats
    assert stats is not None
    assert (stats.steps, stats.tokens_per_step) == (1 + -(-39 // 5), pytest.approx(40 / 9))
    runner = any_runner()
    for hidden, [context] in heads.calls:
        done = len(context) - len(PROMPT)
        assert context == [*PROMPT, *answer[:done]]
        row = runner.logits(torch.cat([hidden, hidden]))[0].numpy().tobytes()
        assert row == found.logits[done - 1], "the state is not the one that the pending token was drawn from"


def test_typical_acceptance_is_labelled_and_takes_more() -> None:
    sampling = {"temperature": 1.0, "seed": 1, "max_tokens": 40, "ignore_eos": True}
    answer = whole_answer(PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True).tokens
    plan = replace(DRAFT_ALL, acceptance="typical")
    heads = ScriptedHeads({PROMPT: answer}, hit_rate=1.0)
    found = decode([request("r", PROMPT, plan, **sampling)], heads=heads)["r"]
    stats = found.last.stats
    assert stats is not None
    assert (stats.acceptance, stats.lossless, stats.emitted_tokens) == ("typical", False, 40)
    assert found.ending == ("length", None, 40)


class TestLimits:
    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "message"),
        [((), 4, "no tokens"), ((5,), 0, "at least 1"), ((5,) * 100, 93, "don't fit"), ((5,) * 193, 1, "don't fit")],
    )
    def test_what_can_never_run_is_refused(self, prompt: tuple[int, ...], max_tokens: int, message: str) -> None:
        core = make_core()
        with pytest.raises(ValueError, match=message):
            core.add(request("r", prompt, max_tokens=max_tokens))
        assert not core.has_work

    def test_an_id_in_use_is_refused_until_it_is_free(self) -> None:
        core = make_core(max_running=1)
        for name in ("running", "waiting"):
            core.add(request(name, PROMPT))
        core.step()
        for name in ("running", "waiting"):
            with pytest.raises(ValueError, match="already in use"):
                core.add(request(name, PROMPT))
            core.abort(name)
            core.add(request(name, PROMPT))

    def test_a_full_context_is_used_to_its_last_position(self) -> None:
        prompt = tuple(4 + i % 90 for i in range(172))
        answer = whole_answer(prompt, max_tokens=20, ignore_eos=True)
        assert answer.ending == ("length", None, 20)
        asked = request("r", prompt, max_tokens=20, ignore_eos=True)
        same_answer(speculative(asked, answer.tokens), answer)

    def test_configuration_must_leave_room_for_everyone(self) -> None:
        with pytest.raises(ValueError, match="max_rows"):
            make_core(max_rows=40, max_running=20, prefill_rows=21)

    def test_no_step_exceeds_its_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner, rows = any_runner(), []
        forward = runner.forward
        monkeypatch.setattr(runner, "forward", lambda batch: (rows.append(batch.rows), forward(batch))[1])
        rng = random.Random(2)
        plan = DecodingPlan(num_heads=4, max_nodes=200)
        requests = [request(f"r{i}", random_prompt(rng, 30, 60), plan, ignore_eos=True) for i in range(12)]
        decode(requests, runner=runner, heads=ScriptedHeads({}), max_rows=40, max_running=8, prefill_rows=16)
        assert max(rows) == 40


def scarce_pages(pages: int) -> dict[str, Any]:
    """A runner of which the core believes that it has few pages."""
    real = any_runner()

    class Scarce:
        num_pages = pages

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    return {"runner": Scarce()}


class TestAdmission:
    def test_requests_wait_for_pages_first_come_first_served(self) -> None:
        """Four pages: two of 2, then one of 3 that must wait for both, then one of 1 that does not overtake it."""
        core, recorder = make_core(**scarce_pages(4)), Recorder()
        for name, pages in (("a", 2), ("b", 2), ("big", 3), ("small", 1)):
            core.add(request(name, PROMPT, max_tokens=PAGE_SIZE * pages - len(PROMPT), ignore_eos=True))
        finished: list[str] = []
        while core.has_work:
            load = core.load()
            assert load.kv_pages_used <= 4
            assert load.running + load.waiting == 4 - len(finished)
            for name, chunk in core.step():
                recorder.take([(name, chunk)])
                finished += [name] * (chunk.finish_reason is not None)
            core.check_integrity()
        assert finished.index("small") > finished.index("b")
        assert finished.index("big") > finished.index("a")
        for name in finished:
            reference = whole_answer(PROMPT, max_tokens=len(recorder[name].sent_ids), ignore_eos=True)
            assert recorder[name].sent_ids == reference.tokens

    def test_max_running_bounds_the_batch(self) -> None:
        core = make_core(max_running=2)
        for i in range(5):
            core.add(request(f"r{i}", PROMPT, max_tokens=3, ignore_eos=True))
        seen = []
        while core.has_work:
            core.step()
            seen.append(core.load().running)
        assert max(seen) == 2

    def test_prompts_go_on_beside_decoding(self) -> None:
        """A long prompt neither stops the others nor waits for them."""
        core = make_core(prefill_rows=8)
        core.add(request("short", PROMPT, max_tokens=60, ignore_eos=True))
        core.step()
        core.add(request("long", random_prompt(random.Random(1), 64, 64), max_tokens=2, ignore_eos=True))
        emitted = [name for _ in range(9) for name, _ in core.step()]
        assert emitted.count("short") == 9
        assert emitted.count("long") == 2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class TestDeadline:
    def test_ends_running_and_waiting_requests_with_what_they_have(self) -> None:
        clock = Clock()
        core, recorder = make_core(clock=clock, max_running=1), Recorder()
        core.add(request("runs", PROMPT, deadline_s=5.0, max_tokens=50, ignore_eos=True))
        core.add(request("waits", PROMPT, deadline_s=4.0, max_tokens=50))
        core.add(request("patient", PROMPT, max_tokens=2, ignore_eos=True))
        for clock.now in (0.0, 1.0, 3.9, 4.0):
            recorder.take(core.step())
        assert recorder["waits"].ending == ("deadline", None, 0)
        assert recorder["runs"].last.finish_reason is None
        clock.now = 5.0
        recorder.take(core.step())
        assert recorder["runs"].ending == ("deadline", None, 4)
        assert recorder["runs"].sent_ids == whole_answer(PROMPT, max_tokens=4, ignore_eos=True).tokens
        assert recorder["runs"].last.stats is not None
        recorder.take(core.step())
        assert recorder["patient"].ending == ("length", None, 2)
        core.check_integrity()
        assert core.load().kv_pages_used == 0

    def test_shows_text_that_was_held_back(self) -> None:
        clock = Clock()
        core, recorder = make_core(clock=clock), Recorder()
        answer = whole_answer(PROMPT, max_tokens=3, ignore_eos=True)
        core.add(request("r", PROMPT, deadline_s=1.0, stop=(answer.text + "more",), ignore_eos=True))
        for _ in range(3):
            recorder.take(core.step())
        assert recorder["r"].text == ""
        clock.now = 2.0
        recorder.take(core.step())
        assert (recorder["r"].text, recorder["r"].last.finish_reason) == (answer.text, "deadline")


class TestCancellation:
    @pytest.mark.parametrize("seed", range(4))
    def test_at_any_moment_leaves_clean_books_and_right_answers(self, seed: int) -> None:
        rng = random.Random(seed)
        requests = [
            request(f"r{i}", prompt, random_plan(rng), max_tokens=20, ignore_eos=True)
            for i, prompt in enumerate(unlike_prompts(rng, 20))
        ]
        survivors = {each.request_id for each in rng.sample(requests, 5)}
        reference = vanilla_alone([each for each in requests if each.request_id in survivors], any_runner())
        answers = {each.prompt_token_ids: reference[each.request_id].tokens for each in requests}
        recorder = Recorder()
        core = make_core(heads=ScriptedHeads(answers), observer=recorder.observe, **scarce_pages(14))
        waiting = list(requests)
        alive: set[str] = set()
        while waiting or core.has_work:
            while waiting and rng.random() < 0.5:
                core.add(waiting[0])
                alive.add(waiting.pop(0).request_id)
            if alive - survivors and rng.random() < 0.5:
                gone = rng.choice(sorted(alive - survivors))
                core.abort(gone)
                core.abort(gone)
                alive.remove(gone)
            emissions = core.step()
            assert {name for name, _ in emissions} <= alive, "an aborted request still speaks"
            recorder.take(emissions)
            alive -= {name for name, chunk in emissions if chunk.finish_reason is not None}
            core.check_integrity()
        assert core.load().kv_pages_used == 0
        for name in survivors:
            same_answer(recorder[name], reference[name])

    def test_of_an_unknown_id_is_no_error(self) -> None:
        make_core().abort("nobody")


class PickyTokenizer(HfTokenizer):
    """Chokes on one token id: a stand-in for any fault in one request's text."""

    def __init__(self, bad: int) -> None:
        self.__dict__.update(tokenizer().__dict__)
        self._bad = bad

    def detokenizer(self) -> Any:
        real, bad = super().detokenizer(), self._bad

        class Picky:
            flush = staticmethod(real.flush)

            def push(self, token_id: int) -> str:
                if token_id == bad:
                    raise RuntimeError("no such piece")
                return real.push(token_id)

        return Picky()


@pytest.fixture
def breakable(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModelRunner, list[bool]]]:
    """A runner whose forward raises while the list says so."""
    runner, broken = any_runner(), [False]
    forward = runner.forward

    def maybe(batch: Any) -> torch.Tensor:
        if broken[0]:
            raise RuntimeError("the device fell over")
        return forward(batch)

    monkeypatch.setattr(runner, "forward", maybe)
    yield runner, broken


class TestFaults:
    @pytest.mark.parametrize("plan", [VANILLA, DRAFT_ALL], ids=["vanilla", "medusa"])
    def test_one_requests_text_does_not_hurt_another(self, plan: DecodingPlan) -> None:
        good, bad = (5, 6, 7), (80, 81)
        answers = {prompt: whole_answer(prompt, max_tokens=20, ignore_eos=True).tokens for prompt in (good, bad)}
        poison = next(token for token in answers[bad][3:] if token not in answers[good])
        first = answers[bad].index(poison)
        found = decode(
            [request(name, prompt, plan, max_tokens=20, ignore_eos=True) for name, prompt in (("g", good), ("b", bad))],
            heads=ScriptedHeads(answers, hit_rate=1.0),
            tok=PickyTokenizer(poison),
        )
        assert found["g"].tokens == answers[good]
        assert found["g"].ending == ("length", None, 20)
        assert found["b"].last.finish_reason == "error"
        assert found["b"].last.error == ENGINE_FAILED, "the exception's words are not for the client"
        assert found["b"].tokens == answers[bad][: first + 1]

    def test_a_broken_step_ends_what_ran_and_nothing_else(self, breakable: tuple[ModelRunner, list[bool]]) -> None:
        runner, broken = breakable
        core, recorder = make_core(runner=runner, max_running=2), Recorder()
        for name in ("a", "b", "waits"):
            core.add(request(name, PROMPT, max_tokens=6, ignore_eos=True))
        recorder.take(core.step())
        broken[0] = True
        with pytest.raises(RuntimeError, match="fell over"):
            core.step()
        recorder.take(core.fail_step("the device fell over"))
        core.check_integrity()
        assert {name: recorder[name].last.error for name in ("a", "b")} == dict.fromkeys("ab", "the device fell over")
        broken[0] = False
        while core.has_work:
            recorder.take(core.step())
        assert recorder["waits"].sent_ids == whole_answer(PROMPT, max_tokens=6, ignore_eos=True).tokens
        assert core.load().kv_pages_used == 0

    def test_a_broken_step_spares_requests_that_had_no_part_in_it(
        self, breakable: tuple[ModelRunner, list[bool]]
    ) -> None:
        """Two long prompts; rows are enough for the first only. The second is admitted, but not in the step."""
        runner, broken = breakable
        core, recorder = make_core(runner=runner, max_rows=32, max_running=2, prefill_rows=24), Recorder()
        for name in ("in the step", "not in it"):
            core.add(request(name, random_prompt(random.Random(name), 60, 60), max_tokens=2, ignore_eos=True))
        broken[0] = True
        with pytest.raises(RuntimeError, match="fell over"):
            core.step()
        broken[0] = False
        recorder.take(core.fail_step("the device fell over"))
        while core.has_work:
            recorder.take(core.step())
        assert recorder["in the step"].last.finish_reason == "error"
        assert recorder["not in it"].ending == ("length", None, 2)


class TestCounters:
    def test_sums_agree_with_the_requests_own_statistics(self) -> None:
        rng = random.Random(12)
        requests = [
            request(f"r{i}", prompt, random_plan(rng), max_tokens=20) for i, prompt in enumerate(unlike_prompts(rng, 8))
        ]
        reference = vanilla_alone(requests, any_runner())
        answers = {each.prompt_token_ids: reference[each.request_id].tokens for each in requests}
        core, recorder = make_core(heads=ScriptedHeads(answers)), Recorder()
        for each in requests:
            core.add(each)
        while core.has_work:
            recorder.take(core.step())
        counters = core.accounting.counters.take()["tests"]
        assert core.accounting.counters.take() == {}
        stats = [recorder[each.request_id].last.stats for each in requests]
        assert counters.drafted_tokens == sum(each.drafted_tokens for each in stats if each)
        assert counters.accepted_tokens == sum(each.accepted_draft_tokens for each in stats if each)
        # The first token of each comes out of its prompt, which is no decode step.
        assert counters.steps == sum(each.steps - 1 for each in stats if each)
        assert counters.emitted_tokens == sum(each.emitted_tokens - 1 for each in stats if each)
        assert counters.rows == counters.steps + counters.drafted_tokens
        assert counters.control_tokens == sum(
            each.emitted_tokens - 1 for each in stats if each and each.method == "vanilla"
        )
        assert sum(map(sum, counters.hits)) <= sum(counters.attempts)
        assert counters.accepted_tokens <= sum(map(sum, counters.hits))

    def test_a_plan_that_drafts_nothing_estimates_no_speedup(self) -> None:
        answer = whole_answer(PROMPT, max_tokens=12, ignore_eos=True)
        assert answer.last.stats is not None
        assert answer.last.stats.speedup_estimate == 1.0

    def test_right_drafts_estimate_what_the_table_says(self) -> None:
        tokens = whole_answer(PROMPT, max_tokens=21, ignore_eos=True).tokens
        chain = DecodingPlan(num_heads=4, tree=CandidateTree.parse("1x1x1x1"))
        heads = ScriptedHeads({PROMPT: tokens}, hit_rate=1.0, ranks=1)
        found = decode([request("r", PROMPT, chain, max_tokens=21, ignore_eos=True)], heads=heads)["r"]
        per_step = FLAT_COST.forward_ms(5) + FLAT_COST.heads_ms(1)
        assert found.last.stats is not None
        assert found.last.stats.speedup_estimate == pytest.approx(5 * FLAT_COST.forward_ms(1) / per_step)


def test_runs_of_random_options_do_end_and_stop() -> None:
    """The random options above must reach every way to end, or the equality says less than it seems."""
    rng, endings = random.Random(0), set()
    for i in range(25):
        prompt = random_prompt(rng)
        first = whole_answer(prompt, **random_sampling(rng))
        options = random_sampling(rng) | {"max_tokens": 33} | stops_inside(rng, first)
        reason, match, _ = whole_answer(prompt, **options).ending
        endings.add((reason, type(match).__name__))
        assert i < 25
    assert {("length", "NoneType"), ("stop", "int")} <= endings


@pytest.mark.parametrize("kind", RUNNERS)
def test_sampling_params_default_run(kind: str) -> None:
    """A request with nothing but a prompt, as the gateway makes it."""
    asked = GenerationRequest("r", PROMPT, SamplingParams(max_tokens=5), DecodingPlan())
    found = decode([asked], runner=shared_runner(kind), heads=ScriptedHeads({}))["r"]
    assert len(found.tokens) <= 5


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_lookup_alone_gives_the_same_answer_in_fewer_steps(kind: str, temperature: float) -> None:
    """A text that repeats itself, without heads: candidates come from the text, and only if the plan says so."""
    runner, prompt = shared_runner(kind), [7, 8, 9, 10, 11, 12] * 5
    plans = {"vanilla": DecodingPlan(method="vanilla"), "on": DecodingPlan(), "off": DecodingPlan(lookup=False)}
    # A bias keeps the answer to a few tokens, so that it repeats.
    bias = dict.fromkeys((7, 8, 9), 60.0)
    requests = [
        request(name, prompt, plan, max_tokens=60, temperature=temperature, seed=3, logit_bias=bias, ignore_eos=True)
        for name, plan in plans.items()
    ]
    found = decode(requests, runner=runner)
    for name in ("on", "off"):
        same_answer(found[name], found["vanilla"])
    stats = {name: found[name].last.stats for name in plans}
    assert stats["on"] is not None and stats["off"] is not None
    assert stats["on"].accepted_lookup_tokens > 10
    assert stats["on"].accepted_lookup_tokens == stats["on"].accepted_draft_tokens
    assert stats["off"].drafted_tokens == 0
