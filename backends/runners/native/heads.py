"""The project's own heads through the C kernels: what the kernels can run, and one C call for each proposal."""

from __future__ import annotations

import ctypes
from array import array
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from backends.heads.expansion import WIDTH, FollowPlan, plan_of_tree
from backends.heads.module import MedusaHeads
from backends.runners.base import ProposalRequest, Proposals
from backends.runners.native import bindings as lib
from backends.runners.native.checked import address_of, refuse, values_of
from backends.runners.native.packing import LANES, pack, pack_int8
from backends.tree import MAX_RANKS

if TYPE_CHECKING:
    from backends.runners.native.runner import NativeRunner


def why_not_in_kernels(heads: MedusaHeads) -> str | None:
    """What the kernels lack for these heads; None: they can run them."""
    if heads.layers > 1:
        return f"{heads.layers} layers for each head"
    if heads.own_output:
        return "output layers of their own"
    if heads.inner_size % LANES:
        return f"inner size {heads.inner_size} is not a multiple of {LANES}"
    return None


class NativeHeads:
    """Medusa heads through the kernels. See :class:`backends.runners.base.HeadsRunner`."""

    def __init__(self, runner: NativeRunner, heads: MedusaHeads) -> None:
        if heads.inner_size % LANES:
            raise ValueError(f"inner size {heads.inner_size} of the heads is not a multiple of {LANES}")
        if heads.hidden_size != runner.hidden_size:
            raise ValueError(f"heads are for hidden size {heads.hidden_size}, the backbone has {runner.hidden_size}")
        self._runner = runner
        self._heads = heads
        self.num_heads = heads.num_heads
        ids = heads.draft_token_ids
        self._draft_ids = np.arange(runner.vocab_size, dtype=np.int32) if ids is None else ids.numpy()
        assert heads.up.bias is not None
        bias = heads.up.bias.detach().to(torch.float32).flatten().contiguous()
        self._kept: list[torch.Tensor] = [bias]
        self._vocab_padded = -(-len(self._draft_ids) // LANES) * LANES
        # Guesses need no more than eight bits, and the heads take half the time. In float32 the backbone's precision
        # was asked for, so the heads keep it too.
        int8 = heads.sequential and runner.dtype == torch.bfloat16
        up, down = heads.up.weight.detach().flatten(0, 1), heads.down.weight.detach()
        if int8:
            layers = {
                "up8": self._int8(up),
                "down8": self._int8(down.flatten(0, 1)),
                "draft_lm_head8": self._int8(self._draft_rows()),
            }
        else:
            # The backbone's own operand where it holds the draft vocabulary as these layers take it.
            shared = ids is None and not runner.int8
            layers = {
                "up": self._keep(pack(up.to(runner.dtype))),
                "down": self._keep(torch.stack([pack(weight.to(runner.dtype)) for weight in down])),
                "draft_lm_head": runner.lm_head.data_ptr() if shared else self._keep(pack(self._draft_rows())),
            }
        self._struct = lib.Heads(
            heads=self.num_heads,
            hidden=runner.hidden_size,
            inner=heads.inner_size,
            in_size=heads.up.weight.shape[2],
            draft_vocab_padded=self._vocab_padded,
            draft_vocab=len(self._draft_ids),
            vocab=runner.vocab_size,
            is_bf16=runner.dtype == torch.bfloat16,
            is_int8=int8,
            embed=runner.embeddings.data_ptr(),
            up_bias=address_of("up.bias", bias, (self.num_heads * heads.inner_size,), torch.float32),
            draft_ids=values_of("draft_token_ids", self._draft_ids, len(self._draft_ids), np.int32),
            **layers,
        )

    def _draft_rows(self) -> torch.Tensor:
        """Rows of ``lm_head`` [V', H]."""
        return self._runner.lm_head_rows(torch.from_numpy(self._draft_ids).long())

    def _keep(self, weight: torch.Tensor) -> int:
        kept = self._runner.arena.keep(weight)
        self._kept.append(kept)
        return kept.data_ptr()

    def _int8(self, weight: torch.Tensor) -> lib.Int8Layer:
        return lib.Int8Layer(*map(self._keep, pack_int8(weight)))

    def propose(self, request: ProposalRequest) -> list[Proposals]:
        return self._follow(request) if self._heads.sequential else self._all_at_once(request)

    def _all_at_once(self, request: ProposalRequest) -> list[Proposals]:
        """Every head from the hidden state and the pending token alone."""
        runner, n, vocab = self._runner, len(request.contexts), len(self._draft_ids)
        k = min(request.k, MAX_RANKS, vocab)
        hidden = request.states[:n].contiguous()
        block_input = self._heads.block_input(hidden, runner.embed(request.pending)).contiguous()
        count = self.num_heads * n
        logits = torch.empty(count, self._vocab_padded, dtype=torch.float32)
        refuse(
            runner.library.mg_heads_logits(
                runner.thread_pool,
                ctypes.byref(self._struct),
                address_of("the heads' input", block_input, (n, self._struct.in_size), runner.dtype),
                address_of("hidden", hidden, (n, runner.hidden_size), runner.dtype),
                n,
                logits.data_ptr(),
            )
        )
        ids = np.empty((self.num_heads, n, k), dtype=np.int32)
        probabilities = np.empty((self.num_heads, n, k), dtype=np.float32)
        refuse(
            runner.library.mg_top_k(
                runner.thread_pool,
                logits.data_ptr(),
                count,
                self._vocab_padded,
                vocab,
                k,
                ids.ctypes.data,
                probabilities.ctypes.data,
            )
        )
        tokens = self._draft_ids[ids]
        return [Proposals(tokens[:, i], probabilities[:, i]) for i in range(n)]

    def _follow(self, request: ProposalRequest) -> list[Proposals]:
        """Sequential heads. All arrays of the call lie in two blocks of memory, one of C ints and one of floats."""
        runner, n = self._runner, len(request.contexts)
        k = min(request.k, MAX_RANKS, self._struct.draft_vocab)
        of_hidden, hidden_rows = runner.states(request.hidden.contiguous())
        plans = {i: plan_of_tree(tree, self.num_heads, k) for i, tree in enumerate(request.trees) if tree is not None}
        width, lists = WIDTH, 1 + WIDTH * (self.num_heads - 1)
        for plan in plans.values():
            width, lists = max(width, plan.widest), max(lists, plan.lists)
        given = array("i", [*(range(n) if request.rows is None else request.rows), *request.pending])
        if plans:
            given.extend(_plan_arrays(plans, n, lists))
        of_rows, _ = given.buffer_info()
        of_pending, planned = of_rows + 4 * n, of_rows + 8 * n
        of_plans = (planned, planned + 4 * n, planned + 4 * n * (1 + lists)) if plans else (None, None, None)
        # What the kernel writes: guesses and the lists below them, then what it keeps for each sequence and row.
        guesses = n * lists * k
        sizes = (guesses, guesses, n, n, n * width, n * width, n * width)
        integers, floats = array("i", bytes(4 * sum(sizes))), array("f", bytes(4 * (guesses + n * lists)))
        (of_integers, _), (of_floats, _) = integers.buffer_info(), floats.buffer_info()
        tokens, below, *kept = (of_integers + 4 * start for start in accumulate(sizes[:-1], initial=0))
        follow = lib.Follow(
            *(n, lists, k, WIDTH, request.min_survival, 0, 0, of_rows, of_pending, *of_plans),
            *(tokens, below, of_floats, of_floats + 4 * guesses, *kept),
        )
        refuse(
            runner.library.mg_heads_follow(
                runner.thread_pool,
                ctypes.byref(self._struct),
                ctypes.byref(follow),
                of_hidden,
                hidden_rows,
                n * width,
            )
        )
        levels: int = follow.levels
        found = []
        for i, used in enumerate(integers[2 * guesses : 2 * guesses + n]):
            begin = i * lists * k
            end = begin + used * k
            following = integers[guesses + begin : guesses + end]
            found.append(Proposals.of_memory(integers[begin:end], floats[begin:end], following, k, levels))
        return found


def _plan_arrays(plans: dict[int, FollowPlan], n: int, lists: int) -> array[int]:
    """The plans of n sequences as the kernel reads them: how many lists each names [n], 0 for none, then for every list
    the one above it [n, lists] and the rank that it follows there [n, lists]."""
    found = array("i", (plans[i].lists if i in plans else 0 for i in range(n)))
    for part in ("above", "ranks"):
        for i in range(n):
            named = (0, *getattr(plans[i], part)) if i in plans else ()
            found.extend((*named, *[0] * (lists - len(named))))
    return found
