"""Which project's heads a set of tensors is, told by names and shapes; configuration files are not believed.

=================== ======================================================== =========================================
flavour             tensors                                                  what to know
=================== ======================================================== =========================================
fasterdecoding-v1   ``{h}.{l}.linear.weight|bias``, ``{h}.{L}.weight``       a projection for every head
fasterdecoding-v2   ``{h}.{l}.linear.weight|bias``                           the backbone's ``lm_head``
merged              the above behind ``medusa_head.``, beside a backbone     the backbone was trained with them
modelopt            ``{h}.medusa_layers.{l}.linear.weight``,          a projection for every head
                    ``{h}.lm_head.weight``
vllm                ``blocks.{h}.layers.{l}.weight``, ``lm_heads.{h}.weight``, often without biases; a reduced
                    ``token_map``                                            vocabulary
=================== ======================================================== =========================================

Names may stand behind ``medusa_heads.``, and behind what torch's wrappers put first (``module.``, ``_orig_mod.``).
The project's own format is read by :mod:`backends.heads.format`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from backends.heads.module import HeadsError, check_head_count
from backends.heads.residual import ResidualBlock, ResidualHeads

Flavour = Literal["fasterdecoding-v1", "fasterdecoding-v2", "merged", "modelopt", "vllm"]

_PREFIX = re.compile(r"^(module\.|_orig_mod\.)*(?P<heads>medusa_heads?\.)?")
_MODELOPT_BLOCK = re.compile(r"^(?P<head>\d+)\.medusa_layers\.(?P<layer>\d+)\.linear\.(?P<part>weight|bias)$")
_MODELOPT_PROJECTION = re.compile(r"^(?P<head>\d+)\.lm_head\.weight$")
_BLOCK = re.compile(r"^(?P<head>\d+)\.(?P<layer>\d+)\.linear\.(?P<part>weight|bias)$")
_PROJECTION = re.compile(r"^(?P<head>\d+)\.(?P<layer>\d+)\.weight$")
_VLLM_BLOCK = re.compile(r"^blocks\.(?P<head>\d+)\.layers\.(?P<layer>\d+)\.(?P<part>weight|bias)$")
_VLLM_PROJECTION = re.compile(r"^lm_heads\.(?P<head>\d+)\.weight$")
_TOKEN_MAP = "token_map"
_SPELLINGS: tuple[tuple[Flavour, re.Pattern[str], re.Pattern[str]], ...] = (
    ("vllm", _VLLM_BLOCK, _VLLM_PROJECTION),
    ("modelopt", _MODELOPT_BLOCK, _MODELOPT_PROJECTION),
    ("fasterdecoding-v1", _BLOCK, _PROJECTION),
)
"""By flavour: the names of blocks and projections. The last is taken when no block tells."""


@dataclass(frozen=True, slots=True)
class ForeignHeads:
    flavour: Flavour
    heads: ResidualHeads


def is_head_tensor(name: str) -> bool:
    """Whether a tensor of this name belongs to heads of some flavour."""
    bare = _PREFIX.sub("", name)
    return bare == _TOKEN_MAP or any(block.match(bare) or projection.match(bare) for _, block, projection in _SPELLINGS)


def lies_in_a_model(name: str) -> bool:
    """Whether a head tensor's name says that it is a part of a whole model."""
    match = _PREFIX.match(name)
    return match is not None and match["heads"] is not None


