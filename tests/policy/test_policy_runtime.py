"""The policy file under a running gateway: edits, broken edits, and every way in which a file gets replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from policy.config.problems import PolicyError
from policy.runtime import PolicyRuntime

GOOD = b"version: 1\ndefaults: {heads: 2}\n"
BETTER = b"version: 1\ndefaults: {heads: 3}\n"
BROKEN = b"version: 1\ndefaults: {heads: 0}\n"


def heads(runtime: PolicyRuntime) -> int:
    return runtime.spec.of_class("code").heads.high


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_bytes(GOOD)
    return path


def settle(runtime: PolicyRuntime, at: float = 1.0) -> str:
    assert runtime.poll(at) == "settling"
    return runtime.poll(at)


def test_an_edit_in_place_of_the_same_size_and_time(path: Path) -> None:
    runtime = PolicyRuntime.open(path)
    before = path.stat()
    assert runtime.poll(1.0) == "unchanged"
    path.write_bytes(BETTER)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_ino == before.st_ino
    assert settle(runtime, 5.0) == "accepted"
    assert (heads(runtime), runtime.status.accepted, runtime.status.loaded_at) == (3, 2, 5.0)
    assert runtime.status.version == runtime.spec.version
    assert runtime.poll(6.0) == "unchanged"


def test_a_file_renamed_over_it(path: Path, tmp_path: Path) -> None:
    runtime = PolicyRuntime.open(path)
    new = tmp_path / "new"
    new.write_bytes(BETTER)
    new.rename(path)
    assert settle(runtime) == "accepted"
    assert heads(runtime) == 3


def test_a_configmap_swap(tmp_path: Path) -> None:
    """Kubernetes: policy.yaml -> ..data/policy.yaml, ..data -> a dated folder, and ..data is swapped by a rename."""
    for name, content in (("..2026_1", GOOD), ("..2026_2", BETTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.yaml").write_bytes(content)
    (tmp_path / "..data").symlink_to("..2026_1")
    (tmp_path / "policy.yaml").symlink_to("..data/policy.yaml")
    runtime = PolicyRuntime.open(tmp_path / "policy.yaml")
    assert heads(runtime) == 2
    (tmp_path / "..data_tmp").symlink_to("..2026_2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    assert settle(runtime) == "accepted"
    assert heads(runtime) == 3


def test_a_broken_edit_changes_nothing_and_is_told_once(path: Path) -> None:
    runtime = PolicyRuntime.open(path)
    spec = runtime.spec
    path.write_bytes(BROKEN)
    assert settle(runtime, 7.0) == "rejected"
    assert runtime.spec is spec
    assert runtime.poll(8.0) == "unchanged"
    rejection = runtime.status.rejection
    assert rejection is not None
    assert (runtime.status.rejected, rejection.at) == (1, 7.0)
    assert rejection.problems[0].startswith(f"{path}:2: defaults.heads: expected a whole number from 1 to 16")
    path.write_bytes(GOOD)
    assert runtime.poll(9.0) == "unchanged"
    assert runtime.status.rejection is None, "what lies there is in force again"
    path.write_bytes(BETTER)
    assert settle(runtime) == "accepted"


def test_a_file_that_is_gone_for_a_while(path: Path) -> None:
    runtime = PolicyRuntime.open(path)
    path.unlink()
    assert settle(runtime) == "rejected"
    assert heads(runtime) == 2
    assert runtime.status.rejection is not None
    assert "unreadable: No such file" in runtime.status.rejection.problems[0]
    path.write_bytes(BETTER)
    assert settle(runtime) == "accepted"
    assert runtime.status.rejection is None


def test_half_a_file_is_not_taken(path: Path) -> None:
    """An editor that writes in place is seen in the middle; what it had by then would even be a policy."""
    runtime = PolicyRuntime.open(path)
    path.write_bytes(b"version: 1\n")
    assert runtime.poll(1.0) == "settling"
    path.write_bytes(BETTER)
    assert runtime.poll(2.0) == "settling"
    assert runtime.poll(3.0) == "accepted"
    assert (heads(runtime), runtime.status.accepted) == (3, 2)


def test_nothing_starts_with_a_broken_policy(path: Path) -> None:
    path.write_bytes(BROKEN)
    with pytest.raises(PolicyError, match=r"defaults\.heads"):
        PolicyRuntime.open(path)
    with pytest.raises(FileNotFoundError):
        PolicyRuntime.open(path.parent / "none.yaml")


def test_the_policy_that_ships() -> None:
    runtime = PolicyRuntime.embedded()
    assert runtime.poll(1.0) == "unchanged"
    assert runtime.spec.of_class("code").control > 0
    assert runtime.status.file == "embedded default"
