"""How good heads are on held-out answers: accuracy per head and rank, and tokens per step by replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backends.heads.module import MedusaHeads
from backends.runners.base import best_guesses
from backends.training.data.dataset import HiddenStates
from backends.training.objective import OutputProjection, path_tokens
from backends.tree import CandidateTree, best_first_paths
from backends.tree import Path as NodePath

NUM_RANKS = 10
ALL_CLASSES = "all"


@dataclass(frozen=True, slots=True)
class Guesses:
    """The heads' best guesses at some rows, best first.

    ``rows`` [n] row numbers of the states, ``tokens`` [heads, n, ranks] token ids, ``probabilities`` likewise: softmax
    over the draft vocabulary.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    probabilities: torch.Tensor

    def select(self, chosen: torch.Tensor) -> Guesses:
        """Those at some of the rows; ``chosen`` [m] counts among these rows."""
        return Guesses(self.rows[chosen], self.tokens[:, chosen], self.probabilities[:, chosen])


@torch.inference_mode()
def guess(
    heads: MedusaHeads,
    projection: OutputProjection,
    states: HiddenStates,
    rows: torch.Tensor,
    *,
    ranks: int = NUM_RANKS,
    batch_size: int = 256,
) -> Guesses:
    tokens, probabilities = [], []
    dtype = projection.lm_head_rows.dtype
    for part in rows.split(batch_size):
        path = projection.embeddings[path_tokens(states, part, heads.num_heads)].to(dtype)
        guessed = heads.path_hidden(states.hidden[part].to(projection.lm_head_rows), path)
        columns, shares = best_guesses(heads.logits(guessed, projection.lm_head_rows), ranks)
        probabilities.append(shares.cpu())
        ids = columns.cpu()
        if projection.draft_token_ids is not None:
            ids = projection.draft_token_ids[ids].long()
        tokens.append(ids)
    return Guesses(rows, torch.cat(tokens, dim=1), torch.cat(probabilities, dim=1))


def rank_accuracy(guesses: Guesses, targets: torch.Tensor) -> list[list[float]]:
    """Share of rows whose target is the head's guess of exactly that rank: [heads][ranks].

    ``targets`` [heads, n] token ids at the guesses' rows, -1 where there is none (left out of the share). A target
    outside the draft vocabulary counts as missed. Sum over ranks for the usual cumulative "top-k" accuracy.
    """
    known = targets >= 0
    hits = (guesses.tokens == targets.unsqueeze(-1)) & known.unsqueeze(-1)
    shares = hits.sum(dim=1) / known.sum(dim=1, keepdim=True).clamp(min=1)
    return shares.tolist()


@dataclass(frozen=True, slots=True)
class ReplayCount:
    """``tokens`` emitted by ``steps`` decode steps (the token that prefill gives is counted in neither)."""

    steps: int = 0
    tokens: int = 0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def __add__(self, other: ReplayCount) -> ReplayCount:
        return ReplayCount(self.steps + other.steps, self.tokens + other.tokens)


def replay_answer(
    answer: Sequence[int], tree_at: Callable[[int], Sequence[NodePath]], guessed_tokens: Callable[[int, int, int], int]
) -> ReplayCount:
    """Walk an answer as the engine would: draft a tree at the pending token, accept what the answer agrees with.

    ``tree_at(j)``: the tree drafted when ``answer[j]`` is pending; ``guessed_tokens(j, depth, rank)``: what its nodes
    hold. Each step emits the accepted tokens and one more that the backbone gives by itself, cut at the answer's end.
    """
    pending, steps = 0, 0
    while pending < len(answer) - 1:
        tree = set(tree_at(pending))
        path: NodePath = ()
        while pending + 1 + len(path) < len(answer):
            depth, wanted = len(path), answer[pending + 1 + len(path)]
            rank = next(
                (
                    path_below[-1]
                    for path_below in sorted(node for node in tree if len(node) == depth + 1 and node[:-1] == path)
                    if guessed_tokens(pending, depth, path_below[-1]) == wanted
                ),
                None,
            )
            if rank is None:
                break
            path = (*path, rank)
        steps += 1
        pending = min(pending + len(path) + 1, len(answer) - 1)
    return ReplayCount(steps, max(len(answer) - 1, 0))


