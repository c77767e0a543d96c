"""``medusa-gateway bench telemetry``: turns are fair, intervals are what they say, and it measures what it claims."""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from backends.bench.turns import mirrored
from gateway.bench.telemetry.contestants import Contestant, with_telemetry, without_telemetry
from gateway.bench.telemetry.load import Client, Load, Target
from gateway.bench.telemetry.ratios import median_interval, summary
from gateway.bench.telemetry.receivers import Received, receiver
from gateway.bench.telemetry.run import AGAIN, BASE, FULL, HOLE, VARIANTS, TelemetryBench, run_telemetry_bench
from gateway.cli import main
from tests.support.fakes import PATIENCE_S
from tests.support.live_gateway import MODEL, running_gateway

SERVE = (sys.executable, "-m", "tests.support.fake_serve")


def test_gateways_take_turns_under_load() -> None:
    lines: list[str] = []
    bench = TelemetryBench(Load(2, 8), rounds=2, generations=1, turn_s=0.005, serve=SERVE)
    report = run_telemetry_bench(bench, lines.append)
    cells = {cell["telemetry"]: cell for cell in report["cells"]}
    assert list(cells) == list(VARIANTS)
    assert cells[BASE]["ratio"] == 1.0
    without = [sum(each) / 2 for each in zip(report["rounds"][BASE], report["rounds"][AGAIN], strict=True)]
    for name, base in ((FULL, without), (HOLE, without), (AGAIN, report["rounds"][BASE])):
        found = report["rounds"][name]
        assert len(found) == 2
        assert min(found) > 0
        ratio = statistics.median(rate / reference for rate, reference in zip(found, base, strict=True))
        assert cells[name]["ratio"] == pytest.approx(ratio, rel=0.01)
        assert cells[name]["interval"] is None, "two rounds say nothing of where the median lies"
    # Spans and metrics: at the latest when the gateway ended.
    assert report["receiver"]["exports"] >= 2
    assert report["receiver"]["bytes"] > 1000
    assert len(lines) == len(VARIANTS) + 1 + 2


def test_logs_are_part_of_full_telemetry() -> None:
    bench = TelemetryBench(engine=("--dtype", "float32"))
    assert "--log-level" not in bench.command("policy.yaml", telemetry=False)
    command = bench.command("policy.yaml", telemetry=True)
    assert command[-4:] == ["--log-format", "json", "--log-level", "info"]
    assert command[command.index("--dtype") + 1] == "float32"


def test_rounds_are_dealt_out_to_gateways() -> None:
    with pytest.raises(ValueError, match="1 rounds can't be dealt out to 2"):
        run_telemetry_bench(TelemetryBench(rounds=1, generations=2))


def state_of(contestant: Contestant) -> str:
    return Path(f"/proc/{contestant._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_gateway_runs_in_its_turn_only(tmp_path: Path) -> None:
    (tmp_path / "policy").write_text("version: 1\n")
    command = [*SERVE, "--served-model-name", "bench", "--policy", str(tmp_path / "policy")]
    with Contestant(command, without_telemetry()) as contestant:
        client = Client({"only": Target(contestant.url)}, Load(2, 8))
        while contestant.turn(0.01) and not client.tokens("only", 0):
            assert client.running
        client.block = 1
        deadline = time.monotonic() + PATIENCE_S
        while state_of(contestant) != "T":
            assert time.monotonic() < deadline, "it was not stopped after its turn"
        client.finish()
        while client.running:
            contestant.turn(0.01)
        # Eight tokens an answer, but four of the first of one stream; whole, in whatever blocks their parts came.
        assert (client.tokens("only", 0) + client.tokens("only", 1)) % 8 == pytest.approx(4.0)
        assert (contestant.cpu_s() or 0) > 0


def test_a_gateway_that_does_not_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="there is no such model"):
        Contestant([*SERVE, "--served-model-name", "x", "--policy", "x", "--fail", "there is no such model"], {})


def test_an_answer_of_another_length_ends_the_measurement() -> None:
    with running_gateway() as live:
        client = Client({"live": Target(live.url)}, Load(1, 8))
        client._thread.join(PATIENCE_S)
        with pytest.raises(ExceptionGroup) as caught:
            assert client.running
        assert caught.group_contains(httpx.HTTPStatusError), f"{MODEL} is not the model that it asks for"


def test_every_contestant_is_as_often_before_another_as_after_it() -> None:
    rounds = [mirrored(VARIANTS, number) for number in range(2 * len(VARIANTS))]
    places = Counter((name, place) for order in rounds for place, name in enumerate(order))
    assert set(places.values()) == {2}
    for first, second in itertools.permutations(VARIANTS, 2):
        assert sum(order.index(first) < order.index(second) for order in rounds) == len(rounds) / 2


def test_the_interval_of_a_median() -> None:
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    # The tables of the sign test: the 1st of 6, the 10th of 30.
    assert median_interval([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == (1.0, 6.0)
    assert median_interval([float(number) for number in range(1, 31)]) == (10.0, 21.0)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    draw = random.Random(5)
    held = 0
    for _ in range(400):
        # Far from normal: one in ten rounds is disturbed.
        values = [draw.gauss(1.0, 0.5 if draw.random() < 0.1 else 0.02) for _ in range(24)]
        low, high = median_interval(values) or (0.0, 0.0)
        held += low <= 1.0 <= high
    assert 375 <= held < 400


def test_ratios_are_of_the_same_round() -> None:
    ratio, _ = summary([1.0, 20.0, 300.0], [1.0, 10.0, 100.0])
    assert ratio == 2.0
    with pytest.raises(ValueError, match="shorter"):
        summary([1.0, 2.0], [1.0])


def test_a_receiver_counts_what_it_forgets() -> None:
    with receiver() as sink, httpx.Client(trust_env=False) as http:
        assert sink.received() == Received()
        for path in ("/v1/traces", "/v1/metrics"):
            assert http.post(sink.url + path, content=b"x" * 70_000).raise_for_status().content == b""
        assert sink.received() == Received(2, 140_000)


def test_one_load_at_a_time() -> None:
    assert main(["bench", "telemetry", "--concurrency", "1,4"]) == 2
    assert main(["bench", "telemetry", "--quick"]) == 2
    assert main(["bench", "telemetry", "--runner", "native"]) == 2
    assert main(["bench", "telemetry", "--export-every", "0"]) == 2
    assert main(["bench", "--policy", "policy.yaml"]) == 2
    assert main(["bench", "sweep", "--export-every", "5"]) == 2


def test_intervals_are_of_the_time_that_a_gateway_runs() -> None:
    environment = with_telemetry("http://127.0.0.1:1", 5.0, stretch=4)
    assert environment["OTEL_BSP_SCHEDULE_DELAY"] == environment["OTEL_METRIC_EXPORT_INTERVAL"] == "20000"
    assert environment["OTEL_EXPORTER_OTLP_TIMEOUT"] == "40"
