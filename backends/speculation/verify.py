"""Which candidates are accepted.

*Sample and match* (exact): draw one token at each visited row from the target distribution and follow the child that
holds it. What is emitted is what vanilla decoding draws at the same positions, whatever the tree.

*Typical acceptance* (lossy, Cai et al., 2024, section 2.3.1): a candidate is accepted when the model finds it likely
enough, p > min(epsilon, alpha * exp(-entropy)); faster at high temperature, but another distribution.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from backends.runners.base import ModelRunner
from backends.sampling.sampler import LogitProcessor, Visit, draw_tokens
from backends.speculation.tree_builder import Draft
from backends.types import Acceptance, SamplingParams

TYPICAL_EPSILON = 0.09
TYPICAL_ALPHA = 0.3


@dataclass(slots=True)
class VerifyRequest:
    """One sequence's rows in this step. ``first_row``: its root's row in the logits. ``position``: of the next token.

    ``acceptance`` is "exact" unless the plan opted out.
    """

    first_row: int
    position: int
    params: SamplingParams
    processor: LogitProcessor | None
    draft: Draft
    acceptance: Acceptance = "exact"


@dataclass(slots=True)
class AcceptResult:
    """``tokens``: emitted, at least one. ``rows``: the row (root 0) each was drawn at; all but the first are nodes."""

    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def verify(runner: ModelRunner, logits: torch.Tensor, requests: SequenceOf[VerifyRequest]) -> list[AcceptResult]:
    """Accept for all sequences, level by level, so that the draws of one level share their calls.

    ``logits`` [R, V] float32. Sequences don't influence each other. A token that is none
    (:data:`backends.sampling.rows.NO_TOKEN`) ends its sequence's list: the row that it was drawn from is broken.
    """
    results = [AcceptResult() for _ in requests]
    children = [request.draft.children() for request in requests]
    at = [0] * len(results)
    active = list(range(len(results)))
    plain = all(each.params.greedy and each.processor is None and each.acceptance == "exact" for each in requests)
    while active:
        visits: list[Visit] = []
        for i in active if not plain else ():
            request, result = requests[i], results[i]
            if request.acceptance == "typical":
                _follow_typical(logits, request, children[i], at, i, result)
            visits.append(
                Visit(
                    request.first_row + at[i],
                    request.position + len(result.tokens),
                    request.params,
                    request.processor,
                    tuple(result.tokens) if request.processor else (),
                )
            )
        if plain:
            drawn = runner.argmax(logits, [requests[i].first_row + at[i] for i in active])
        else:
            drawn = draw_tokens(runner, logits, visits)
        following = []
        for i, token in zip(active, drawn, strict=True):
            result = results[i]
            result.tokens.append(token)
            result.rows.append(at[i])
            child = children[i][at[i]].get(token)
            if child is not None:
                at[i] = child
                following.append(i)
        active = following
    return results


def _follow_typical(
    logits: torch.Tensor,
    request: VerifyRequest,
    children: list[dict[int, int]],
    at: list[int],
    index: int,
    result: AcceptResult,
) -> None:
    """Go down while a child is likely enough; the token after the last accepted one is then drawn as usual."""
    while children[at[index]]:
        row = logits[request.first_row + at[index]].to("cpu", torch.float32, copy=True)
        if request.processor is not None:
            request.processor.apply(row.numpy(), result.tokens)
        temperature = 1.0 if request.params.greedy else request.params.temperature
        log_p = torch.log_softmax(row / temperature, dim=-1)
        entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum()
        threshold = min(TYPICAL_EPSILON, TYPICAL_ALPHA * float(torch.exp(-entropy)))
        likely = [(float(log_p[token].exp()), token, row_below) for token, row_below in children[at[index]].items()]
        probability, token, row_below = max(likely)
        if not probability > threshold:  # also of what is not a number
            return
        result.tokens.append(token)
        result.rows.append(at[index])
        at[index] = row_below
