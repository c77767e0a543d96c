"""How programs from Debian's archive get into the cache: with a stand-in for apt-get, and once for real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import debian
from tests.support.paths import ROOT

# Like apt-get on a machine without package lists: it downloads only after an update into lists of one's own.
APT = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
  *Dir::State::lists*update*) exit 0 ;;
  *Dir::State::lists*download*) cp {deb} . ;;
  *) echo "E: Unable to locate package" >&2; exit 100 ;;
esac
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A folder for PATH whose apt-get knows one package, with one program in it."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb to make a package with")
    content = tmp_path / "content"
    (content / "DEBIAN").mkdir(parents=True)
    (content / "DEBIAN" / "control").write_text(
        "Package: prometheus\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: none\n"
    )
    (content / "usr" / "bin").mkdir(parents=True)
    program = content / "usr" / "bin" / "promtool"
    program.write_text('#!/bin/sh\necho "$$ $*"\n')
    program.chmod(0o755)
    (content / "DEBIAN").chmod(0o755)
    subprocess.run(["dpkg-deb", "-b", str(content), str(tmp_path / "it.deb")], check=True, capture_output=True)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "apt-get").write_text(APT.format(log=tmp_path / "log", deb=tmp_path / "it.deb"))
    (folder / "apt-get").chmod(0o755)
    return folder


def run(archive: Path, *names: str) -> subprocess.CompletedProcess[str]:
    # Without this machine's own prometheus, if it has one; dpkg itself needs tar, and both lie in the system's folders.
    path = f"{archive}:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(archive.parent / "cache")}
    command = [sys.executable, "-m", "tests.support.debian", *names]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.path.exists("/usr/bin/promtool"), reason="this system's own promtool comes first")
def test_many_processes_fetch_once(archive: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: run(archive, "promtool"), range(4)))
    assert [each.returncode for each in outcomes] == [0] * 4, outcomes
    asked = (archive.parent / "log").read_text().splitlines()
    assert [line.split()[-1] for line in asked if "download" in line] == ["prometheus"] * 2, "without lists, and with"
    launcher = outcomes[0].stdout.split(": ", 1)[1].strip()
    started = subprocess.Popen([launcher, "one two", "*"], stdout=subprocess.PIPE, text=True)
    assert started.communicate()[0] == f"{started.pid} one two *\n", "the launcher becomes the program"


def test_what_can_not_be_had_is_told(archive: Path) -> None:
    (archive.parent / "it.deb").unlink()
    outcome = run(archive, "haproxy")
    assert outcome.returncode == 1
    assert outcome.stderr.startswith("haproxy: not on PATH, and fetching Debian's package haproxy failed: cp: ")
    assert list((archive.parent / "cache" / "medusa-gateway" / "debian-programs").glob("haproxy*")) == [], (
        "nothing half done"
    )
    assert run(archive, "nonsense").returncode == 2


def test_a_program_on_path_comes_first(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = archive / "alertmanager"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(archive))
    assert debian.find("prometheus-alertmanager") == own


@pytest.mark.parametrize("name", ["promtool", "haproxy"])
def test_the_real_thing_runs(name: str) -> None:
    option = "--version" if name == "promtool" else "-v"
    done = subprocess.run([debian.binary(name), option], capture_output=True, text=True, check=True)
    assert "version" in done.stdout + done.stderr
