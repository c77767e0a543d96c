"""Medusa heads: the torch module, and the project's own checkpoint format (``medusa-gateway/1``).

A checkpoint is a folder with ``config.json`` and ``medusa_heads.safetensors``:

==================== ============================ ==================================================================
tensor               shape                        meaning
==================== ============================ ==================================================================
``up.weight``        [heads, inner, input]        input is H ("hidden") or 2H ("hidden+token")
``up.bias``          [heads, inner]
``down.weight``      [heads, H, inner]
``draft_token_ids``  [draft vocabulary] int32     optional, ascending; absent: the whole vocabulary
==================== ============================ ==================================================================

Head ``i`` (counted from 0) guesses the token at position ``t + 2 + i`` from the backbone's final-norm hidden state at
position ``t``; position ``t + 1`` is the *pending* token, sampled but not yet run through the backbone. Unlike the
heads of the Medusa paper (Cai et al., 2024, section 2.1) the block also sees the pending token's input embedding, known
before anything is drafted (the idea of Hydra, Ankner et al., 2024, without its sequential part), and the output
projection is the backbone's own ``lm_head``, cut down to frequent tokens (FR-Spec, Zhao et al., 2025).

``medusa-gateway/2`` has the same tensors for *sequential* heads (Hydra's sequential part; as in EAGLE, Li et al., 2024,
a chain of states, but without attention): head ``i`` is fed the state of head ``i - 1`` and the embedding of the token
chosen from it instead of the backbone's state and the pending token.

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
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from backends.tree import MAX_DEPTH

FORMAT = "medusa-gateway/1"
SEQUENTIAL_FORMAT = "medusa-gateway/2"
GENERAL_FORMAT = "medusa-gateway/3"
FORMATS = (FORMAT, SEQUENTIAL_FORMAT, GENERAL_FORMAT)
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "medusa_heads.safetensors"

_FURTHER = re.compile(r"^further\.\d+\.up\.weight$")

HeadInput = Literal["hidden", "hidden+token"]


class HeadsError(ValueError):
    """Heads that can't be used with this backbone; the message says why."""


def check_head_count(count: int, where: str) -> None:
    """Raises :class:`HeadsError` for no heads, or more than a step can verify."""
    if not 1 <= count <= MAX_DEPTH:
        raise HeadsError(
            f"{where}: {count} heads; from 1 to {MAX_DEPTH} can be used, for a step verifies no deeper tree"
        )


