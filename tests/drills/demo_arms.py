"""``python -m tests.drills.demo_arms GGUF``: two of llama.cpp's servers, one with prompt lookup, as arms of one model.

First traffic of code and creative prompts goes through the gateway, which makes its choice. Then the same prompts are
answered in turns by the gateway, by each arm alone, and by the plain arm once more (A/A), and medians are compared.
Needs ``make peers``. Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from backends.bench.prompts import PROMPTS
from gateway.routing.spec import PLAIN, UpstreamSpec, Variant
from gateway.serving.controller import Controller
from gateway.serving.targets import Backends, UpstreamTarget
from policy.runtime import PolicyRuntime
from tests.drills.progress import PROGRESS_S
from tests.support.live_gateway import running_gateway
from tests.support.paths import ROOT

MODEL, CLASSES = "smollm2", ("code", "creative")
POLICY = b"version: 1\ndefaults: {control: 5%, temperature: {default: 0}}\n"
WORKER = ROOT / "backends/bench/peers/workers/llama_cpp_server.py"
REQUEST_S = 300.0


@contextlib.contextmanager
def llama(gguf: str, lookup: str | None) -> Iterator[str]:
    """The URL of a server of its own process, which ends with the block."""
    options = {"gguf": gguf, "kv_tokens": 2048, "threads": 1, "lookup": lookup}
    python = Path(gguf).parent.parent / "llama-cpp/bin/python"
    process = subprocess.Popen(
        [str(python), str(WORKER), json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip() + "/v1"
    finally:
        process.stdin.close()
        process.wait(30)


def upstream_model(url: str) -> str:
    return httpx.get(f"{url}/models", timeout=REQUEST_S, trust_env=False).json()["data"][0]["id"]


def ask(client: httpx.Client, url: str, model: str, prompt: str, tokens: int, **more: Any) -> tuple[float, Any]:
    """(milliseconds of a whole answer, its body)"""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    began = time.perf_counter()
    answer = client.post(f"{url}/chat/completions", json={**body, **more}).raise_for_status().json()
    return (time.perf_counter() - began) * 1e3, answer


def demonstrate(args: argparse.Namespace) -> dict[str, Any]:
    told = time.monotonic()
    order = random.Random(1)
    with llama(args.gguf, None) as plain, llama(args.gguf, "NGRAM_SIMPLE") as spec:
        name = upstream_model(plain)
        targets = [
            UpstreamTarget(UpstreamSpec("plain", MODEL, plain, upstream_model=name, variant=PLAIN)),
            UpstreamTarget(
                UpstreamSpec("spec", MODEL, spec, upstream_model=name, variant=Variant("ngram-k4", "ngram", 4))
            ),
        ]
        controller = Controller(PolicyRuntime.from_text(POLICY))
        with (
            running_gateway(backends=Backends(targets, frozenset()), controller=controller) as live,
            httpx.Client(timeout=REQUEST_S, trust_env=False) as client,
        ):
            ours = f"{live.url}/v1"

            def through_gateway(prompt: str, class_name: str) -> tuple[float, dict[str, Any]]:
                took, answer = ask(client, ours, MODEL, prompt, args.tokens, decoding={"class": class_name})
                return took, answer["decoding"]["arm"]

            learnt = 0
            began = time.monotonic()
            while learnt < args.learn and time.monotonic() - began < args.seconds:
                class_name = CLASSES[learnt % 2]
                through_gateway(order.choice(PROMPTS[class_name]), class_name)
                learnt += 1
                if time.monotonic() - told > PROGRESS_S:
                    told = time.monotonic()
                    print(f"request {learnt} of {args.learn}", file=sys.stderr, flush=True)
            took: dict[str, dict[str, list[float]]] = {each: {} for each in CLASSES}
            rules: dict[str, list[str]] = {each: [] for each in CLASSES}
            began = time.monotonic()
            for turn in range(args.pairs):
                for class_name in CLASSES:
                    prompt = order.choice(PROMPTS[class_name])
                    ways = ["gateway", "plain", "spec", "plain again"]
                    for way in ways[turn % 4 :] + ways[: turn % 4]:
                        if way == "gateway":
                            ms, arm = through_gateway(prompt, class_name)
                            rules[class_name].append(f"{arm['arm']} ({arm['rule']})")
                        else:
                            ms, _ = ask(client, spec if way == "spec" else plain, name, prompt, args.tokens)
                        took[class_name].setdefault(way, []).append(ms)
                if time.monotonic() - began > args.seconds:
                    break
            evidence = live.http.get("/admin/stats").json()["arms"]
    return {
        "learnt_requests": learnt,
        "classes": {
            each: {
                "turns": len(took[each]["gateway"]),
                **{way: round(statistics.median(ms), 1) for way, ms in took[each].items()},
                "gateway over better arm": round(_ratio(took[each], "gateway"), 4),
                "A/A": round(_median_ratio(took[each]["plain again"], took[each]["plain"]), 4),
                "spec over plain": round(_median_ratio(took[each]["spec"], took[each]["plain"]), 4),
                "arms": {name: rules[each].count(name) for name in sorted(set(rules[each]))},
            }
            for each in CLASSES
        },
        "evidence": evidence,
    }


def _median_ratio(a: list[float], b: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _ratio(took: dict[str, list[float]], way: str) -> float:
    better = min(("plain", "spec"), key=lambda each: statistics.median(took[each]))
    return _median_ratio(took[way], took[better])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", help="weights where `make peers` and `bench peers` have put them, peers/weights/*.gguf")
    parser.add_argument("--learn", type=int, default=200, help="requests before anything is compared; %(default)s")
    parser.add_argument("--pairs", type=int, default=12, help="turns of each class; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600.0, help="most for each of the two parts; %(default)g")
    print(json.dumps(demonstrate(parser.parse_args()), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
