"""The project's own checkpoint format for heads (``medusa-gateway/1``, ``/2`` and ``/3``): written, read, described.

A checkpoint is a folder with ``config.json`` and ``medusa_heads.safetensors``:

==================== ============================ ==================================================================
tensor               shape                        meaning
==================== ============================ ==================================================================
``up.weight``        [heads, inner, input]        input is H ("hidden") or 2H ("hidden+token")
``up.bias``          [heads, inner]
``down.weight``      [heads, H, inner]
``draft_token_ids``  [draft vocabulary] int32     optional, ascending; absent: the whole vocabulary
==================== ============================ ==================================================================

``medusa-gateway/2`` has the same tensors for *sequential* heads (:mod:`backends.heads.module`).

``medusa-gateway/3`` has what the other two leave out, and says ``sequential`` in its config:

=========================== ======================== =================================================================
tensor                      shape                    meaning
=========================== ======================== =================================================================
``further.{i}.up.weight``   [heads, inner, input]    block ``i + 2`` of every head, after the first; ``.up.bias`` and
                                                     ``.down.weight`` likewise
``output.weight``           [heads, V', H]           own output layers, over the draft vocabulary; absent: ``lm_head``
=========================== ======================== =================================================================

Other flavours of checkpoints are not read here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from backends.heads.module import HeadInput, HeadsError, MedusaHeads, check_head_count

FORMAT = "medusa-gateway/1"
SEQUENTIAL_FORMAT = "medusa-gateway/2"
GENERAL_FORMAT = "medusa-gateway/3"
FORMATS = (FORMAT, SEQUENTIAL_FORMAT, GENERAL_FORMAT)
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "medusa_heads.safetensors"

_FURTHER = re.compile(r"^further\.\d+\.up\.weight$")


def backbone_fingerprint(model: nn.Module) -> str:
    """A name for the weights that heads were trained on: equal weights give equal names, in float32 or bfloat16.

    Hashes name, shape and the first values of every parameter as loaded by transformers (before an engine fuses or
    quantises them), so it takes milliseconds; a change that leaves the first row of every tensor alone goes unseen.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        sample = parameter.detach().reshape(-1)[:64].to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def save_heads(heads: MedusaHeads, folder: Path, *, config: dict[str, Any]) -> None:
    """Write the heads in bfloat16. ``config`` adds to (``backbone``, ``accuracy``, ...) what the tensors tell."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in heads.state_dict().items()
    }
    plain = heads.layers == 1 and not heads.own_output
    settings = {
        "format": (SEQUENTIAL_FORMAT if heads.sequential else FORMAT) if plain else GENERAL_FORMAT,
        "sequential": heads.sequential,
        "num_heads": heads.num_heads,
        "layers": heads.layers,
        "inner_size": heads.inner_size,
        "input": heads.head_input,
        "draft_vocab_size": None if heads.draft_token_ids is None else len(heads.draft_token_ids),
        **config,
    }
    # Whoever loads the folder meanwhile finds whole files, old or new.
    staged = folder / f".{WEIGHTS_FILE}.tmp"
    save_file(tensors, staged, metadata={"format": str(settings["format"])})
    staged.chmod(0o644)
    os.replace(staged, folder / WEIGHTS_FILE)
    staged = folder / f".{CONFIG_FILE}.tmp"
    staged.write_text(json.dumps(settings, indent=2) + "\n")
    os.replace(staged, folder / CONFIG_FILE)


def read_heads_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a heads folder. Raises :class:`HeadsError` when it is missing or of another format."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise HeadsError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise HeadsError(f"{path} is not JSON") from None
    found = config.get("format") if isinstance(config, dict) else None
    if found not in FORMATS:
        raise HeadsError(f"{path}: format is {found!r}; this version reads {', '.join(map(repr, FORMATS))}")
    if found == GENERAL_FORMAT and not isinstance(config.get("sequential"), bool):
        raise HeadsError(f"{path}: {GENERAL_FORMAT} must say whether the heads are 'sequential': true or false")
    for name in ("backbone", "training"):
        if not isinstance(config.get(name, {}), dict):
            raise HeadsError(f"{path}: {name} is {json.dumps(config[name])[:40]}; it must be an object, or left out")
    return config


def load_heads(folder: Path, *, hidden_size: int, vocab_size: int) -> MedusaHeads:
    """Read a heads folder for a backbone of this size; float32 on the CPU, in eval mode.

    Sizes and the number of heads come from the tensors. Raises :class:`HeadsError` naming what doesn't fit. That the
    heads were trained on another backbone of the same size is not noticed here: compare
    ``read_heads_config(folder)["backbone"]["fingerprint"]`` with :func:`backbone_fingerprint`.
    """
    config = read_heads_config(folder)
    path = folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except OSError as error:
        raise HeadsError(f"{path} can't be read: {error}") from None
    except SafetensorError as error:
        raise HeadsError(f"{path} is not a safetensors file: {error}") from None
    missing = {"up.weight", "up.bias", "down.weight"} - tensors.keys()
    if missing:
        raise HeadsError(f"{path} lacks {', '.join(sorted(missing))}")
    general = config["format"] == GENERAL_FORMAT
    own_output = general and "output.weight" in tensors
    up, down = tensors["up.weight"], tensors["down.weight"]
    if up.dim() != 3 or down.dim() != 3:
        raise HeadsError(f"{path}: up.weight and down.weight must be stacked over heads (3 dimensions)")
    num_heads, inner_size, input_size = up.shape
    check_head_count(num_heads, str(path))
    trained_hidden = down.shape[1]
    if trained_hidden != hidden_size:
        raise HeadsError(f"{folder}: heads are for hidden size {trained_hidden}, the backbone has {hidden_size}")
    trained_vocab = config.get("backbone", {}).get("vocab_size")
    if trained_vocab != vocab_size:
        raise HeadsError(f"{folder}: heads are for a vocabulary of {trained_vocab}, the backbone has {vocab_size}")
    if down.shape != (num_heads, hidden_size, inner_size) or tensors["up.bias"].shape != (num_heads, inner_size):
        raise HeadsError(f"{path}: shapes of up.weight, up.bias and down.weight do not belong together")
    inputs: dict[int, HeadInput] = {hidden_size: "hidden", 2 * hidden_size: "hidden+token"}
    if input_size not in inputs:
        raise HeadsError(f"{path}: up.weight takes {input_size} inputs; expected {hidden_size} or {2 * hidden_size}")
    ids = _checked_draft_ids(tensors.get("draft_token_ids"), vocab_size, path)
    heads = MedusaHeads(
        hidden_size,
        num_heads,
        inner_size,
        head_input=inputs[input_size],
        sequential=config.get("sequential", False) if general else config["format"] == SEQUENTIAL_FORMAT,
        draft_token_ids=ids,
        layers=1 + len({name.split(".")[1] for name in tensors if _FURTHER.match(name)}) if general else 1,
        output_rows=torch.zeros(vocab_size if ids is None else len(ids), hidden_size) if own_output else None,
    )
    _check_tensors(heads, tensors, path)
    heads.load_state_dict(tensors)
    return heads.eval().requires_grad_(False)


def _check_tensors(heads: MedusaHeads, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raises :class:`HeadsError` unless the file holds what such heads have and nothing else."""
    expected = heads.state_dict()
    for what, names in (("lacks", expected.keys() - tensors.keys()), ("has stray", tensors.keys() - expected.keys())):
        if names:
            raise HeadsError(f"{path} {what} {', '.join(sorted(names))}")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise HeadsError(f"{path}: {name} is {list(tensors[name].shape)}, expected {list(tensor.shape)}")


