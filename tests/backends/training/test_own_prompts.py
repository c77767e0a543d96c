"""The project's own prompts to distil from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from backends.bench.prompts import PROMPTS
from backends.training.data.answers import read_prompts
from backends.training.data.own_prompts import own_prompts
from gateway.cli import main
from tests.support.paths import ROOT

# What the benchmarks ask about.
BENCH_TOPICS = (
    *("climate", "sleep", "bicycle", " rome ", "leap year", "vaccine", "interview", "working from home", "water cycle"),
    *("saving money", "first world war", "breakfast", "photosynthesis", "houseplant", "bacterium", "inflation"),
    *("sorted lists", "bank account", "debounce", "binary search", "reverses", "asks for a name", "backup of a folder"),
    *("implements a stack", "is prime", "finds dates", "list of tasks", "decorator", "standard input", "flatten"),
    *("lighthouse", "first snow", "fox", "the sun and the moon", "leaving home", "above the clouds", "night train"),
    *("pirate", "haiku", "legend", "old robot", "mayor", "addressed to the rain", "two trees", "rivals", "clockmaker"),
)


def test_every_prompt_is_there_once_and_says_where_it_comes_from() -> None:
    records = own_prompts()
    assert len({record["prompt"] for record in records}) == len({record["id"] for record in records}) == len(records)
    assert {record["licence"] for record in records} == {"Apache-2.0"}
    assert min(Counter(record["label"] for record in records).values()) >= 150
    assert records == own_prompts(), "always the same, in one order: answers are cached by it"


def test_benchmarks_stay_unseen() -> None:
    asked = [record["prompt"].lower() for record in own_prompts()]
    assert not set(asked) & {prompt.lower() for prompts in PROMPTS.values() for prompt in prompts}
    for topic in BENCH_TOPICS:
        assert not [prompt for prompt in asked if topic in prompt]


def test_they_are_written_as_training_reads_them(tmp_path: Path) -> None:
    assert main(["heads", "prompts", "--out", str(tmp_path / "own.jsonl")]) == 0
    assert read_prompts(tmp_path / "own.jsonl") == own_prompts()
    assert main(["heads", "prompts", "--out", str(tmp_path / "missing" / "own.jsonl")]) != 0


def test_the_lists_have_one_item_a_line() -> None:
    files = sorted((ROOT / "backends" / "assets" / "own_prompts").glob("*.txt"))
    assert len(files) == 9
    for file in files:
        lines = file.read_text().splitlines()
        assert lines and len(set(lines)) == len(lines), file.name
        assert all(line and line == line.strip() and ";" not in line for line in lines), file.name
