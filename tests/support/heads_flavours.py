"""Checkpoints of every flavour, made tensor by tensor under the names and shapes that other projects write.

Each comes with its logits as the formula of its project gives them from the raw tensors, with nothing of ours between.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from backends.heads.format import save_heads
from backends.heads.module import MedusaHeads

HIDDEN, VOCAB = 64, 260
# hidden [n, H], lm_head [V, H], embedding of the pending token [n, H] -> one [n, V'] for each head
Reference = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class Made:
    heads: int
    layers: int
    flavour: str
    reference: Reference
    token_ids: list[int] | None = None


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.3


def _block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    inner = x @ weight.T
    inner = inner if bias is None else inner + bias
    return x + inner * torch.sigmoid(inner)


def _fasterdecoding(
    heads: int, layers: int, *, own: bool, vocab: int = VOCAB, prefix: str = ""
) -> tuple[dict[str, torch.Tensor], Reference]:
    tensors: dict[str, torch.Tensor] = {}
    for h in range(heads):
        for layer in range(layers):
            tensors[f"{prefix}{h}.{layer}.linear.weight"] = _rand(HIDDEN, HIDDEN)
            tensors[f"{prefix}{h}.{layer}.linear.bias"] = _rand(HIDDEN)
        if own:
            tensors[f"{prefix}{h}.{layers}.weight"] = _rand(vocab, HIDDEN)

    def reference(hidden: torch.Tensor, lm_head: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for h in range(heads):
            x = hidden
            for layer in range(layers):
                name = f"{prefix}{h}.{layer}.linear"
                x = _block(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
            found.append(x @ (tensors[f"{prefix}{h}.{layers}.weight"] if own else lm_head).T)
        return found

    return tensors, reference


def _config(folder: Path, **settings: object) -> None:
    (folder / "config.json").write_text(json.dumps(settings))


def v1(folder: Path, heads: int = 5, layers: int = 1, vocab: int = VOCAB) -> Made:
    """As FasterDecoding publishes them: five heads, and a config that says two."""
    tensors, reference = _fasterdecoding(heads, layers, own=True, vocab=vocab)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    _config(folder, medusa_num_heads=2, medusa_num_layers=layers, base_model_name_or_path="lmsys/vicuna-7b-v1.3")
    return Made(heads, layers, "fasterdecoding-v1", reference)


def v1_deep(folder: Path) -> Made:
    return v1(folder, heads=2, layers=3)


def v1_data_parallel(folder: Path) -> Made:
    """As torch's DataParallel and torch.compile name what they wrap."""
    tensors, reference = _fasterdecoding(3, 1, own=True)
    torch.save({f"module._orig_mod.{name}": value for name, value in tensors.items()}, folder / "medusa_lm_head.pt")
    return Made(3, 1, "fasterdecoding-v1", reference)


