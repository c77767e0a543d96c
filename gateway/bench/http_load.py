"""``medusa-gateway bench load``: the gateway and llama.cpp's server over HTTP, under arrivals that don't wait.

A load generator that others keep (aiperf, in an environment that ``make peers`` makes) sends requests whose arrivals
are a Poisson process, and counts which of them came within the target: goodput. One server runs at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.bench.peers.contestants import (
    CONTESTANTS,
    Place,
    Unavailable,
    environment_of,
    load_options,
    server_command,
)
from backends.bench.peers.environments import python_of
from backends.bench.prompts import PROMPTS
from gateway.bench.telemetry.run import POLICY as VANILLA_POLICY

SERVERS = ("adaptive", "vanilla", "llama-bf16", "llama-q4")
_END_S = 20.0
_GRACE_S = 30.0

Generator = Callable[[Sequence[str], Mapping[str, str], float], None]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """``rates``: requests a second; ``target_ms``: to the first token, and for each later one; ``seconds``: how long
    requests arrive at each rate."""

    servers: tuple[str, ...] = SERVERS
    rates: tuple[float, ...] = (1.0, 2.0, 4.0)
    target_ms: tuple[float, float] = (500.0, 50.0)
    max_tokens: int = 48
    seconds: float = 15.0


def run_http_load(
    options: LoadOptions,
    place: Place,
    progress: Callable[[str], object] = lambda line: None,
    *,
    generate: Generator | None = None,
    serving: Callable[[str, Place, Path], contextlib.AbstractContextManager[str]] | None = None,
) -> dict[str, Any]:
    """``{cells: [{server, rate, ...}], skipped: {server: reason}}``. Raises ValueError without the load generator."""
    aiperf = python_of("aiperf", place.folder)
    if aiperf is None and generate is None:
        raise ValueError("the load generator aiperf is not installed; run: make peers")
    cells: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        texts = [text for each in zip(*PROMPTS.values(), strict=True) for text in each]
        prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for server in options.servers:
            try:
                with (serving or served)(server, place, folder) as url:
                    for rate in options.rates:
                        out = folder / f"{server}-{rate:g}"
                        command = generator_command(str(aiperf), url, rate, options, place, prompts, out)
                        (generate or _generate)(command, environment_of_generator(), options.seconds)
                        cells.append({"server": server, "rate": rate, **read_result(out)})
                        progress(f"{server} at {rate:g}/s: {cells[-1]['goodput']} good a second")
            except (Unavailable, OSError, RuntimeError, subprocess.SubprocessError) as error:
                skipped[server] = " ".join(str(error).split())
                progress(f"{server} is left out: {skipped[server]}")
    return {"target_ms": list(options.target_ms), "cells": cells, "skipped": skipped}


def generator_command(
    python: str, url: str, rate: float, options: LoadOptions, place: Place, prompts: Path, out: Path
) -> list[str]:
    """aiperf's command line. The same seed for all: the same arrivals."""
    first, later = options.target_ms
    return [
        *(str(Path(python).with_name("aiperf")), "profile", "--url", url, "--model", place.model.name),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(place.model), "--use-server-token-count"),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn", "--osl", str(options.max_tokens)),
        *("--extra-inputs", "temperature:0", "--use-legacy-max-tokens"),
        *("--request-rate", f"{rate:g}", "--arrival-pattern", "poisson", "--random-seed", "7"),
        *("--benchmark-duration", f"{options.seconds:g}", "--benchmark-grace-period", f"{_GRACE_S:g}"),
        *("--goodput", f"time_to_first_token:{first:g} inter_token_latency:{later:g}"),
        *("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--no-auto-plot", "--export-level", "summary"),
        *("--artifact-dir", str(out)),
    ]


def read_result(out: Path) -> dict[str, Any]:
    """What aiperf wrote. Raises RuntimeError when it wrote nothing that can be read."""
    try:
        told = json.loads((out / "profile_export_aiperf.json").read_text())
        duration = told["benchmark_duration"]["avg"]
        done = told["request_count"]["avg"]
        return {
            "requests": int(done),
            "errors": sum(int(each.get("count", 1)) for each in told.get("error_summary") or []),
            "goodput": round(told["good_request_count"]["avg"] / duration, 2),
            "good_share": round(told["good_request_count"]["avg"] / done, 3),
            "tokens_per_s": round(told["output_token_throughput"]["avg"], 1),
            **{
                f"{name}_{p}_ms": round(told[key][p], 1)
                for name, key in (("first_token", "time_to_first_token"), ("per_token", "inter_token_latency"))
                for p in ("p50", "p99")
            },
        }
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise RuntimeError(f"aiperf's result can't be read: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def served(server: str, place: Place, folder: Path) -> Iterator[str]:
    """Its address while it runs. Raises RuntimeError, with its last words, when it doesn't start."""
    contestant = CONTESTANTS[server]
    if contestant.program.environment is None:
        command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--served-model-name", place.model.name]
        command += [] if place.demo else ["--model", str(place.model)]
        if contestant.mode == "vanilla":
            policy = folder / "vanilla.yaml"
            policy.write_text(VANILLA_POLICY)
            command += ["--policy", str(policy)]
    else:
        command = server_command(contestant.program, place, load_options(contestant.program, place))
    environment = environment_of(contestant.program, place)
    with tempfile.TemporaryFile() as said, start(command, environment, said) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[^\s/]+", process.stdout.readline())
            if found is None:
                process.kill()
                process.wait()
                said.seek(0)
                raise RuntimeError(f"it did not start: {said.read()[-500:].decode(errors='replace')}")
            yield found.group()
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def start(command: Sequence[str], environment: Mapping[str, str], said: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
    )


def environment_of_generator() -> dict[str, str]:
    """Without what would keep aiperf from reading a tokenizer's folder, or bring this environment's packages."""
    return {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")}


def _generate(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> None:
    subprocess.run(
        command,
        env=dict(environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=seconds + _GRACE_S + 60,
        check=True,
    )
