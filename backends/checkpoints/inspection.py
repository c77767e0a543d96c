"""What ``heads inspect`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from backends.checkpoints.files import resolve_folder
from backends.checkpoints.loader import BackboneFacts, is_own, load_checkpoint, read_foreign, trained_for
from backends.heads.format import describe_heads
from backends.heads.module import HeadsError
from backends.models.demo import prepare_demo_model


def inspect_heads(name: str) -> dict[str, Any]:
    """Facts about heads in a local folder or under a hub id, counted from the tensors.

    Raises :class:`HeadsError` for what can't be read.
    """
    folder = resolve_folder(name)
    if is_own(folder):
        facts = describe_heads(folder)
        return {"flavour": facts["format"], **facts, "dtype": "bfloat16"}
    files, found = read_foreign(folder)
    heads = found.heads
    said = {key: files.config[key] for key in ("medusa_num_heads", "num_heads") if key in files.config}
    lm_head = ("own", "shared by the heads", "the backbone's")
    return {
        "flavour": found.flavour,
        "file": files.name,
        "num_heads": heads.num_heads,
        "num_heads_by_config": next(iter(said.values()), None),
        "layers": sorted({len(blocks) for blocks in heads.blocks}),
        "bias": any(block.bias is not None for blocks in heads.blocks for block in blocks),
        "hidden_size": heads.hidden_size,
        "lm_head": lm_head[2 if not heads.projections else 1 if len(heads.projections) == 1 < heads.num_heads else 0],
        "draft_vocab_size": heads.draft_vocab_size,
        "token_map": heads.token_ids is not None,
        "dtype": sorted({str(t.dtype).removeprefix("torch.") for t in files.tensors.values() if t.is_floating_point()}),
        "bytes": files.bytes,
        "parameters": sum(t.numel() for t in files.tensors.values() if t.is_floating_point()),
        "backbone": {"name": trained_for(files.config) or None, "changed_by_training": found.flavour == "merged"},
    }


def fit_report(name: str, model: str | None) -> dict[str, Any]:
    """Whether heads fit a model (None: the demo model): ``fits``, ``stale`` and why. Loads the model's weights."""
    from transformers import AutoModelForCausalLM

    folder = str(prepare_demo_model()) if model is None else model
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    try:
        found = load_checkpoint(name, BackboneFacts.of(loaded))
    except HeadsError as error:
        return {"model": str(Path(folder)), "fits": False, "reason": str(error)}
    return {"model": str(Path(folder)), "fits": True, "stale": found.stale, "reason": found.message}
