"""Which transformers models this engine can run, and why it refuses the others.

Two looks at a model. :func:`refusal` reads its configuration, before weights are loaded. :func:`check_attention` sees
which of its layers really called the engine's attention, and with what. What neither knows of shows in the logits:
:mod:`backends.runners.hf` compares them with the model's own forward when it takes a model over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class UnsupportedModel(ValueError):
    """The model can't be run by this engine; the message says why."""


# Attention over all earlier positions, or over the last ones of them. Others keep a state that candidates would spoil,
# or see by rules of their own.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_STATEFUL = frozenset(
    {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "jamba", "zamba", "zamba2", "bamba", "lfm2"}
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# These rotary embeddings change with the longest position in the step, so a row would depend on its company.
_GROWING_ROPE = frozenset({"dynamic", "longrope"})


def refusal(config: Any, max_context: int | None = None) -> str | None:
    """Why a model of this configuration can't be run here; None when nothing speaks against it.

    ``max_context``: the longest sequence that will be served; None: all that the model can.
    """
    text = config.get_text_config()
    kind = text.model_type
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        return f"{kind} is an encoder-decoder model; only decoder-only models are run"
    layers = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES)
    if layers or kind in _STATEFUL:
        what = f"layers of type {', '.join(layers)}" if layers else "a recurrent state"
        return f"{kind} has {what}; only full and sliding attention are run, since candidates must leave no trace"
    if any(_count(getattr(text, name, 0)) > 1 for name in _EXPERTS):
        return f"{kind} is a mixture of experts: what an expert computes for a row depends on the rows beside it"
    if getattr(text, "alibi", False) or kind in ("bloom", "mpt"):
        return f"{kind} uses ALiBi position biases, which are not supported"
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", False):
        return f"{kind} attends in both directions; only causal attention is run"
    for rope in _rope_parameters(text):
        short = rope.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", 0)
        longest = max_context or getattr(text, "max_position_embeddings", short)
        if rope.get("rope_type") in _GROWING_ROPE and longest > short:
            return (
                f"{kind} has {rope['rope_type']} rotary embeddings, which change with the longest sequence in a batch "
                f"once it passes {short} tokens; serve it with a context (max_model_len) of at most {short}"
            )
    return None


def _count(value: Any) -> int:
    return max(value, default=0) if isinstance(value, (list, tuple)) else value or 0


def _rope_parameters(text: Any) -> Iterable[dict[str, Any]]:
    """One set for all layers, or one for each type of layer."""
    found = getattr(text, "rope_parameters", None) or {}
    return [found] if "rope_type" in found else [each for each in found.values() if isinstance(each, dict)]


def check_interface(model: Any) -> None:
    """Raises :class:`UnsupportedModel` when the model's attention can't be replaced."""
    kind = model.config.get_text_config().model_type
    if not type(model)._can_set_attn_implementation():
        raise UnsupportedModel(f"{kind}: its attention does not go through transformers' attention interface")
    if getattr(model, model.base_model_prefix, None) is None or model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{kind}: no separate base model and lm_head")


def check_attention(config: Any, seen: Iterable[int], foreign: Iterable[str]) -> None:
    """Raises :class:`UnsupportedModel` for a model some of whose layers did not call the attention function.

    ``seen``: indices of the layers that did; ``foreign``: arguments that it was given and does not know.
    """
    text = config.get_text_config()
    if unknown := sorted(set(foreign)):
        raise UnsupportedModel(f"{text.model_type}: its attention takes {', '.join(unknown)}, which is not supported")
    missing = sorted(set(range(text.num_hidden_layers)) - set(seen))
    if missing:
        raise UnsupportedModel(
            f"{text.model_type}: {len(missing)} of {text.num_hidden_layers} layers (first: {missing[0]}) do not go "
            "through transformers' attention interface"
        )
