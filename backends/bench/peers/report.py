"""The report of ``medusa-gateway bench peers``: as data, and as a table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from backends.bench.peers.figures import Answer, median_ratio, percentile, tokens_per_second
from backends.bench.peers.run import Cell, Measured


def make_report(measured: Measured, reference: str, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """``{contestants: {name: facts, memory_mb, same_answers}, cells: [...], skipped: {name: reason}, rounds}``.

    Ratios are to ``reference``: medians over the rounds that both were in. ``same_answers``: the share of answers whose
    text is the reference's.
    """
    names = list(measured.facts)
    texts = {name: _texts(measured, name, decode) for name in names}
    return {
        "reference": reference,
        "rounds": measured.rounds,
        "contestants": {
            name: {
                **measured.facts[name],
                "memory_mb": measured.memory_mb.get(name),
                "same_answers": _share_of_same(texts[name], texts.get(reference, [])),
            }
            for name in names
        },
        "cells": [_cell_report(cell, measured, names, reference) for cell in measured.answers],
        "skipped": measured.skipped,
        "run_once": measured.slow,
    }


def _cell_report(cell: Cell, measured: Measured, names: Sequence[str], reference: str) -> dict[str, Any]:
    runs = measured.answers[cell]
    if not cell.kind:
        times = {name: [_first_token_ms(run) for run in runs[name]] for name in names}
        results = {
            name: {
                "first_token_ms": round(statistics.median(times[name]), 1),
                "time_over_reference": _rounded(median_ratio(times[name], times.get(reference, []))),
            }
            for name in names
            if times[name]
        }
        return {"prompt_tokens": cell.prompt_tokens, "results": results}
    speeds = {name: [tokens_per_second(run) for run in runs[name]] for name in names}
    results = {
        name: {
            "tokens_per_s": round(statistics.median(speeds[name]), 1),
            "over_reference": _rounded(median_ratio(speeds[name], speeds.get(reference, []))),
            **_per_token([answer for run in runs[name] for answer in run]),
        }
        for name in names
        if speeds[name]
    }
    return {"class": cell.kind, "concurrency": cell.concurrency, "results": results}


def _per_token(answers: Sequence[Answer]) -> dict[str, float | None]:
    times = [answer.per_token_s * 1000 for answer in answers if answer.per_token_s is not None]
    return {f"per_token_p{p}_ms": _rounded(percentile(times, p / 100), 2) for p in (50, 99)}


def _first_token_ms(run: Sequence[Answer]) -> float:
    return statistics.median(1000 * (answer.first_token_s or 0.0) for answer in run)


def _texts(measured: Measured, name: str, decode: Callable[[Sequence[int]], str]) -> list[list[str]]:
    """By cell."""
    return [
        [_text(answer, decode) for run in runs[name] for answer in run]
        for cell, runs in measured.answers.items()
        if cell.kind
    ]


def _text(answer: Answer, decode: Callable[[Sequence[int]], str]) -> str:
    if all(isinstance(token, str) for token in answer.tokens):
        return "".join(answer.tokens)
    return decode(answer.tokens)


def _share_of_same(texts: Sequence[list[str]], others: Sequence[list[str]]) -> float | None:
    """Of a contestant that dropped out, of what it had answered."""
    pairs = [pair for mine, theirs in zip(texts, others, strict=False) for pair in zip(mine, theirs, strict=False)]
    return round(sum(a == b for a, b in pairs) / len(pairs), 3) if pairs else None


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def table(report: dict[str, Any]) -> str:
    """One row for each contestant; in brackets the ratio to the reference."""
    cells = report["cells"]
    header = ["contestant", "weights"]
    for cell in cells:
        if "class" in cell:
            header.append(f"{cell['class']} x{cell['concurrency']}, tokens/s")
        else:
            header.append(f"first token of {cell['prompt_tokens']}, ms")
    header += ["a token at one request, ms, p50 / p99", "memory, MB", "same answers"]
    rows = [header, ["---"] * len(header)]
    for name, facts in report["contestants"].items():
        row = [name, str(facts.get("weights", ""))]
        for cell in cells:
            result = cell["results"].get(name)
            if result is None:
                row.append("-")
            elif "class" in cell:
                row.append(_with_ratio(result["tokens_per_s"], result["over_reference"]))
            else:
                row.append(_with_ratio(result["first_token_ms"], result["time_over_reference"]))
        row += [_one_request(cells, name), _shown(facts["memory_mb"]), _shown(facts["same_answers"])]
        rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += [f"left out: {name}: {reason}" for name, reason in report["skipped"].items()]
    lines += [f"run once, as it took so long: {name}: {', '.join(cells)}" for name, cells in report["run_once"].items()]
    return "\n".join(lines)


def _with_ratio(value: float, ratio: float | None) -> str:
    return f"{value:g}" if ratio is None else f"{value:g} ({ratio:.2f})"


def _one_request(cells: Sequence[dict[str, Any]], name: str) -> str:
    """The median of the classes' p50, and the worst of their p99."""
    found = [cell["results"][name] for cell in cells if cell.get("concurrency") == 1 and name in cell["results"]]
    found = [result for result in found if result["per_token_p50_ms"] is not None]
    if not found:
        return "-"
    p50 = statistics.median(result["per_token_p50_ms"] for result in found)
    return f"{p50:g} / {max(result['per_token_p99_ms'] for result in found):g}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
