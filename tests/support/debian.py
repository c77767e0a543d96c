"""Programs from Debian's archive for tests and demos, without root and without touching the system.

``binary("promtool")`` gives a path: of the program on PATH if there is one, else of a copy that was downloaded by
``apt-get download`` and unpacked by ``dpkg -x`` into the user's cache, once per machine. Shared libraries that the
system lacks are unpacked beside it. ``python -m tests.support.debian NAME...`` fetches ahead of time and prints the
paths.

Not covered: systems without apt and dpkg; there :class:`Unavailable` says so and tests skip.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import platformdirs

PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
    "haproxy": "haproxy",
    "nginx": "nginx",
    "chromium": "chromium",
}
"""The package that holds each program."""
_OTHER_NAMES = {"prometheus-alertmanager": ("alertmanager",)}
_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin")
_DATA = {"prometheus-alertmanager": "/usr/share/prometheus/alertmanager"}
"""Folders that a program looks for by a path built into it. In the cached copy that becomes the path of an open file
descriptor, as long as it was, and the launcher opens the folder as that."""
_DATA_DESCRIPTOR = 9
_MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
# No sandbox user: as root, apt would otherwise want its own user to be able to write into the folder.
_APT_OPTIONS = ("APT::Sandbox::User=root", "Acquire::Retries=2", "Acquire::http::Timeout=20")
_PATIENCE_S = 300.0


class Unavailable(Exception):
    """The program can't be had here; the message says why."""


def binary(name: str) -> Path:
    """The program, or ``pytest.skip`` with the reason why there is none."""
    try:
        return find(name)
    except Unavailable as error:
        import pytest

        pytest.skip(f"{name}: {error}")


def find(name: str) -> Path:
    """The program. Raises :class:`Unavailable`; a failure is remembered for the life of the process.

    Raises KeyError for a program that :data:`PACKAGES` doesn't know. Safe to call from many processes at once.
    """
    package = PACKAGES[name]
    for each in (name, *_OTHER_NAMES.get(name, ())):
        if found := shutil.which(each):
            return Path(found)
    reason = _fetch(package, cache_folder())
    if reason is not None:
        raise Unavailable(reason)
    launcher = cache_folder() / package / "launchers" / name
    if not launcher.exists():
        raise Unavailable(f"Debian's package {package} holds no program of this name")
    return launcher


def cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("medusa-gateway")) / "debian-programs"


@functools.cache
def _fetch(package: str, cache: Path) -> str | None:
    """Put the package into the cache, unless it is there. The reason why that can't be done, or None."""
    target = cache / package
    if target.exists():
        return None
    lacking = [tool for tool in ("apt-get", "dpkg") if shutil.which(tool) is None]
    if lacking:
        return f"not on PATH, and this system has no {' and no '.join(lacking)} to fetch it with"
    try:
        with _locked(cache):
            if not target.exists():
                _install(package, target, Apt(cache / "apt"))
    except (OSError, subprocess.SubprocessError) as error:
        return f"not on PATH, and fetching Debian's package {package} failed: {_told(error)}"
    return None


def _install(package: str, target: Path, apt: Apt) -> None:
    # Under another name until it is whole: what has the right name is complete.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{package}.") as scratch:
        work = Path(scratch) / "package"
        root = work / "root"
        _unpack(apt.download([package], Path(scratch) / "debs"), root)
        programs = [each for folder in _FOLDERS for each in root.glob(f"{folder}/*") if os.access(each, os.X_OK)]
        if any(_missing_libraries(each, root) for each in programs):
            libraries = [name for name in apt.not_installed(package) if name.startswith("lib") and name != package]
            _unpack(apt.download(libraries, Path(scratch) / "libraries"), root)
        for each in programs:
            if lacking := _missing_libraries(each, root):
                raise OSError(f"{each.name} lacks {', '.join(lacking)}")
        launchers = work / "launchers"
        launchers.mkdir()
        data = _DATA.get(package)
        for each in programs:
            if data is not None:
                _redirect(each, data)
            opened = None if data is None else target / "root" / data.lstrip("/")
            _write_launcher(launchers / each.name, target / each.relative_to(work), target / "root", opened)
        work.rename(target)