def parse_heads(
    tensors: Mapping[str, torch.Tensor], *, beside_backbone: bool, config: Mapping[str, Any], where: str
) -> ForeignHeads:
    """Heads from tensors that :func:`is_head_tensor` took. ``where`` names them in errors.

    Raises :class:`HeadsError` when names and shapes make no sense together. Whether they fit a backbone is another
    question: :func:`check_fit`.
    """
    found = {_PREFIX.sub("", name): tensor for name, tensor in tensors.items()}
    spelling, block_name, projection_name = next(
        (each for each in _SPELLINGS if any(each[1].match(name) for name in found)), _SPELLINGS[-1]
    )
    vllm = spelling == "vllm"
    blocks: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
    projections: dict[int, torch.Tensor] = {}
    ends: dict[int, int] = {}
    for name, tensor in found.items():
        if name == _TOKEN_MAP:
            continue
        if not tensor.is_floating_point():
            raise HeadsError(f"{where}: {name} is {tensor.dtype}, not floating point")
        if match := block_name.match(name):
            layers = blocks.setdefault(int(match["head"]), {})
            layers.setdefault(int(match["layer"]), {})[match["part"]] = tensor
        elif match := projection_name.match(name):
            projections[int(match["head"])] = tensor
            ends[int(match["head"])] = int(match["layer"]) if spelling == "fasterdecoding-v1" else -1
        else:
            raise HeadsError(f"{where}: {name} belongs to another kind of heads than the rest")
    # A head may be a projection alone. vLLM's may share one, which is then that of head 0 ("original_lm_head").
    shared = vllm and sorted(projections) == [0]
    counted = _counted(blocks if shared else blocks.keys() | projections.keys(), "heads", where)
    if not counted:
        raise HeadsError(f"{where}: no heads")
    heads = tuple(_blocks(blocks.get(h, {}), h, where) for h in counted)
    for h, end in ends.items():
        if end not in (-1, len(heads[h])):
            raise HeadsError(f"{where}: the projection of head {h} is layer {end}; blocks before it: {len(heads[h])}")
    hidden = heads[0][0].weight.shape[0] if heads[0] else projections[0].shape[-1]
    if any(block.weight.shape != (hidden, hidden) for head in heads for block in head):
        raise HeadsError(f"{where}: blocks must be square and of one size")
    token_ids = found.get(_TOKEN_MAP)
    if token_ids is not None and (token_ids.dim() != 1 or token_ids.is_floating_point() or not len(token_ids)):
        raise HeadsError(f"{where}: token_map must be a list of token ids")
    if projections and not shared and sorted(projections) != list(range(len(heads))):
        raise HeadsError(f"{where}: {len(heads)} heads, but projections of heads {sorted(projections)}")
    rows = tuple(projections[h] for h in sorted(projections))
    if any(p.dim() != 2 or p.shape != rows[0].shape or p.shape[1] != hidden for p in rows):
        raise HeadsError(f"{where}: projections must be [vocabulary, {hidden}], all of one size")
    if token_ids is not None and rows and len(rows[0]) != len(token_ids):
        if len(rows[0]) <= int(token_ids.max()):
            raise HeadsError(f"{where}: projections of {len(rows[0])} rows don't fit a token_map of {len(token_ids)}")
        # As vLLM does when it loads: projections onto the whole vocabulary are cut down.
        rows = tuple(p[token_ids.long()] for p in rows)
    flavour: Flavour = "merged" if beside_backbone and not vllm else spelling
    if flavour == "fasterdecoding-v1" and not rows:
        flavour = "fasterdecoding-v2"
    scale = config.get("logit_scale") or 1.0 if vllm else 1.0
    if not isinstance(scale, int | float):
        raise HeadsError(f"{where}: config.json gives a logit_scale that is no number: {scale!r}")
    ids = None if token_ids is None else token_ids.long()
    return ForeignHeads(flavour, ResidualHeads(heads, rows, ids, float(scale)))


def _counted(found: Collection[int], what: str, where: str) -> list[int]:
    """0, 1, 2, ...: a gap means that a part of the checkpoint is missing."""
    if missing := sorted(set(range(max(found, default=-1) + 1)) - set(found)):
        raise HeadsError(f"{where}: {what} {missing} are missing")
    return sorted(found)


def _blocks(layers: dict[int, dict[str, torch.Tensor]], head: int, where: str) -> tuple[ResidualBlock, ...]:
    blocks = []
    for layer in _counted(layers, f"blocks of head {head}", where):
        weight, bias = layers[layer].get("weight"), layers[layer].get("bias")
        if weight is None or weight.dim() != 2:
            raise HeadsError(f"{where}: block {layer} of head {head} has no weight matrix")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise HeadsError(f"{where}: block {layer} of head {head} has a bias of another size")
        blocks.append(ResidualBlock(weight, bias))
    return tuple(blocks)


def check_fit(heads: ResidualHeads, *, hidden_size: int, vocab_size: int, where: str) -> None:
    """Raises :class:`HeadsError` when heads can't be used, or not with a backbone of this size."""
    check_head_count(heads.num_heads, where)
    if heads.hidden_size != hidden_size:
        raise HeadsError(f"{where}: heads are for hidden size {heads.hidden_size}, the backbone has {hidden_size}")
    ids = heads.token_ids
    if ids is None:
        if heads.draft_vocab_size not in (None, vocab_size):
            raise HeadsError(
                f"{where}: heads are for a vocabulary of {heads.draft_vocab_size}, the backbone has {vocab_size}"
                + (" (a truncated vocabulary needs a token_map)" if (heads.draft_vocab_size or 0) < vocab_size else "")
            )
    elif int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != len(ids):
        raise HeadsError(f"{where}: token_map must hold different tokens of the backbone's vocabulary of {vocab_size}")
