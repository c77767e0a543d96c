"""The planner's loop in C (``runners/native/csrc/planner.h``): the nodes that :func:`best_first_nodes` takes, in a
fraction of the time and without Python's lock. That function is what it is tested against."""

from __future__ import annotations

import ctypes
import logging
import struct
from array import array
from ctypes import c_int, c_void_p
from typing import Any

from backends.cost.step_cost import StepCost
from backends.runners.native.bindings import Kernels, NativeUnavailable, load_library
from backends.speculation.guided import GuidedProposals
from backends.speculation.tree_builder import (
    GIVE_UP,
    GRAMMAR,
    HEADS,
    BestFirst,
    Draft,
    DraftRequest,
    Goodput,
    best_first_nodes,
)

log = logging.getLogger(__name__)

# The structures of csrc/planner.h: mg_plan_step, mg_plan_request, mg_plan_chain.
_STEP = struct.Struct("@4d4i")
_REQUEST = struct.Struct("@4Pd8i")
_CHAIN = struct.Struct("@4i")
_SOURCES = (HEADS, GRAMMAR)


def planner_here() -> BestFirst:
    """The one in C, or its reference where there is no C compiler."""
    try:
        return NativePlanner(load_library())
    except NativeUnavailable as error:
        log.debug("candidates are planned in Python, which is slower than in C: %s", error)
        return best_first_nodes


class NativePlanner:
    """A :data:`backends.speculation.tree_builder.BestFirst`. Keeps buffers, so it is for one thread."""

    def __init__(self, kernels: Kernels) -> None:
        self._plan: Any = kernels.library.mg_plan
        self._plan.restype, self._plan.argtypes = c_int, [c_void_p] * 9
        self._step = ctypes.create_string_buffer(_STEP.size)
        self._requests, self._counts = ctypes.create_string_buffer(_REQUEST.size), array("i", [0])
        self._nodes, self._survivals = array("i"), array("d")
        self._cost: StepCost | None = None
        self._forward_ms = array("d")

    def __call__(self, requests: dict[int, DraftRequest], goodput: Goodput) -> dict[int, Draft]:
        """Raises MemoryError."""
        drafts = {key: Draft() for key in requests}
        count, budget = len(requests), goodput.node_budget
        if not requests or budget <= 0:
            return drafts
        self._make_room(count, budget)
        names = {name: number for number, name in enumerate(_SOURCES)}
        chains, tokens, chances, kept = bytearray(), list[int](), list[float](), []
        num_chains, at = 0, 0
        for request in requests.values():
            first_chain = num_chains
            for source, chain in request.chains.items():
                number = names.setdefault(source, len(names))
                chains += _CHAIN.pack(len(tokens), len(chain.tokens), number, 0)
                tokens += chain.tokens
                chances += chain.chances
                num_chains += 1
            proposals, max_depth = request.proposals, request.max_depth
            longest = max_depth if request.longest is None else request.longest
            own = request.max_nodes, max_depth, longest, first_chain, num_chains - first_chain, 0
            if proposals is None:
                _REQUEST.pack_into(self._requests, at, 0, 0, 0, 0, request.trust, 0, 0, *own)
            else:
                forced = 0
                if isinstance(proposals, GuidedProposals):
                    flags = bytearray(proposals.lists)
                    for index in proposals.forced:
                        flags[index] = 1
                    holder = (ctypes.c_uint8 * len(flags)).from_buffer(flags)
                    kept.append(holder)
                    forced = ctypes.addressof(holder)
                memory = proposals.addresses
                _REQUEST.pack_into(
                    self._requests, at, *memory, forced, request.trust, proposals.lists, proposals.k, *own
                )
            at += _REQUEST.size
        _STEP.pack_into(
            self._step, 0, goodput.base_tokens, goodput.base_ms, goodput.row_cost_factor, GIVE_UP, count, budget, 0, 1
        )
        chain_memory = (ctypes.c_char * (len(chains) or 1)).from_buffer(chains or bytearray(1))
        chain_tokens, chain_chances = array("i", tokens), array("d", chances)
        found = self._plan(
            ctypes.addressof(self._step),
            ctypes.addressof(self._requests),
            ctypes.addressof(chain_memory),
            chain_tokens.buffer_info()[0],
            chain_chances.buffer_info()[0],
            self._forward_at(goodput.cost, goodput.base_rows, budget),
            self._counts.buffer_info()[0],
            self._nodes.buffer_info()[0],
            self._survivals.buffer_info()[0],
        )
        if found < 0:
            raise MemoryError("no memory for planning candidates")
        if found:
            self._read(drafts, found, budget, list(names))
        return drafts

    def _read(self, drafts: dict[int, Draft], found: int, budget: int, names: list[str]) -> None:
        """Deal the nodes out: each sequence's stand together."""
        nodes = self._nodes
        tokens, parents = nodes[:found].tolist(), nodes[budget : budget + found].tolist()
        sources = [names[number] for number in nodes[2 * budget : 2 * budget + found]]
        survivals = self._survivals[:found].tolist()
        begin = 0
        for draft, count in zip(drafts.values(), self._counts, strict=False):
            if count:
                end = begin + count
                draft.tokens, draft.parents = tokens[begin:end], parents[begin:end]
                draft.sources, draft.survivals = sources[begin:end], survivals[begin:end]
                begin = end

    def _make_room(self, requests: int, budget: int) -> None:
        if len(self._requests) < requests * _REQUEST.size:
            self._requests = ctypes.create_string_buffer(2 * requests * _REQUEST.size)
            self._counts = array("i", bytes(8 * requests))
        if len(self._survivals) < budget:
            self._nodes, self._survivals = array("i", bytes(12 * budget)), array("d", bytes(8 * budget))

    def _forward_at(self, cost: StepCost, base_rows: int, budget: int) -> int:
        """Address of the table's milliseconds from ``base_rows`` rows on."""
        if cost is not self._cost:
            self._cost, self._forward_ms = cost, array("d")
        listed = len(self._forward_ms)
        if listed <= base_rows + budget:
            self._forward_ms.extend([cost.forward_ms(rows) for rows in range(listed, base_rows + budget + 1)])
        return self._forward_ms.buffer_info()[0] + 8 * base_rows
