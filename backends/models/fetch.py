"""Bring a model and its heads onto this machine without loading them: for init containers and image builds.

What comes from the hub goes into its usual cache (``HF_HOME``, else ``XDG_CACHE_HOME``), where ``serve`` finds it
again, also with ``HF_HUB_OFFLINE=1``. Torch is needed only to convert the demo model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from backends.models.demo import prepare_demo_model

_UNREAD = ("*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.tflite", "*.gguf", "original/*", "onnx/*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class FetchError(RuntimeError):
    """A model or heads can't be brought; the message says why."""


def fetch_model(name: str | None) -> Path:
    """The folder of ``name``: a local folder, a hub id, or None for the demo model.

    Other frameworks' weights are left out, and pickles where there are safetensors. Raises :class:`FetchError`.
    """
    if name is None:
        return prepare_demo_model()
    folder = _fetch(name, leave_out=(*_UNREAD, *_PICKLES))
    if any(folder.glob("*.safetensors")):
        return folder
    return _fetch(name, leave_out=_UNREAD)


def fetch_heads(name: str) -> Path:
    """As :func:`fetch_model`; heads come in many formats, so every file is brought."""
    return _fetch(name)


def _fetch(name: str, leave_out: Sequence[str] = ()) -> Path:
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith("."):
        raise FetchError(f"{name} is no folder")

    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=list(leave_out)))
    except Exception as error:  # what the hub's client raises comes from several libraries
        raise FetchError(f"{name} can't be brought from the hub: {error}") from error
