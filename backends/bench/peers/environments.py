"""One virtual environment for each peer, so that what one of them wants never meets what another wants.

``python -m backends.bench.peers.environments [NAME ...]`` (``make peers``) makes them; those that are up to date are
left alone, and one that can't be made is told of and doesn't stop the others.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs

_ASSETS = Path(__file__).parent.parent.parent / "assets" / "peers"
_STAMP = ".made-from"


ENVIRONMENTS = ("llama-cpp", "openvino", "vllm", "aiperf")
"""The last is no peer: it sends the requests of ``bench load``."""


def _checked(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def peers_folder() -> Path:
    """Where environments and converted weights are kept."""
    return Path(platformdirs.user_cache_dir("medusa-gateway")) / "peers"


def python_of(name: str, folder: Path) -> Path | None:
    """The interpreter of a peer's environment; None when it is not made, or was made from other requirements."""
    python = folder / name / "bin" / "python"
    try:
        current = (folder / name / _STAMP).read_text() == _wanted(name)
    except OSError:
        return None
    return python if current and python.exists() else None


def make_environment(name: str, folder: Path, run: Callable[[Sequence[str]], object] = _checked) -> None:
    """Make or renew it. Raises OSError or subprocess.CalledProcessError when that fails; nothing half made counts."""
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(place)])
    # Requirements are complete, and without what vLLM pulls and breaks on (torchvision and its like).
    run([str(place / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", "-r", str(requirements(name))])
    (place / _STAMP).write_text(_wanted(name))


def requirements(name: str) -> Path:
    return _ASSETS / f"{name}.txt"


def _wanted(name: str) -> str:
    return hashlib.sha256(requirements(name).read_bytes()).hexdigest()


def main(names: Sequence[str]) -> int:
    """Exit status: 1 when any could not be made."""
    folder, failed = peers_folder(), False
    for name in names or ENVIRONMENTS:
        if python_of(name, folder) is not None:
            print(f"{name}: as wanted, in {folder / name}")
            continue
        print(f"{name}: being made in {folder / name}", flush=True)
        try:
            make_environment(name, folder)
        except (OSError, subprocess.CalledProcessError) as error:
            failed = True
            print(f"{name}: could not be made, bench peers will skip it: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