def replay(
    states: HiddenStates, guesses: Guesses, nodes: int, *, static_tree: CandidateTree | None = None
) -> dict[str, ReplayCount]:
    """Replay all held-out answers; counts by class and under "all".

    Without ``static_tree`` every step drafts its own tree of ``nodes`` nodes, best first by the product of the heads'
    probabilities (what the engine does); with it, the tree's first ``nodes`` nodes.
    """
    column = {row: index for index, row in enumerate(guesses.rows.tolist())}
    tokens = guesses.tokens.transpose(0, 1).tolist()
    probabilities = guesses.probabilities.transpose(0, 1).tolist()
    counts: dict[str, ReplayCount] = {}
    for index, answer in enumerate(states.answers):
        first = int(states.starts[index])
        if first not in column:
            continue
        base = column[first]

        def tree_at(j: int, base: int = base) -> Sequence[NodePath]:
            if static_tree is not None:
                return static_tree.nodes[:nodes]
            return best_first_paths(probabilities[base + j], nodes)[0]

        def guessed(j: int, depth: int, rank: int, base: int = base) -> int:
            return tokens[base + j][depth][rank]

        count = replay_answer(answer.answer_ids, tree_at, guessed)
        for name in (ALL_CLASSES, answer.label or "unlabelled"):
            counts[name] = counts.get(name, ReplayCount()) + count
    return counts


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """``accuracy`` by class: [heads][ranks], per exact rank. ``dynamic`` and ``static``: nodes -> class -> counts."""

    answers: int
    rows: int
    accuracy: dict[str, list[list[float]]]
    dynamic: dict[int, dict[str, ReplayCount]]
    static: dict[int, dict[str, ReplayCount]]

    def to_json(self) -> dict[str, Any]:
        """Plain data with rounded rates, as ``config.json`` of the heads keeps it."""

        def rates(replays: dict[int, dict[str, ReplayCount]]) -> dict[str, dict[str, float]]:
            return {
                str(nodes): {label: round(count.tokens_per_step, 3) for label, count in counts.items()}
                for nodes, counts in replays.items()
            }

        accuracy = {
            label: [[round(share, 5) for share in ranks] for ranks in shares] for label, shares in self.accuracy.items()
        }
        return {
            "accuracy": accuracy.pop(ALL_CLASSES),
            "accuracy_by_class": accuracy,
            "held_out": {"answers": self.answers, "rows": self.rows},
            "tokens_per_step": {"dynamic": rates(self.dynamic), "static": rates(self.static)},
        }


def evaluate(
    heads: MedusaHeads,
    projection: OutputProjection,
    states: HiddenStates,
    *,
    node_counts: Sequence[int] = (4, 7, 11, 15),
) -> EvaluationReport:
    """Evaluate on the held-out answers of ``states``. The static tree is the best for the measured accuracies."""
    rows = states.select(held_out=True)
    guesses = guess(heads.eval().to(projection.lm_head_rows.device), projection, states, rows)
    targets = states.targets(heads.num_heads)[:, rows]
    label_of_row: list[str] = []
    held_out = [answer for answer in states.answers if answer.held_out]
    for answer in held_out:
        label_of_row.extend([answer.label or "unlabelled"] * (len(answer.answer_ids) - 1))
    accuracy = {ALL_CLASSES: rank_accuracy(guesses, targets)}
    for label in sorted(set(label_of_row)):
        chosen = torch.tensor([i for i, other in enumerate(label_of_row) if other == label])
        accuracy[label] = rank_accuracy(guesses.select(chosen), targets[:, chosen])
    best_static = CandidateTree.from_accuracies(accuracy[ALL_CLASSES], max(node_counts))
    return EvaluationReport(
        answers=len(held_out),
        rows=len(rows),
        accuracy=accuracy,
        dynamic={n: replay(states, guesses, n) for n in node_counts},
        static={n: replay(states, guesses, n, static_tree=best_static) for n in node_counts},
    )
