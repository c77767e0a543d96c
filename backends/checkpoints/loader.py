"""Heads of any flavour for one backbone, and whether they were trained for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backends.checkpoints.files import HeadsFiles, first_values, read_config, read_heads_files, resolve_folder
from backends.checkpoints.flavours import ForeignHeads, check_fit, is_head_tensor, lies_in_a_model, parse_heads
from backends.heads.format import WEIGHTS_FILE, backbone_fingerprint, load_heads, read_heads_config
from backends.heads.module import HeadsError, MedusaHeads
from backends.heads.residual import ResidualHeads
from backends.runners.base import HeadsRunner, ModelRunner

log = logging.getLogger(__name__)

_COMPARED = 64


@dataclass(frozen=True, slots=True)
class BackboneFacts:
    """What heads are compared with, taken from a model before it is quantised or taken over by an engine.

    ``quantized``: its checkpoint came so; the weights that heads were trained on can't be seen.
    """

    hidden_size: int
    vocab_size: int
    fingerprint: str
    quantized: bool
    samples: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: Any) -> BackboneFacts:
        """Of a transformers model. ``samples``: the first values of every parameter, in bfloat16."""
        parameters: nn.Module = model
        samples = {
            name: parameter.detach().reshape(-1)[:_COMPARED].to("cpu", torch.bfloat16)
            for name, parameter in parameters.named_parameters()
        }
        vocab_size, hidden_size = model.get_output_embeddings().weight.shape
        quantized = getattr(model.config, "quantization_config", None) is not None
        return cls(hidden_size, vocab_size, backbone_fingerprint(model), quantized, samples)


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """``stale``: trained for another backbone; None when the checkpoint doesn't say for which.

    ``accuracies``: how often each rank of each head was right on held-out text, if the checkpoint says so.
    ``trained_for``: the backbone's name by the checkpoint's config, or "".
    """

    heads: MedusaHeads | ResidualHeads
    flavour: str
    stale: bool | None
    trained_for: str = ""
    accuracies: tuple[tuple[float, ...], ...] = ()
    message: str = ""

    def bind(self, runner: ModelRunner) -> HeadsRunner:
        return runner.bind_heads(self.heads)


def load_checkpoint(name: str | Path, backbone: BackboneFacts) -> LoadedHeads:
    """Heads from a local folder or a hub id, checked against the backbone.

    Raises :class:`HeadsError` naming what is missing, malformed, or of the wrong size. Logs a warning when the heads
    were trained for another backbone: answers stay the same, but few guesses will be right.
    """
    folder = resolve_folder(str(name))
    if is_own(folder):
        loaded = load_own(folder, backbone)
    else:
        files, found = read_foreign(folder)
        check_fit(
            found.heads,
            hidden_size=backbone.hidden_size,
            vocab_size=backbone.vocab_size,
            where=f"{folder / files.name}",
        )
        stale = _merged_stale(files, backbone) if found.flavour == "merged" else None
        loaded = LoadedHeads(found.heads, found.flavour, stale, trained_for(files.config))
    loaded = replace(loaded, message=_message(folder, loaded))
    if loaded.stale or loaded.flavour == "merged":
        log.warning("%s", loaded.message)
    return loaded


def is_own(folder: Path) -> bool:
    """Whether a folder is in the project's own format (:mod:`backends.heads.format`)."""
    return (folder / WEIGHTS_FILE).is_file() or str(read_config(folder).get("format", "")).startswith("medusa-gateway/")


def holds_heads(folder: Path) -> bool:
    """Whether heads of any flavour lie in a folder, which may be a model's own."""
    return is_own(folder) or read_heads_files(folder, is_head_tensor, safe_only=True) is not None


def read_foreign(folder: Path) -> tuple[HeadsFiles, ForeignHeads]:
    """Another project's heads, not yet compared with a backbone. Raises :class:`HeadsError`."""
    left: dict[str, list[str]] = {}
    files = read_heads_files(folder, is_head_tensor, left=left)
    if files is None:
        raise HeadsError(
            f"{folder} holds no Medusa heads: looked for medusa_heads.safetensors, medusa_lm_head.safetensors, "
            "medusa_lm_head.pt, and for medusa_head.* or blocks.* tensors in a model's files (model.safetensors, "
            f"pytorch_model.bin, or an index of their shards); found {_what_is_there(folder, left)}"
        )
    merged = bool(files.others)
    if merged and not any(lies_in_a_model(name) for name in files.tensors):
        raise HeadsError(f"{folder / files.name}: what is {files.others[0]} beside the heads?")
    return files, parse_heads(
        files.tensors, beside_backbone=merged, config=files.config, where=f"{folder / files.name}"
    )


def _what_is_there(folder: Path, left: dict[str, list[str]]) -> str:
    if left:
        return ", ".join(f"{file} with {_few(names) or 'no tensors'}" for file, names in left.items())
    return _few(sorted(path.name for path in folder.iterdir())) or "nothing"


def _few(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def trained_for(config: dict[str, Any]) -> str:
    """The backbone's name as the checkpoint's config has it; "" when it says nothing."""
    return str(config.get("base_model_name_or_path") or config.get("model") or "")


def load_own(folder: Path, backbone: BackboneFacts) -> LoadedHeads:
    """A local folder of the project's own format; nothing is logged. Raises :class:`HeadsError`."""
    heads = load_heads(folder, hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size)
    config = read_heads_config(folder)
    about = config.get("backbone", {})
    fingerprint = about.get("fingerprint")
    stale = None if backbone.quantized or fingerprint is None else fingerprint != backbone.fingerprint
    return LoadedHeads(heads, config["format"], stale, str(about.get("name", "")), _accuracies(config))


def _merged_stale(files: HeadsFiles, backbone: BackboneFacts) -> bool | None:
    """Whether the backbone beside the heads is another one than the one that is served."""
    beside = first_values(files.parts, backbone.samples, _COMPARED)
    if not beside or backbone.quantized:
        return None
    return any(not torch.equal(values, backbone.samples[name]) for name, values in beside.items())


def _message(folder: Path, loaded: LoadedHeads) -> str:
    origin = f" ({loaded.trained_for})" if loaded.trained_for else ""
    if loaded.flavour == "merged":
        if loaded.stale:
            return (
                f"{folder}: these heads were trained together with the backbone beside them, which is not the one that "
                f"is served; expect few accepted tokens, or serve it: --model {folder}"
            )
        return f"{folder}: backbone and heads were trained together; answers are those of the changed backbone{origin}"
    if loaded.stale:
        return f"{folder}: the heads were trained for another backbone{origin}; expect few accepted tokens"
    if loaded.stale is None:
        return f"{folder}: the heads don't say on which weights they were trained{origin}"
    return f"{folder}: the heads were trained for this backbone"


def _accuracies(config: dict[str, Any]) -> tuple[tuple[float, ...], ...]:
    found = config.get("accuracy")
    if isinstance(found, dict):
        found = found.get("all")
    try:
        return tuple(tuple(float(value) for value in ranks) for ranks in found or ())
    except (TypeError, ValueError):
        return ()