def _redirect(program: Path, folder: str) -> None:
    new = f"/proc/self/fd/{_DATA_DESCRIPTOR}".ljust(len(folder), "/")
    assert len(new) == len(folder)
    program.write_bytes(program.read_bytes().replace(folder.encode(), new.encode()))


def _write_launcher(path: Path, program: Path, root: Path, data: Path | None) -> None:
    """A script that becomes the program (same pid), with the unpacked libraries behind the system's own."""
    within = path.parent.parent / "root"
    folders = [str(root / folder.relative_to(within)) for folder in _library_folders(within)]
    lines = ["#!/bin/sh"]
    if folders:
        lines.append(
            f'export LD_LIBRARY_PATH="${{LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}}"{shlex.quote(":".join(folders))}'
        )
    if data is not None:
        lines.append(f"exec {_DATA_DESCRIPTOR}<{shlex.quote(str(data))}")
    lines.append(f'exec {shlex.quote(str(program))} "$@"')
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)


def _library_folders(root: Path) -> list[Path]:
    return sorted({each.parent for lib in ("lib", "usr/lib") for each in (root / lib).rglob("*.so*") if each.is_file()})


def _missing_libraries(program: Path, root: Path) -> list[str]:
    """Shared libraries that ``program`` would not find; none for scripts and static programs."""
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, _library_folders(root)))}
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, env=environment, check=False)
    return _MISSING.findall(listed.stdout)


def _unpack(archives: Sequence[Path], root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for each in archives:
        _run(["dpkg", "-x", str(each), str(root)])


class Apt:
    """apt-get with the system's package lists, or with its own in ``state`` where the system has none.

    Fresh container images come without lists, and only root may fetch them for the system.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._private = False

    def download(self, packages: Sequence[str], folder: Path) -> list[Path]:
        """The .deb files, in ``folder``, which is made."""
        folder.mkdir(parents=True)
        if packages:
            self._call(["download", *packages], folder)
        return sorted(folder.glob("*.deb"))

    def not_installed(self, package: str) -> list[str]:
        """What installing ``package`` would bring with it."""
        plan = self._call(["--simulate", "--no-install-recommends", "install", package], self._state.parent)
        return re.findall(r"^Inst (\S+) ", plan, re.MULTILINE)

    def _call(self, arguments: Sequence[str], folder: Path) -> str:
        if not self._private:
            try:
                return self._apt(arguments, folder)
            except subprocess.CalledProcessError:
                # No lists, or lists so old that the archive has dropped what they name.
                self._update()
        return self._apt(arguments, folder)

    def _update(self) -> None:
        for name in ("lists/partial", "cache/archives/partial"):
            (self._state / name).mkdir(parents=True, exist_ok=True)
        self._private = True
        self._apt(["update"], self._state)

    def _apt(self, arguments: Sequence[str], folder: Path) -> str:
        options = [*_APT_OPTIONS]
        if self._private:
            options += [f"Dir::State::lists={self._state}/lists", f"Dir::Cache={self._state}/cache"]
        return _run(["apt-get", "-q", *(word for each in options for word in ("-o", each)), *arguments], folder)


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One process at a time. The kernel gives the lock back when its holder dies."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=True
    )
    return done.stdout


def _told(error: BaseException) -> str:
    lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
    return " ".join(" ".join(lines[-2:]).split())[:300] if lines else type(error).__name__


def main(names: Sequence[str]) -> int:
    """Fetch and print; status 1 when anything can't be had."""
    status = 0
    for name in names or PACKAGES:
        if name not in PACKAGES:
            print(f"{name}: not known here; there are {', '.join(PACKAGES)}", file=sys.stderr)
            status = 2
            continue
        try:
            print(f"{name}: {find(name)}")
        except Unavailable as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
