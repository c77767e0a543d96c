"""``bench peers``: turns rotate, one worker is awake at a time, and whoever fails is left out by name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.bench.peers import run as run_module
from backends.bench.peers.contestants import (
    CONTESTANTS,
    Contestant,
    Place,
    Program,
    Unavailable,
    command,
    environment_of,
    load_options,
)
from backends.bench.peers.process import WorkerFailed, WorkerProcess
from backends.bench.peers.report import make_report, table
from backends.bench.peers.run import Cell, PeersOptions, cells_of, cut, measure
from backends.bench.turns import rotated

SCRIPT = Path(__file__).with_name("scripted.py")
CLASSES = {"code": [(1, 2), (3, 4)], "chat": [(5, 6), (7, 8)]}
TEXT = tuple(range(50))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(model=tmp_path, demo=False, eos=[0], threads=1, folder=tmp_path / "peers")


def scripted(name: str, log: Path, fault: str = "") -> WorkerProcess:
    return WorkerProcess([sys.executable, str(SCRIPT), name, str(log), fault], os.environ)


def starter(log: Path, faults: dict[str, str] | None = None) -> Callable[[Program, Place], WorkerProcess]:
    return lambda program, place: scripted(program.name, log, (faults or {}).get(program.name, ""))


def contestants(*names: str) -> dict[str, Contestant]:
    """Programs with an environment, so that nobody looks for weights of the demo model."""
    return {name: Contestant(name, Program(name, "none.py", "none"), mode="m") for name in names}


def options(**changes: Any) -> PeersOptions:
    usual: dict[str, Any] = {"concurrencies": (1, 4), "rounds": 3, "max_tokens": 4, "first_token_of": (6,)}
    return PeersOptions(**{**usual, "prompts": {1: 1, 4: 4}, **changes})


@given(st.lists(st.integers(), unique=True, max_size=8), st.integers(0, 100))
def test_all_take_part_in_each_turn_and_are_first_alike(names: list[int], turn: int) -> None:
    orders = [rotated(names, turn + i) for i in range(len(names))]  # type: ignore[arg-type]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert sorted(order[0] for order in orders) == sorted(names)


def test_contestants_run_the_same_cells_in_rotating_order(place: Place, tmp_path: Path) -> None:
    log, asked = tmp_path / "log", contestants("fast", "slow")
    measured = measure(options(contestants=tuple(asked)), place, CLASSES, TEXT, contestants=asked, start=starter(log))
    cells = [Cell("", prompt_tokens=6), Cell("code"), Cell("chat"), Cell("mixed", 4)]
    assert list(measured.answers) == cells
    turns = [json.loads(line) for line in log.read_text().splitlines()][6:]  # three runs each to warm up
    assert len(turns) == 3 * len(cells) * 2
    pairs = list(zip(turns[::2], turns[1::2], strict=True))
    assert [first[0] for first, _ in pairs[:4]] == ["fast", "slow", "fast", "slow"], "the first one changes"
    assert all({first[0], second[0]} == {"fast", "slow"} and first[1:] == second[1:] for first, second in pairs)
    prompts = [str(first[2]) for first, _ in pairs if first[3] == 1]
    assert len(set(prompts)) == 3, "a prompt for the time to the first token never comes again"

    report = make_report(measured, "slow", str)
    json.dumps(report)
    by_cell = {(cell.get("class"), cell.get("concurrency")): cell["results"] for cell in report["cells"]}
    assert by_cell["code", 1]["fast"] == {
        "tokens_per_s": 100.0,
        "over_reference": 2.0,
        "per_token_p50_ms": 10.0,
        "per_token_p99_ms": 10.0,
    }
    assert by_cell[None, None]["slow"] == {"first_token_ms": 20.0, "time_over_reference": 1.0}
    assert report["contestants"]["fast"] == {
        "version": "fast 1",
        "weights": "none",
        "memory_mb": 7.5,
        "same_answers": 1.0,
    }
    assert "| fast | none | 10 (0.50) | 100 (2.00) |" in table(report)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("dies", "it ended, or answered no JSON (exit status 3); its last words: out of luck"),
        ("refuses", "ValueError: no such weights"),
        ("babbles", "it answered what can't be read"),
        ("hangs", "no answer within 2 s"),
    ],
)
def test_who_fails_is_left_out_by_name_and_the_others_go_on(
    fault: str, reason: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "hangs":
        monkeypatch.setattr(run_module, "_LOAD_S", 2.0)
    asked = contestants("fast", "slow")
    measured = measure(
        options(contestants=tuple(asked)),
        place,
        CLASSES,
        TEXT,
        contestants=asked,
        start=starter(tmp_path / "log", {"fast": fault}),
    )
    assert list(measured.skipped) == ["fast"]
    assert reason in measured.skipped["fast"]
    assert all(len(runs["slow"]) == 3 for runs in measured.answers.values())
    report = make_report(measured, "fast", str)
    assert f"left out: fast: {measured.skipped['fast']}" in table(report)
    assert report["contestants"]["slow"]["memory_mb"] == 7.5


def test_contestants_of_one_program_share_its_process(place: Place, tmp_path: Path) -> None:
    program = Program("fast", "none.py", "none")
    asked = {"a": Contestant("a", program, "vanilla"), "b": Contestant("b", program, "adaptive")}
    started: list[str] = []

    def start(program: Program, place: Place) -> WorkerProcess:
        started.append(program.name)
        return scripted(program.name, tmp_path / "log")

    measured = measure(options(contestants=("a", "b")), place, CLASSES, TEXT, contestants=asked, start=start)
    assert started == ["fast"] and set(measured.facts) == {"a", "b"}
    modes = {json.loads(line)[1] for line in (tmp_path / "log").read_text().splitlines()}
    assert modes == {"vanilla", "adaptive"}


def test_no_round_begins_that_would_end_too_late(place: Place, tmp_path: Path) -> None:
    asked, times = contestants("fast"), iter(range(10_000))
    measured = measure(
        options(contestants=("fast",), seconds=30.0),
        place,
        CLASSES,
        TEXT,
        contestants=asked,
        start=starter(tmp_path / "log"),
        clock=lambda: float(next(times)),  # every look at it takes a second: a round has nine of them
    )
    assert measured.rounds == 2


def test_who_takes_long_for_a_cell_runs_it_once(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_SLOW_S", -1.0)
    asked = contestants("fast")
    measured = measure(
        options(contestants=("fast",)), place, CLASSES, TEXT, contestants=asked, start=starter(tmp_path / "log")
    )
    assert measured.rounds == 3 and all(len(runs["fast"]) == 1 for runs in measured.answers.values())
    report = make_report(measured, "fast", str)
    assert report["run_once"] == {"fast": [str(cell) for cell in measured.answers]}
    assert "run once, as it took so long: fast: first token of 6, code x1" in table(report)


def test_a_worker_sleeps_while_it_is_not_asked(tmp_path: Path) -> None:
    worker = scripted("fast", tmp_path / "log")
    try:
        worker.ask({"do": "load", "options": {}}, 10.0)
        # Waits until it is stopped; another state would never be told.
        state = os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
        assert state is not None and state.si_code == os.CLD_STOPPED
        order = {"do": "run", "prompts": [[1]], "max_tokens": 1, "concurrency": 1, "mode": ""}
        assert worker.ask(order, 10.0)["memory_mb"] == 7.5
    finally:
        worker.close()
        worker.close()
    with pytest.raises(WorkerFailed, match="it ended before"):
        worker.ask({"do": "load", "options": {}}, 1.0)


def test_an_environment_that_is_not_made_names_the_command(place: Place) -> None:
    with pytest.raises(Unavailable, match="environment vllm is not made; run: make peers"):
        command(CONTESTANTS["vllm"].program, place)


def test_one_option_keeps_everybody_to_avx2(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.delenv("MEDUSA_CPU", raising=False)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    vllm, own = CONTESTANTS["vllm"].program, CONTESTANTS["vanilla"].program
    narrow = replace(place, cpu="avx2")
    assert environment_of(own, narrow)["MEDUSA_CPU"] == "avx2" and environment_of(own, narrow)["PYTHONPATH"] == "here"
    assert environment_of(vllm, narrow)["ONEDNN_MAX_CPU_ISA"] == "AVX2" and "PYTHONPATH" not in environment_of(
        vllm, place
    )
    assert load_options(vllm, narrow)["cpu"] == "avx2"
    assert {"MEDUSA_CPU", "ATEN_CPU_CAPABILITY"} & environment_of(own, place).keys() == set()
    assert environment_of(own, place)["OMP_NUM_THREADS"] == "1"


def test_prompts_are_cut_to_length_from_different_places() -> None:
    assert cut(TEXT, 120, 0)[:50] == TEXT and len(cut(TEXT, 120, 0)) == 120
    assert len({cut(TEXT, 8, which) for which in range(20)}) == 20


def test_one_class_alone_is_not_called_mixed() -> None:
    assert cells_of(options(first_token_of=()), ["code"]) == [Cell("code"), Cell("code", 4)]