class MedusaHeads(nn.Module):
    """All heads of one backbone, stacked so that one batched product evaluates them.

    ``h = x + W_down silu(W_up [x / rms(x); e / rms(e)] + b_up)`` for every head, with ``x`` the hidden state and ``e``
    the embedding of the pending token; with several ``layers`` the next such block takes ``h`` for ``x``. ``W_down``
    starts at zero: an untrained head says what ``lm_head`` says.

    ``output_rows`` [V', H] (what the heads' own output layers start from): give every head an output layer of its own
    instead of ``lm_head``.
    """

    draft_token_ids: torch.Tensor | None
    output: _StackedLinear | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        inner_size: int,
        *,
        head_input: HeadInput = "hidden+token",
        sequential: bool = False,
        draft_token_ids: torch.Tensor | None = None,
        layers: int = 1,
        output_rows: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        check_head_count(num_heads, "MedusaHeads")
        if sequential and head_input != "hidden+token":
            raise ValueError('sequential heads need head_input "hidden+token"')
        self.hidden_size = hidden_size
        self.sequential = sequential
        self.head_input: HeadInput = head_input
        input_size = hidden_size * (2 if head_input == "hidden+token" else 1)
        self.up = _StackedLinear(num_heads, input_size, inner_size, bias=True)
        self.down = _StackedLinear(num_heads, inner_size, hidden_size, bias=False)
        self.further = nn.ModuleList(_Block(num_heads, input_size, inner_size, hidden_size) for _ in range(layers - 1))
        self.output = None
        if output_rows is not None:
            self.output = _StackedLinear(num_heads, hidden_size, len(output_rows), bias=False)
            with torch.no_grad():
                self.output.weight.copy_(output_rows)
        self.register_buffer("draft_token_ids", draft_token_ids)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for up, down in self.blocks:
            bound = up.weight.shape[2] ** -0.5
            nn.init.uniform_(up.weight, -bound, bound)
            assert up.bias is not None
            nn.init.zeros_(up.bias)
            nn.init.zeros_(down.weight)

    @property
    def blocks(self) -> list[tuple[_StackedLinear, _StackedLinear]]:
        """``W_up`` and ``W_down`` of each layer, of all heads."""
        return [(self.up, self.down), *((block.up, block.down) for block in self.further)]  # type: ignore[list-item]

    @property
    def layers(self) -> int:
        return 1 + len(self.further)

    @property
    def own_output(self) -> bool:
        return self.output is not None

    @property
    def num_heads(self) -> int:
        return self.up.weight.shape[0]

    @property
    def inner_size(self) -> int:
        return self.up.weight.shape[1]

    def block_input(self, hidden: torch.Tensor, pending_embedding: torch.Tensor) -> torch.Tensor:
        """What ``W_up`` is fed: [..., n, input] of ``hidden`` [..., n, H] and ``pending_embedding`` [n, H]."""
        normed = F.rms_norm(hidden, (self.hidden_size,), eps=1e-6)
        if self.head_input == "hidden":
            return normed
        token = F.rms_norm(pending_embedding, (self.hidden_size,), eps=1e-12)
        return torch.cat([normed, token.expand_as(normed)], dim=-1)

    def propose_hidden(
        self, hidden: torch.Tensor, pending_embedding: torch.Tensor, dropout: float = 0.0
    ) -> torch.Tensor:
        """Hidden states whose ``lm_head`` logits are the heads' guesses.

        ``hidden`` [n, H]: final-norm states; ``pending_embedding`` [n, H]: input embeddings of the token after each
        (ignored by heads of input "hidden"). Returns [heads, n, H] in the dtype of ``hidden``.
        """
        states = hidden
        for up, down in self.blocks:
            inputs = self.block_input(states, pending_embedding).expand(self.num_heads, -1, -1)
            inner = F.dropout(F.silu(up(inputs)), dropout, training=self.training)
            states = states + down(inner)
        return states

    def follow_hidden(
        self, head: int, state: torch.Tensor, embedding: torch.Tensor, dropout: float = 0.0
    ) -> torch.Tensor:
        """One sequential head: the state of the head before (``hidden`` for the first) and the embedding of the token
        chosen from it (the pending token for the first), both [n, H] -> this head's state [n, H]."""
        for up, down in self.blocks:
            inner = F.silu(up.of_head(head, self.block_input(state, embedding)))
            state = state + down.of_head(head, F.dropout(inner, dropout, training=self.training))
        return state

    def path_hidden(self, hidden: torch.Tensor, embeddings: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """States of all heads when the tokens on the path are known (in training).

        ``hidden`` [n, H]; ``embeddings`` [heads, n, H]: of the pending token and the tokens after it; heads that are
        not sequential use the first only. Returns [heads, n, H].
        """
        if not self.sequential:
            return self.propose_hidden(hidden, embeddings[0], dropout)
        states, state = [], hidden
        for head in range(self.num_heads):
            state = self.follow_hidden(head, state, embeddings[head], dropout)
            states.append(state)
        return torch.stack(states)

    def logits(self, states: torch.Tensor, lm_head_rows: torch.Tensor) -> torch.Tensor:
        """What all heads say: ``states`` [heads, n, H] -> [heads, n, V'] float32. ``lm_head_rows`` [V', H] of the draft
        vocabulary: for heads without output layers of their own."""
        if self.output is not None:
            return self.output(states).float()
        return F.linear(states.to(lm_head_rows.dtype), lm_head_rows).float()

    forward = propose_hidden


class _Block(nn.Module):
    """A residual block of every head after its first."""

    def __init__(self, num_heads: int, input_size: int, inner_size: int, hidden_size: int) -> None:
        super().__init__()
        self.up = _StackedLinear(num_heads, input_size, inner_size, bias=True)
        self.down = _StackedLinear(num_heads, inner_size, hidden_size, bias=False)


class _StackedLinear(nn.Module):
    """One linear layer per head: [heads, n, in] -> [heads, n, out]."""

    bias: nn.Parameter | None

    def __init__(self, num_heads: int, input_size: int, output_size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, output_size, input_size))
        self.bias = nn.Parameter(torch.empty(num_heads, output_size)) if bias else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(inputs.dtype).transpose(1, 2)
        if self.bias is None:
            return torch.bmm(inputs, weight)
        return torch.baddbmm(self.bias.to(inputs.dtype).unsqueeze(1), inputs, weight)

    def of_head(self, head: int, inputs: torch.Tensor) -> torch.Tensor:
        """One head alone: [n, in] -> [n, out]."""
        bias = None if self.bias is None else self.bias[head].to(inputs.dtype)
        return F.linear(inputs, self.weight[head].to(inputs.dtype), bias)


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