def v1_sharded_pickles(folder: Path) -> Made:
    tensors, reference = _fasterdecoding(3, 1, own=True, prefix="medusa_head.")
    parts = {
        "pytorch_model-00001-of-00002.bin": list(tensors)[:5],
        "pytorch_model-00002-of-00002.bin": list(tensors)[5:],
    }
    for name, names in parts.items():
        torch.save({key: tensors[key] for key in names}, folder / name)
    index = {key: name for name, names in parts.items() for key in names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return Made(3, 1, "fasterdecoding-v1", reference)


def modelopt(folder: Path, heads: int = 3, layers: int = 2) -> Made:
    tensors, reference = _fasterdecoding(heads, layers, own=True)
    renamed = {}
    for name, value in tensors.items():
        h, layer, rest = name.split(".", 2)
        renamed[f"medusa_heads.{h}." + (f"medusa_layers.{layer}.{rest}" if "linear" in rest else "lm_head.weight")] = (
            value
        )
    save_file(renamed, folder / "model.safetensors")
    return Made(heads, layers, "modelopt", reference)


def v1_linear(folder: Path) -> Made:
    """No blocks: the head is its projection."""
    return v1(folder, heads=2, layers=0)


def v2(folder: Path) -> Made:
    tensors, reference = _fasterdecoding(3, 1, own=False)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    _config(folder, medusa_num_heads=3, medusa_num_layers=1, version="2", base_model_name_or_path="org/base")
    return Made(3, 1, "fasterdecoding-v2", reference)


def merged(folder: Path) -> Made:
    """Heads of a whole model's files, in two shards; the backbone's tensors are those of another model."""
    tensors, reference = _fasterdecoding(4, 1, own=True, prefix="medusa_head.")
    backbone = {"model.embed_tokens.weight": _rand(VOCAB, HIDDEN), "model.norm.weight": _rand(HIDDEN)}
    shards = {
        "model-00001-of-00002.safetensors": backbone | dict(list(tensors.items())[:5]),
        "model-00002-of-00002.safetensors": dict(list(tensors.items())[5:]),
    }
    for name, shard in shards.items():
        save_file(shard, folder / name)
    index = {key: name for name, shard in shards.items() for key in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    _config(folder, medusa_num_heads=4, model_type="llama")
    return Made(4, 1, "merged", reference)


def _vllm(
    folder: Path,
    *,
    prefix: str = "",
    bias: bool = False,
    rows: int = VOCAB,
    shared: bool = False,
    ids: list[int] | None,
) -> Made:
    heads, layers = 3, 2
    tensors: dict[str, torch.Tensor] = {}
    for h in range(heads):
        for layer in range(layers):
            tensors[f"{prefix}blocks.{h}.layers.{layer}.weight"] = _rand(HIDDEN, HIDDEN)
            if bias:
                tensors[f"{prefix}blocks.{h}.layers.{layer}.bias"] = _rand(HIDDEN)
        if h == 0 or not shared:
            tensors[f"{prefix}lm_heads.{h}.weight"] = _rand(rows, HIDDEN)
    if ids is not None:
        tensors[f"{prefix}token_map"] = torch.tensor(ids)
    save_file(tensors, folder / "model.safetensors")
    _config(
        folder,
        model_type="medusa",
        num_heads=heads,
        num_hidden_layers=layers,
        vocab_size=VOCAB,
        truncated_vocab_size=len(ids or range(VOCAB)),
        original_lm_head=shared,
        medusa_fc_bias=bias,
    )

    def reference(hidden: torch.Tensor, _: torch.Tensor, __: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for h in range(heads):
            x = hidden
            for layer in range(layers):
                name = f"{prefix}blocks.{h}.layers.{layer}"
                x = _block(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
            weight = tensors[f"{prefix}lm_heads.{0 if shared else h}.weight"]
            found.append(x @ (weight[torch.tensor(ids)] if ids is not None and rows == VOCAB else weight).T)
        return found

    return Made(heads, layers, "vllm", reference, ids)


IDS = [7, 3, 250, 99, *range(110, 190)]


def vllm(folder: Path) -> Made:
    return _vllm(folder, ids=None)


def vllm_prefixed_with_bias(folder: Path) -> Made:
    return _vllm(folder, prefix="medusa_heads.", bias=True, ids=None)


def vllm_reduced(folder: Path) -> Made:
    return _vllm(folder, rows=len(IDS), ids=IDS)


def vllm_cut_at_load(folder: Path) -> Made:
    """Projections onto the whole vocabulary beside a token map: vLLM cuts them when it loads."""
    return _vllm(folder, shared=True, ids=IDS)


def own(folder: Path) -> Made:
    ids = [1, 5, 40, *range(60, 140)]
    heads = MedusaHeads(HIDDEN, 3, 32, draft_token_ids=torch.tensor(ids, dtype=torch.int32))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(_rand(*parameter.shape).to(torch.bfloat16))
    save_heads(heads, folder, config={"backbone": {"name": "t", "hidden_size": HIDDEN, "vocab_size": VOCAB}})
    up, bias, down = (t.detach() for t in (heads.up.weight, heads.up.bias, heads.down.weight) if t is not None)

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()

    def reference(hidden: torch.Tensor, lm_head: torch.Tensor, pending: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for h in range(3):
            inner = torch.cat([rms(hidden), rms(pending)], -1) @ up[h].T + bias[h]
            found.append((hidden + (inner * torch.sigmoid(inner)) @ down[h].T) @ lm_head[ids].T)
        return found

    return Made(3, 1, "medusa-gateway/1", reference, ids)


FLAVOURS = (
    v1,
    v1_deep,
    v1_data_parallel,
    v1_sharded_pickles,
    v1_linear,
    v2,
    merged,
    modelopt,
    vllm,
    vllm_prefixed_with_bias,
    vllm_reduced,
    vllm_cut_at_load,
    own,
)
