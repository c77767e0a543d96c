"""The heads' guesses as a grammar allows them: what is forced is certain, what is forbidden is gone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cost.step_cost import StepCost
from backends.grammar.spec import GrammarSpec
from backends.models.tiny import tiny_tokenizer
from backends.runners.base import Proposals
from backends.speculation.guided import GuidedProposals, guided
from backends.speculation.tree_builder import GRAMMAR, DraftRequest, plan_drafts
from backends.types import GrammarOutlook
from tests.support.grammars import VOCAB, tiny_grammars

FREE_ROWS = StepCost(rows=((1, 1.0), (64, 1.01)), heads=((1, 0.01),))
NAMED = {"type": "object", "properties": {"name": {"enum": ["ab", "cd"]}, "n": {"type": "integer"}}}
CLOSED = json.dumps({**NAMED, "required": ["name", "n"], "additionalProperties": False})


def ids(text: str) -> list[int]:
    return tiny_tokenizer().encode(text)


def outlook_after(text: str, schema: str = CLOSED) -> GrammarOutlook:
    grammar = tiny_grammars().open(GrammarSpec("json", schema))
    for token in ids(text):
        grammar.advance(token)
    found = grammar.outlook()
    assert found is not None
    return found


def lists_of(*rows: dict[str, float]) -> Proposals:
    """One list of guesses for each position."""
    tokens = np.array([[ids(text)[0] for text in row] for row in rows], np.int32)
    return Proposals(tokens, np.array([list(row.values()) for row in rows], np.float32))


def path(found: GuidedProposals | None, *ranks: int) -> tuple[str, list[float]]:
    """The text of a path by rank, 0 where ranks run out, and its chances."""
    assert found is not None
    index, text, chances, depth = 0, "", [], 0
    while index >= 0:
        rank = ranks[depth] if depth < len(ranks) else 0
        text += tiny_tokenizer().decode([found.tokens_of(index)[rank]])
        chances.append(found.probabilities_of(index)[rank])
        index, depth = found.following(index)[rank], depth + 1
    return text, chances


def test_forced_tokens_follow_with_certainty_without_any_head() -> None:
    found = guided(None, outlook_after(""), trust=0.3, heads_depth=20, longest=20)
    text, chances = path(found)
    assert '{"name":"'.startswith(text)
    assert len(text) > 6
    assert set(chances) == {1.0}
    assert found is not None
    assert len(found.forced) == len(text)


def test_forbidden_guesses_go_and_the_others_share_their_chance() -> None:
    heads = lists_of({"a": 0.3, "x": 0.4, "c": 0.2}, {"b": 0.5, "z": 0.2, "y": 0.1})
    found = guided(heads, outlook_after('{"name":"'), trust=1.0, heads_depth=20, longest=12)
    assert found is not None
    assert found.tokens_of(0)[:2] == [ids("a")[0], ids("c")[0]]
    assert found.probabilities_of(0)[:2] == pytest.approx([0.5, 0.2 / 0.6])
    # What is behind each of them is forced, whatever the heads say of it.
    text, chances = path(found)
    assert text.startswith('ab","n')
    assert chances[1:] == [1.0] * (len(chances) - 1)
    assert path(found, 1)[0].startswith('cd","n')


def test_the_heads_guesses_are_found_again_behind_what_is_forced() -> None:
    # A list for each position: the first six are of what is forced anyway.
    forced = guided(None, outlook_after('{"name":"a'), trust=1.0, heads_depth=20, longest=20)
    behind, _ = path(forced)
    rows = [{"x": 0.9, "y": 0.05} for _ in behind]
    heads = lists_of(*rows, *[{'"': 0.4, "7": 0.4}] * 4)
    found = guided(heads, outlook_after('{"name":"a'), trust=1.0, heads_depth=20, longest=20)
    text, chances = path(found)
    assert text.startswith(behind)
    assert "7" in text[len(behind) :]
    assert chances[: len(behind)] == [1.0] * len(behind)


def test_nothing_to_say_is_no_list() -> None:
    assert guided(None, outlook_after('{"name":"ab","n":1'), trust=1.0, heads_depth=20, longest=5) is None
    assert (
        guided(lists_of({"x": 0.5, "y": 0.4}), outlook_after('{"name":"ab","n":'), trust=1.0, heads_depth=20, longest=5)
        is None
    )


@given(st.data(), st.integers(1, 12), st.integers(1, 12), st.floats(0.2, 1.0), st.booleans())
def test_all_that_is_drafted_is_allowed_and_forced_nodes_are_certain(
    data: st.DataObject, longest: int, depth: int, trust: float, ahead: bool
) -> None:
    answer = '{"name":"cd","n":123}'
    start = answer[: data.draw(st.integers(0, len(answer) - 1))]
    lists, k = data.draw(st.integers(1, 6)), 3
    alphabet = st.sampled_from(ids(answer + "xyz"))
    rows = [data.draw(st.lists(alphabet, min_size=k, max_size=k, unique=True)) for _ in range(lists)]
    chances = np.sort(np.array([[data.draw(st.floats(0, 0.5)) for _ in range(k)] for _ in range(lists)], np.float32))
    below = np.array([[i + 1 if i + 1 < lists else -1] + [-1] * (k - 1) for i in range(lists)], np.int32)
    heads = Proposals(np.array(rows, np.int32), chances[:, ::-1] / 2, below if ahead else None)
    here = outlook_after(start)
    found = guided(heads, here, trust=trust, heads_depth=depth, longest=longest)
    if found is None:
        return
    request = DraftRequest(found, max_nodes=24, max_depth=longest, longest=longest)
    draft = plan_drafts({0: request}, sequences=1, num_prefill_rows=0, node_budget=24, cost=FREE_ROWS)[0]
    paths: list[list[int]] = [[]]
    for row, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), start=1):
        paths.append([*paths[parent], token])
        assert len(paths[row]) <= longest
        before = here.after(paths[parent]) if paths[parent] else here
        assert before is not None
        assert before.allows(token)
        assert draft.sources[row - 1] == GRAMMAR or len(paths[row]) <= depth
        if draft.sources[row - 1] == GRAMMAR:
            assert before.forced()[:1] == [token]
    assert all(0 <= token < VOCAB for token in draft.tokens)
    # No node twice below one parent.
    assert sum(map(len, draft.children())) == len(draft.tokens)
    forced = {row for row, source in enumerate(draft.sources, start=1) if source == GRAMMAR}
    certain = [row for row in forced if forced.issuperset(_line(draft.parents, row))]
    assert draft.expected >= len(certain) - 1e-6


def _line(parents: list[int], row: int) -> list[int]:
    found = []
    while row:
        found.append(row)
        row = parents[row - 1]
    return found
