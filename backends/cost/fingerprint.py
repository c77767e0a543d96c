"""What the time of a step depends on: two engines with the same facts may share a cost table."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from backends.checkpoints.loader import LoadedHeads
from backends.cost.probe import CONTEXT
from backends.heads.residual import ResidualHeads
from backends.runners.base import ModelRunner
from backends.runners.cpu_cores import cpu_name, usable_cores

_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def facts_of(runner: ModelRunner, config: Any, heads: LoadedHeads | None, quantize: str | None) -> dict[str, str]:
    """``config``: the transformers model's. Shapes count rather than weights: other weights take the same time."""
    facts = {
        "runner": runner.kind,
        "software": runner.software,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "quantize": quantize or "",
        "model": _digest({name: value for name, value in config.to_dict().items() if name not in _VOLATILE}),
        "heads": "none" if heads is None else _heads_shape(heads),
        "context": str(min(CONTEXT, runner.max_context)),
    }
    if runner.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(runner.device)
        return {
            **facts,
            "device": f"{torch.cuda.get_device_name(runner.device)}, {major}.{minor}",
            "cuda": str(torch.version.cuda),
        }
    return {
        **facts,
        "device": cpu_name(),
        "cores": str(usable_cores()),
        "quota": _cpu_quota(),
        "threads": str(runner.threads),
    }


def _heads_shape(loaded: LoadedHeads) -> str:
    heads = loaded.heads
    if isinstance(heads, ResidualHeads):
        blocks = [len(blocks) for blocks in heads.blocks]
        return f"{loaded.flavour}: {blocks} blocks, {[tuple(each.shape) for each in heads.projections]}"
    drafts = "all" if heads.draft_token_ids is None else len(heads.draft_token_ids)
    kind = "sequential" if heads.sequential else heads.head_input
    layers = f" x {heads.layers} layers" if heads.layers > 1 else ""
    own = " by output layers of their own" if heads.own_output else ""
    return f"{kind}: {heads.num_heads} x {heads.inner_size}{layers}, {drafts} tokens{own}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _cpu_quota() -> str:
    """A container's share of the cores, as cgroup v2 has it; "max" without one."""
    try:
        return Path("/sys/fs/cgroup/cpu.max").read_text().strip().partition(" ")[0] or "max"
    except OSError:
        return "max"
