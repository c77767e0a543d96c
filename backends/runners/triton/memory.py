"""How many tokens' keys and values fit on a device. Free of triton and torch."""

from __future__ import annotations

from dataclasses import dataclass

from backends.runners.batch import PAGE_SIZE

# Of what is free behind weights and buffers; the rest is for CUDA itself, graphs, heads and fragments.
KV_SHARE = 0.9
_GIB = 1 << 30


class DeviceTooSmall(ValueError):
    """A model does not fit on a device; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Bytes: ``free`` on the device now, ``weights`` and ``buffers`` still to come, ``per_token`` of keys and
    values."""

    free: int
    weights: int
    buffers: int
    per_token: int

    def kv_tokens(self, longest: int, most: int) -> int:
        """Whole pages of tokens, ``most`` at most. Raises :class:`DeviceTooSmall` unless one sequence of ``longest``
        tokens fits."""
        left = self.free - self.weights - self.buffers
        fitting = max(0, int(left * KV_SHARE)) // self.per_token // PAGE_SIZE * PAGE_SIZE
        if fitting < longest:
            raise DeviceTooSmall(
                f"the device has {_gib(self.free)} free; weights take {_gib(self.weights)}, buffers "
                f"{_gib(self.buffers)}, and of the rest {KV_SHARE:.0%} hold {fitting} tokens of "
                f"{self.per_token / 1024:.0f} KiB: too few for a context of {longest}. Take a smaller context "
                "(--max-model-len) or a device with more memory"
            )
        return min(fitting, -(-most // PAGE_SIZE) * PAGE_SIZE)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"


def buffer_bytes(
    *,
    max_rows: int,
    max_context: int,
    hidden: int,
    inner: int,
    heads: int,
    head_size: int,
    vocab: int,
    itemsize: int,
    splits: int,
) -> int:
    """What a runner of these sizes keeps beside weights and pools, its small buffers left out."""
    activations = itemsize * (3 * hidden + 4 * heads * head_size + inner)
    pieces = 4 * splits * heads * (head_size + 2)
    partial = 4 * 8 * hidden
    return max_rows * (activations + pieces + partial + 4 * vocab) + 4 * max_context * head_size
