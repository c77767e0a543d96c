"""Both model runners: against transformers' own eager model, and bit by bit against themselves in any company."""

from __future__ import annotations

import random
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from backends.heads.module import MedusaHeads
from backends.runners.base import ModelRunner, ProposalRequest
from backends.runners.batch import PAGE_SIZE, BatchBuilder, StepBatch
from backends.runners.native.runner import NativeRunner, unsupported_reason
from backends.sampling.rows import RowSampling
from backends.tree import MAX_DEPTH, CandidateTree
from tests.support.engine_helpers import (
    ARCHITECTURES,
    CONTEXT,
    RUNNERS,
    VOCAB,
    chunk_batch,
    make_runner,
    native_or_skip,
    path_rows,
    random_parents,
    random_prompt,
    scratch_base,
    shared_runner,
    tiny_lm,
    with_every_row,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
every_runner = pytest.mark.parametrize("kind", RUNNERS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def eager_logits(architecture: str, dtype: torch.dtype, tokens: tuple[int, ...]) -> torch.Tensor:
    model = tiny_lm(architecture, dtype=dtype)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def poison(runner: ModelRunner) -> None:
    """Everything that the cache holds becomes NaN: whoever reads a slot that is not its own shows it."""
    if isinstance(runner, NativeRunner):
        runner._k_pool.fill_(torch.nan)
        runner._v_pool.fill_(torch.nan)
    else:
        for keys, values in runner._pools.values():  # type: ignore[attr-defined]
            keys.fill_(torch.nan)
            values.fill_(torch.nan)


def alone(runner: ModelRunner, tokens: tuple[int, ...]) -> torch.Tensor:
    """Hidden states of all tokens, run as one chunk with nobody else, in the pool's last pages."""
    count = -(-len(tokens) // PAGE_SIZE)
    pages = list(range(runner.num_pages - count, runner.num_pages))
    return runner.forward(chunk_batch(runner, pages, tokens, 0)).clone()


@every_runner
@pytest.mark.parametrize("architecture", ARCHITECTURES)
class TestAgainstEager:
    def test_float32_logits_are_those_of_transformers(self, kind: str, architecture: str) -> None:
        tokens = random_prompt(random.Random(1), 75, 75)
        runner = shared_runner(kind, architecture)
        found = runner.logits(alone(runner, tokens))
        assert found.shape == (75, VOCAB)
        torch.testing.assert_close(found, eager_logits(architecture, torch.float32, tokens), rtol=0, atol=1e-3)

    def test_bfloat16_is_no_farther_from_the_truth_than_transformers(self, kind: str, architecture: str) -> None:
        tokens = random_prompt(random.Random(2), 60, 60)
        # The truth: the same rounded weights, computed in float32.
        truth_model = tiny_lm(architecture, dtype=torch.bfloat16).float()
        truth_model.set_attn_implementation("eager")
        with torch.inference_mode():
            truth = truth_model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        runner = shared_runner(kind, architecture, torch.bfloat16)
        ours = (runner.logits(alone(runner, tokens)) - truth).square().mean().sqrt()
        theirs = (eager_logits(architecture, torch.bfloat16, tokens) - truth).square().mean().sqrt()
        assert ours < 1.2 * theirs


@dataclass
class Row:
    """A row's result and the tokens that lead to it."""

    path: tuple[int, ...]
    hidden: torch.Tensor


@dataclass
class Company:
    """Several sequences that live in one cache; every step packs some of them, in random order and portions."""

    runner: ModelRunner
    rng: random.Random
    sequences: list[tuple[int, ...]]
    done: list[int] = field(init=False)
    pages: list[list[int]] = field(init=False)
    seen: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done = [0] * len(self.sequences)
        free = list(range(self.runner.num_pages))
        self.rng.shuffle(free)
        self.pages = [[free.pop() for _ in range(-(-(len(s) + 8) // PAGE_SIZE))] for s in self.sequences]

    def prefill_step(self) -> None:
        """A random chunk of some prompts, and a random tree on one whose prompt is over."""
        builder, places = BatchBuilder(scratch_base(self.runner)), []
        order = list(range(len(self.sequences)))
        self.rng.shuffle(order)
        for i in order:
            tokens, start = self.sequences[i], self.done[i]
            count = min(self.rng.choice([0, 1, 2, 7, 16, 17, 30]), len(tokens) - start)
            if count:
                places += [tokens[: start + j + 1] for j in range(count)]
                builder.add_chunk(self.pages[i], tokens[start : start + count], start, last_output=False)
                self.done[i] += count
            elif start == len(tokens) and self.rng.random() < 0.3:
                places += self._add_tree(builder, i)[0]
        self._run(builder, places)

    def tree_step(self) -> None:
        """A tree for every sequence; one node of each is accepted, and the step after it decodes from there."""
        builder, places, accepted = BatchBuilder(scratch_base(self.runner)), [], []
        for i in range(len(self.sequences)):
            first = len(places)
            paths, slots, parents = self._add_tree(builder, i)
            places += paths
            row = self.rng.randrange(len(paths))
            accepted.append((i, paths[row], [slots[above - 1] for above in path_rows(parents, row)]))
            assert len(places) - first == len(slots) + 1
        self._run(builder, places)
        source, target = [], []
        for i, path, slots in accepted:
            first = len(self.sequences[i])
            source += slots
            target += [self._slot(i, first + 1 + offset) for offset in range(len(slots))]
            self.sequences[i] = path
        self.runner.copy_slots(source, target)
        after, places = BatchBuilder(scratch_base(self.runner)), []
        for i, tokens in enumerate(self.sequences):
            token = self.rng.randrange(VOCAB)
            after.add_tree(self.pages[i], token, len(tokens), [], [])
            places.append((*tokens, token))
        self._run(after, places)

    def _slot(self, i: int, position: int) -> int:
        return self.pages[i][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE

    def _add_tree(self, builder: BatchBuilder, i: int) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
        tokens, root = self.sequences[i], self.rng.randrange(VOCAB)
        parents = random_parents(self.rng, self.rng.randint(0, 7), depth=5)
        nodes = [self.rng.randrange(VOCAB) for _ in parents]
        slots = builder.add_tree(self.pages[i], root, len(tokens), nodes, parents)
        rows = range(len(nodes) + 1)
        return [(*tokens, root, *(nodes[j - 1] for j in path_rows(parents, row))) for row in rows], slots, parents

    def _run(self, builder: BatchBuilder, places: list[tuple[int, ...]]) -> None:
        if not places:
            return
        batch = builder.build()
        hidden = self.runner.forward(with_every_row(batch)).clone()
        self.seen += [Row(path, row) for path, row in zip(places, hidden, strict=True)]

    def check(self) -> None:
        """Every row equals, bit for bit, the last row of its own path run alone."""
        reference: dict[tuple[int, ...], torch.Tensor] = {}
        for row in sorted(self.seen, key=lambda row: -len(row.path)):
            if row.path not in reference:
                states = alone(self.runner, row.path)
                reference.update({row.path[: i + 1]: state for i, state in enumerate(states)})
            assert torch.equal(row.hidden, reference[row.path]), f"row at position {len(row.path) - 1} differs"


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        *(("native", architecture) for architecture in ARCHITECTURES),
        *(("transformers", name) for name in ("llama", "qwen3")),
    ],
)
@every_dtype
class TestBitExactness:
    def test_chunks_of_any_size_in_any_company(self, kind: str, dtype: torch.dtype, architecture: str) -> None:
        runner, rng = shared_runner(kind, architecture, dtype), random.Random(f"chunks {architecture}")
        poison(runner)
        company = Company(runner, rng, [random_prompt(rng, length // 2, length) for length in (6, 20, 40, 70)])
        while any(done < len(tokens) for done, tokens in zip(company.done, company.sequences, strict=True)):
            company.prefill_step()
        company.check()

    def test_tree_rows_and_what_follows_them(self, kind: str, dtype: torch.dtype, architecture: str) -> None:
        """Positions across the border of a page are among them: prefixes of 9 to 18 tokens, paths of up to 6."""
        runner, rng = shared_runner(kind, architecture, dtype), random.Random(f"trees {architecture}")
        poison(runner)
        company = Company(runner, rng, [random_prompt(rng, length, length) for length in (1, 9, 12, 15, 16, 18, 31)])
        builder = BatchBuilder(scratch_base(runner))
        for pages, tokens in zip(company.pages, company.sequences, strict=True):
            builder.add_chunk(pages, tokens, 0, last_output=True)
        runner.forward(builder.build())
        company.tree_step()
        company.check()

    def test_one_token_at_a_time(self, kind: str, dtype: torch.dtype, architecture: str) -> None:
        runner, tokens = shared_runner(kind, architecture, dtype), random_prompt(random.Random(3), 35, 35)
        whole = alone(runner, tokens)
        poison(runner)
        pages = [7, 2, 40]
        for position, token in enumerate(tokens):
            row = runner.forward(chunk_batch(runner, pages, [token], position))
            assert torch.equal(row[0], whole[position])

    def test_logits_of_a_row_do_not_depend_on_the_others(
        self, kind: str, dtype: torch.dtype, architecture: str
    ) -> None:
        runner = shared_runner(kind, architecture, dtype)
        hidden = alone(runner, random_prompt(random.Random(4), 33, 33))
        together = runner.logits(hidden).clone()
        assert together.dtype == torch.float32
        for count in (1, 2, 3, 4, 5, 7, 8, 13):
            picked = random.Random(count).sample(range(33), count)
            assert torch.equal(runner.logits(hidden[picked]), together[picked])


@every_dtype
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    tokens = random_prompt(random.Random(5), 70, 70)
    results = []
    for threads in (1, 2):
        runner = make_runner("native", tiny_lm("llama", dtype=dtype), num_pages=16, threads=threads)
        hidden = alone(runner, tokens)
        results.append((hidden, runner.logits(hidden)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_torch_threads_change_no_bit() -> None:
    tokens, runner = random_prompt(random.Random(5), 70, 70), shared_runner("transformers")
    single = alone(runner, tokens)
    torch.set_num_threads(2)
    assert torch.equal(alone(runner, tokens), single)


@every_runner
def test_the_last_position_of_the_context_works(kind: str) -> None:
    tokens = random_prompt(random.Random(6), CONTEXT, CONTEXT)
    runner = shared_runner(kind)
    pages = list(range(CONTEXT // PAGE_SIZE))
    for start in (0, 96):
        found = runner.logits(runner.forward(chunk_batch(runner, pages, tokens[start : start + 96], start)))
    torch.testing.assert_close(found[-1], eager_logits("llama", torch.float32, tokens)[-1], rtol=0, atol=1e-3)


@every_runner
def test_more_rows_than_promised_are_refused(kind: str) -> None:
    runner = shared_runner(kind)
    with pytest.raises(ValueError, match="rows in a step"):
        runner.forward(chunk_batch(runner, list(range(20)), [5] * (runner.max_rows + 1), 0))


def random_heads(draft_ids: list[int] | None, head_input: str, *, sequential: bool = False) -> MedusaHeads:
    heads = MedusaHeads(
        64,
        3,
        96,
        head_input=head_input,  # type: ignore[arg-type]
        sequential=sequential,
        draft_token_ids=None if draft_ids is None else torch.tensor(draft_ids, dtype=torch.int32),
    )
    with torch.random.fork_rng():
        torch.manual_seed(9)
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return heads.eval().requires_grad_(False)


@every_runner
@pytest.mark.parametrize("head_input", ["hidden", "hidden+token"])
@pytest.mark.parametrize("draft_ids", [None, list(range(3, 200, 7))], ids=["whole", "reduced"])
def test_heads_propose_their_best_guesses(kind: str, head_input: str, draft_ids: list[int] | None) -> None:
    runner, heads, model = make_runner(kind, tiny_lm("llama")), random_heads(draft_ids, head_input), tiny_lm("llama")
    hidden = alone(runner, random_prompt(random.Random(7), 6, 6))
    contexts = [[1, 2, token] for token in (4, 5, 60, 70, 80, 90)]
    found = runner.bind_heads(heads).propose(ProposalRequest(hidden, contexts, 5))
    embedded = model.get_input_embeddings().weight[[context[-1] for context in contexts]]
    ids = torch.arange(VOCAB) if draft_ids is None else torch.tensor(draft_ids)
    with torch.inference_mode():
        logits = F.linear(heads.propose_hidden(hidden, embedded), model.lm_head.weight[ids])
    best = torch.softmax(logits, -1).topk(5)
    for i, proposals in enumerate(found):
        assert proposals.tokens.tolist() == ids[best.indices[:, i]].tolist()
        np.testing.assert_allclose(proposals.probabilities, best.values[:, i].numpy(), atol=1e-4)


@every_runner
def test_proposals_do_not_depend_on_company(kind: str) -> None:
    """Not needed for exact answers, but without it the same request would have other statistics every time."""
    runner = make_runner(kind, tiny_lm("llama"))
    hidden, bound = (
        alone(runner, random_prompt(random.Random(8), 5, 5)),
        runner.bind_heads(random_heads(None, "hidden")),
    )
    together = bound.propose(ProposalRequest(hidden, [[token] for token in range(5)], 4))
    for i, proposals in enumerate(together):
        [single] = bound.propose(ProposalRequest(hidden[i : i + 1], [[i]], 4))
        assert single.tokens.tolist() == proposals.tokens.tolist()


@every_runner
@pytest.mark.parametrize("sequential", [False, True])
def test_heads_are_asked_for_some_rows(kind: str, sequential: bool) -> None:
    runner = make_runner(kind, tiny_lm("llama"))
    hidden = alone(runner, random_prompt(random.Random(8), 6, 6))
    bound = runner.bind_heads(random_heads(None, "hidden+token", sequential=sequential))
    found = bound.propose(ProposalRequest(hidden, [[7], [9]], 4, rows=[5, 2]))
    expected = bound.propose(ProposalRequest(hidden[[5, 2]], [[7], [9]], 4))
    assert [each.tokens.tolist() for each in found] == [each.tokens.tolist() for each in expected]


@every_runner
def test_heads_stop_where_nothing_is_likely_enough_to_be_followed(kind: str) -> None:
    runner = make_runner(kind, tiny_lm("llama"))
    hidden = alone(runner, random_prompt(random.Random(8), 6, 6))
    bound = runner.bind_heads(random_heads(None, "hidden+token", sequential=True))

    def lists(min_survival: float) -> list[tuple[int, int | None]]:
        found = bound.propose(ProposalRequest(hidden, [[token] for token in range(6)], 4, min_survival=min_survival))
        return [(len(each.tokens), each.levels) for each in found]

    assert lists(1.1) == [(1, 1)] * 6
    assert lists(0.0) == [(1 + 2 * (bound.num_heads - 1), bound.num_heads)] * 6


SHAPE = CandidateTree.parse([[0], [1], [2], [0, 0], [0, 3], [2, 1], [0, 3, 0], [0, 3, 1], [2, 1, 4]])


@every_runner
@pytest.mark.parametrize("draft_ids", [None, list(range(3, 200, 7))], ids=["whole", "reduced"])
def test_sequential_heads_guess_what_follows_each_drafted_token(kind: str, draft_ids: list[int] | None) -> None:
    """Every list is what its head says along the tokens drafted above it, in given shapes and others."""
    model, heads = tiny_lm("llama"), random_heads(draft_ids, "hidden+token", sequential=True)
    runner = make_runner(kind, model)
    hidden = alone(runner, random_prompt(random.Random(7), 6, 6))
    contexts = [[1, 2, token] for token in (4, 5, 60, 70, 80, 90)]
    trees = [None, SHAPE, None, SHAPE, None, None]
    found = runner.bind_heads(heads).propose(ProposalRequest(hidden, contexts, 5, trees))
    embeddings = model.get_input_embeddings().weight
    ids = torch.arange(VOCAB) if draft_ids is None else torch.tensor(draft_ids)
    for i, (proposals, context, tree) in enumerate(zip(found, contexts, trees, strict=True)):
        assert proposals.below is not None
        states, seen = {0: (hidden[i : i + 1], context[-1], 0)}, []
        for index in range(len(proposals.tokens)):
            state, token, head = states[index]
            with torch.inference_mode():
                state = heads.follow_hidden(head, state, embeddings[[token]])
                best = torch.softmax(F.linear(state, model.lm_head.weight[ids])[0], -1).topk(5)
            assert proposals.tokens[index].tolist() == ids[best.indices].tolist()
            np.testing.assert_allclose(proposals.probabilities[index], best.values.numpy(), atol=1e-4)
            for rank, below in enumerate(proposals.below[index].tolist()):
                if below >= 0:
                    states[below] = (state, int(proposals.tokens[index, rank]), head + 1)
                    seen.append((index, rank))
        assert len(states) == len(proposals.tokens)
        if tree is not None:
            assert seen == [(0, 0), (0, 2), (1, 3), (2, 1)]
        else:
            assert len(proposals.tokens) > 1


@pytest.mark.parametrize("draft_ids", [None, list(range(3, 200, 7))], ids=["whole", "reduced"])
def test_eight_bit_heads_say_nearly_what_the_checkpoint_says(draft_ids: list[int] | None) -> None:
    """In bfloat16 the native heads' layers are in eight bits; inner size 96 ends in half a group."""
    model, heads = tiny_lm("llama", dtype=torch.bfloat16), random_heads(draft_ids, "hidden+token", sequential=True)
    runner = make_runner("native", model)
    hidden = alone(runner, random_prompt(random.Random(12), 40, 40))
    hidden[3] *= torch.where(torch.arange(hidden.shape[1]) == 5, 30.0, 1.0)  # one element far above the rest
    hidden[4] = 0.0
    contexts = [[token] for token in range(40)]
    bound = runner.bind_heads(heads)
    found = bound.propose(ProposalRequest(hidden, contexts, 5))
    embeddings = model.get_input_embeddings().weight.float()
    ids = torch.arange(VOCAB) if draft_ids is None else torch.tensor(draft_ids)
    with torch.inference_mode():
        state = heads.follow_hidden(0, hidden.float(), embeddings[:40])
        p = torch.softmax(F.linear(state, model.lm_head.weight.float()[ids]), -1)
    column = {token: i for i, token in enumerate(ids.tolist())}
    off = []
    for i, proposals in enumerate(found):
        theirs = p[i, [column[token] for token in proposals.tokens[0].tolist()]].numpy()
        off.append(np.abs(proposals.probabilities[0] - theirs).max())
        assert theirs[0] > p[i].max() - 0.2
        [single] = bound.propose(ProposalRequest(hidden[i : i + 1], contexts[i : i + 1], 5))
        assert (single.probabilities == proposals.probabilities).all()
    assert max(off) < 0.2
    assert sum(off) / len(off) < 0.03


def test_native_and_torch_follow_the_same_guesses() -> None:
    heads = random_heads(None, "hidden+token", sequential=True)
    native, torch_runner = (make_runner(kind, tiny_lm("llama")) for kind in ("native", "transformers"))
    hidden = alone(native, random_prompt(random.Random(11), 12, 12))
    contexts = [[token] for token in range(12)]
    ours, theirs = (r.bind_heads(heads).propose(ProposalRequest(hidden, contexts, 6)) for r in (native, torch_runner))
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.below is not None and other.below is not None
        assert one.below.tolist() == other.below.tolist()


class TestWhatKernelsRefuse:
    """Nothing that Python hands over may make the kernels read or write where they should not."""

    @pytest.mark.parametrize(
        ("array", "value", "message"),
        [
            ("tokens", VOCAB, "outside the vocabulary"),
            ("tokens", -1, "outside the vocabulary"),
            ("positions", CONTEXT, "positions holds one outside the context"),
            ("positions", -1, "positions holds one outside the context"),
            ("slots", 168 * PAGE_SIZE, "slots holds one outside the cache"),
            ("slots", -5, "slots holds one outside the cache"),
            ("tail_slots", 168 * PAGE_SIZE, "tail_slots holds one outside the cache"),
            ("sequence", 1, "sequence holds one that has no pages"),
            ("full_pages", 2, "more than the sequence's pages"),
            ("full_pages", -1, "more than the sequence's pages"),
            ("tail_offsets", -1, "tail_offsets do not ascend"),
            ("tail_offsets", 1000, "tail_offsets do not ascend"),
            ("page_offsets", 3, "page_offsets do not ascend"),
            ("pages", 168, "pages holds one outside the cache"),
            ("out_row", 20, "out_row holds one that is not in the step"),
        ],
    )
    def test_a_step_with_a_number_out_of_bounds(self, array: str, value: int, message: str) -> None:
        runner = shared_runner("native")
        batch = chunk_batch(runner, [7], list(range(4, 9)), 3)
        memory = copy(batch.memory)
        wrong = StepBatch(memory, batch.ends)
        getattr(wrong, array)[:1] = value
        with pytest.raises(ValueError, match=message):
            runner.forward(wrong)

    def test_a_step_whose_arrays_are_not_as_long_as_they_should_be(self) -> None:
        runner = shared_runner("native")
        batch = chunk_batch(runner, [7], list(range(4, 9)), 3)
        for index in range(len(batch.ends)):
            for off in (-1, 1):
                ends = list(batch.ends)
                ends[index] += off
                with pytest.raises(ValueError):
                    runner.forward(StepBatch(batch.memory, tuple(ends)))
        with pytest.raises(ValueError, match="memory"):
            runner.forward(StepBatch(batch.memory[:-1], batch.ends))

    def test_paths_deeper_than_a_tree_may_be(self) -> None:
        """Room for the keys behind a row's full pages is that of 15 positions and 16 candidates."""
        runner, deep = shared_runner("native"), MAX_DEPTH
        for root, levels in ((14, deep), (14, deep + 1), (15, deep + 1)):
            builder = BatchBuilder(scratch_base(runner))
            builder.add_tree([3, 4, 5], 9, root, list(range(10, 10 + levels)), list(range(levels)))
            if root == 14 and levels > deep:
                with pytest.raises(ValueError, match="deeper than 16 levels"):
                    runner.forward(builder.build())
            else:
                runner.forward(builder.build())

    def test_states_and_logits_of_another_kind(self) -> None:
        runner = shared_runner("native")
        hidden = torch.zeros(6, runner.hidden_size)
        for wrong in (
            hidden.double(),
            hidden.to(torch.bfloat16),
            hidden.to("meta"),
            hidden[:, :-1],
            hidden.T.contiguous().T,
            hidden[0],
        ):
            with pytest.raises(ValueError, match="hidden is"):
                runner.logits(wrong)
        logits = torch.zeros(4, VOCAB)
        for wrong in (logits.double(), logits.to("meta"), logits.T, logits[0], logits.expand(8, 4, VOCAB)[:, 0].T):
            with pytest.raises(ValueError, match="logits is"):
                runner.argmax(wrong, [0])
        for rows in ([4], [-1], [0, 9]):
            with pytest.raises(ValueError, match="row of the logits"):
                runner.argmax(logits, rows)
        assert runner.argmax(logits[:, 5:60], [3, 0]) == [0, 0]

    def test_parameters_of_another_kind(self) -> None:
        runner, logits = shared_runner("native"), torch.zeros(4, VOCAB)
        good = {
            "temperature": np.ones(2, np.float32),
            "top_k": np.zeros(2, np.int32),
            "top_p": np.ones(2, np.float32),
            "min_p": np.zeros(2, np.float32),
            "uniform": np.full(2, 0.5),
        }
        runner.sample(logits, [0, 3], RowSampling(**good))
        for name, values in good.items():
            for wrong in (values[:1], values.astype(np.int64), np.repeat(values, 2)[::2]):
                with pytest.raises(ValueError, match=name):
                    runner.sample(logits, [0, 3], RowSampling(**{**good, name: wrong}))
        with pytest.raises(ValueError, match="row of the logits"):
            runner.sample(logits, [0, 4], RowSampling(**good))

    def test_slots_that_are_not_there(self) -> None:
        runner = shared_runner("native")
        for source, target in (([0], [168 * PAGE_SIZE]), ([-1], [0])):
            with pytest.raises(ValueError, match="slot to copy"):
                runner.copy_slots(source, target)
        with pytest.raises(ValueError, match="2 slots to copy from, 1 to copy to"):
            runner.copy_slots([1, 2], [3])

    def test_heads_asked_for_what_is_not_there(self) -> None:
        runner = make_runner("native", tiny_lm("llama"))
        hidden = alone(runner, random_prompt(random.Random(8), 3, 3))
        bound = runner.bind_heads(random_heads(None, "hidden+token", sequential=True))
        for rows, token, message in (([3], 5, "row of the hidden states"), ([0], VOCAB, "outside the vocabulary")):
            with pytest.raises(ValueError, match=message):
                bound.propose(ProposalRequest(hidden, [[token]], 4, rows=rows))
        with pytest.raises(ValueError, match="hidden is"):
            bound.propose(ProposalRequest(hidden.double(), [[1]], 4, rows=[0]))
        with pytest.raises(ValueError, match="k must be"):
            bound.propose(ProposalRequest(hidden, [[1]], 0, rows=[0]))


@pytest.mark.parametrize("heads", [96, 128])
def test_any_number_of_query_heads_share_a_key_head(heads: int) -> None:
    """Room for their sums once was for 96; the two others differ by how many fit a tile."""
    native_or_skip()
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16 * heads,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    tokens = random_prompt(random.Random(9), 40, 40)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    runner = NativeRunner(model, num_pages=8, max_rows=64, max_context=64, threads=1)
    found = runner.logits(alone(runner, tokens))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_models_that_kernels_would_misread_are_refused() -> None:
    def with_(**changes: Any) -> Any:
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **changes}
        config = LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=32, num_hidden_layers=1, **sizes)
        return LlamaForCausalLM(config)

    partly = with_()
    partly.model.rotary_emb.inv_freq = partly.model.rotary_emb.inv_freq[:4]
    assert unsupported_reason(with_()) is None
    assert unsupported_reason(partly) == "rotary embedding over a part of each head"
    uneven = with_()
    uneven.config.num_key_value_heads = 3
    assert unsupported_reason(uneven) == "4 query heads are no multiple of 3 key heads"
    native_or_skip()
    short = with_()
    short.model.norm.weight = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(ValueError, match=r"norm is \[32\].*contiguous \[64\]"):
        NativeRunner(short, num_pages=4, max_rows=16, max_context=32, threads=1)
    for name in ("max_rows", "max_context"):
        sizes: dict[str, Any] = {"num_pages": 4, "max_rows": 16, "max_context": 32, "threads": 1, name: 0}
        with pytest.raises(ValueError, match="must be positive"):
            NativeRunner(with_(), **sizes)