def _checked_draft_ids(ids: torch.Tensor | None, vocab_size: int, path: Path) -> torch.Tensor | None:
    if ids is None:
        return None
    if ids.dtype != torch.int32 or ids.dim() != 1 or not len(ids):
        raise HeadsError(f"{path}: draft_token_ids must be a list of int32")
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise HeadsError(f"{path}: draft_token_ids must ascend within the vocabulary of {vocab_size}")
    return ids


def describe_heads(folder: Path) -> dict[str, Any]:
    """What a heads folder holds, by its tensors; ``config.json`` beside it. Raises :class:`HeadsError`."""
    config = read_heads_config(folder)
    backbone = config.get("backbone", {})
    heads = load_heads(folder, hidden_size=backbone.get("hidden_size", -1), vocab_size=backbone.get("vocab_size", -1))
    path = folder / WEIGHTS_FILE
    return {
        "format": config["format"],
        "sequential": heads.sequential,
        "num_heads": heads.num_heads,
        "layers": heads.layers,
        "inner_size": heads.inner_size,
        "input": heads.head_input,
        "lm_head": "own" if heads.own_output else "the backbone's",
        "draft_vocab_size": backbone["vocab_size"] if heads.draft_token_ids is None else len(heads.draft_token_ids),
        "bytes": path.stat().st_size,
        "backbone": backbone,
        "training": config.get("training"),
        "accuracy": config.get("accuracy"),
        "tokens_per_step": config.get("tokens_per_step"),
    }
