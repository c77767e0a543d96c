"""``medusa-gateway bench telemetry``: the same work in every turn, and a report of all turns."""

from __future__ import annotations

from gateway.cli import main
from gateway.telemetry_bench import VARIANTS, Load, run_telemetry_bench
from tests.fakes import FakeDecoder, FakeTokenizer


def test_all_variants_do_the_same_work_in_turns() -> None:
    decoder, lines = FakeDecoder(), []
    report = run_telemetry_bench(decoder, FakeTokenizer(), Load(2, 2, 8), 2, lines.append)
    decoder.check_integrity()
    assert [cell["telemetry"] for cell in report["cells"]] == list(VARIANTS)
    assert all(len(cell["rounds"]) == 2 and min(cell["rounds"]) > 0 for cell in report["cells"])
    assert report["cells"][0]["ratio"] == 1.0
    assert len(decoder.finished) == 2 + 3 * 2 * 2 * 2, "a warm-up, then three turns a round"
    asked = [(each.prompt_token_ids, each.sampling.max_tokens) for each in decoder.submitted[2:]]
    turns = [sorted(asked[start : start + 4]) for start in range(0, len(asked), 4)]
    assert all(turn == turns[0] for turn in turns)
    order = [line.split("telemetry ")[1].split(":")[0] for line in lines]
    assert order == ["none", "full", "black hole", "full", "black hole", "none"]


def test_one_load_at_a_time() -> None:
    assert main(["bench", "telemetry", "--concurrency", "1,4"]) == 2
    assert main(["bench", "telemetry", "--quick"]) == 2
