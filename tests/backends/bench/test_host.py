"""The host's share of a step: what is counted as the critical path, and that the engine leaves text out of it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from backends.bench.host import CASES, HostOptions, run_host, stubbed_core
from backends.engine.loading import EngineOptions, load_core
from backends.engine.sequence import Sequence
from backends.models.tiny import TINY_MODEL_NAME
from backends.types import DecodingPlan, GenerationRequest, SamplingParams
from gateway.cli import main


class Ticks:
    """A clock that goes on by one second whenever it is asked."""

    def __init__(self) -> None:
        self._now = itertools.count(1)

    def __call__(self) -> float:
        return float(next(self._now))


def test_only_what_the_device_waits_for_is_on_the_critical_path() -> None:
    core, device = stubbed_core("vanilla", 1, 8, Ticks())
    hidden = torch.zeros(1, 8)
    device.begin()
    batch = core.scheduler._new_batch(0)
    batch.add_tree([0], 5, 0, [], [])
    device.forward(batch.build())  # one second before the launch: nothing ran
    device.logits(hidden)
    device.argmax(hidden, [0])  # one second while the device worked
    device.end()  # and one after it was done
    assert (device.spent_s, device.critical_s) == (3.0, 2.0)


def test_text_is_made_while_the_device_works_on_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    core, device = stubbed_core("medusa+lookup", 3, 200)
    order: list[str] = []
    forward, argmax, take_chunk = device.forward, device.argmax, Sequence.take_chunk
    monkeypatch.setattr(device, "forward", lambda batch: (order.append("launch"), forward(batch))[1])
    monkeypatch.setattr(device, "argmax", lambda *call: (order.append("collect"), argmax(*call))[1])
    monkeypatch.setattr(Sequence, "take_chunk", lambda self: (order.append("text"), take_chunk(self))[1])
    for _ in range(8):
        core.step()
    assert "text" in order
    for before, name in itertools.pairwise(order):
        assert name != "text" or before in ("launch", "text"), order


@pytest.mark.parametrize("case", CASES)
def test_every_token_is_told_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching before telling changes when things are said, not what."""
    told: list[dict[str, int]] = []
    for ahead in (False, True):
        core, device = stubbed_core(case, 4, 30)
        monkeypatch.setattr(device, "runs_ahead", ahead)
        tokens: dict[str, int] = {}
        while core.has_work:
            for request_id, chunk in core.step():
                assert request_id not in tokens or tokens[request_id] < 30
                tokens[request_id] = tokens.get(request_id, 0) + len(chunk.token_ids)
                assert chunk.num_tokens == tokens[request_id]
                assert (chunk.finish_reason == "length") == (tokens[request_id] == 30)
        core.check_integrity()
        told.append(tokens)
    assert told[0] == told[1] == {f"request-{number}": 30 for number in range(4)}


def test_running_ahead_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real loop on a real model: stop strings, log-probabilities, penalties and seeds, some coming later."""
    loaded = load_core(EngineOptions(model=TINY_MODEL_NAME, runner="transformers"))
    core, answers = loaded.core, list[dict[str, tuple[str, list[int], Any, Any]]]()
    for ahead in (False, True):
        monkeypatch.setattr(core.runner, "runs_ahead", ahead)
        requests = [
            GenerationRequest(
                f"request-{number}",
                tuple(range(70 + number, 80 + 3 * number)),
                SamplingParams(
                    temperature=0.9 * (number % 2),
                    seed=number,
                    max_tokens=20 + number,
                    stop=tuple("abcdefghijklmnopqrstuvwxyz ") if number % 3 == 0 else (),
                    logprobs=2 if number == 4 else None,
                    presence_penalty=0.5 * (number == 5),
                ),
                DecodingPlan(),
            )
            for number in range(8)
        ]
        said: dict[str, tuple[str, list[int], Any, Any]] = {}
        while core.has_work or requests:
            for _ in range(2 if requests else 0):
                core.add(requests.pop())
            for request_id, chunk in core.step():
                text, tokens, logprobs, _ = said.get(request_id, ("", [], (), None))
                said[request_id] = (
                    text + chunk.text,
                    tokens + list(chunk.token_ids),
                    (*logprobs, *chunk.logprobs),
                    (chunk.finish_reason, chunk.stop_match, chunk.num_tokens),
                )
        core.check_integrity()
        answers.append(said)
    assert answers[0] == answers[1]
    assert {said[3][0] for said in answers[0].values()} == {"length", "stop"}


def test_an_aborted_request_leaves_no_trace_in_a_step_that_is_under_way() -> None:
    core, _ = stubbed_core("medusa", 3, 60)
    for _ in range(4):
        core.step()
    core.abort("request-1")
    emitted = core.step()
    assert {request_id for request_id, _ in emitted} == {"request-0", "request-2"}
    while core.has_work:
        core.step()
    core.check_integrity()


def test_a_step_that_breaks_after_the_next_was_planned_tells_what_it_had() -> None:
    core, device = stubbed_core("vanilla", 2, 60)
    for _ in range(3):
        core.step()

    def broken(batch: object) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    device.forward = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="gone"):
        core.step()
    found = core.fail_step("sorry")
    assert [chunk.finish_reason for _, chunk in found] == [None, None, "error", "error"]
    assert all(chunk.token_ids for _, chunk in found[:2])
    core.check_integrity()


def test_report_has_a_cell_for_each_case_and_size() -> None:
    report = run_host(HostOptions(sequences=(1, 3), steps=3, warm_up=2))
    assert [(cell["case"], cell["sequences"]) for cell in report["cells"]] == [
        ("vanilla", 1),
        ("vanilla", 3),
        ("medusa+lookup", 1),
        ("medusa+lookup", 3),
    ]
    for cell in report["cells"]:
        assert 0 < cell["critical_ms"] <= cell["host_ms"]
    assert report["cells"][2]["rows"] > 1 and report["cells"][2]["tokens_per_step"] > 1
    with pytest.raises(ValueError, match="case 'fast' is not one of vanilla"):
        run_host(HostOptions(cases=("fast",)))


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--json", "--concurrency", "2", "--rounds", "2"]) == 0
    assert {cell["sequences"] for cell in json.loads(capsys.readouterr().out)["cells"]} == {2}
    assert main(["bench", "host", "--max-tokens", "5"]) == 2
    assert "--max-tokens is not for bench host" in capsys.readouterr().err
