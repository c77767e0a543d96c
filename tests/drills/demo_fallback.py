"""``make demo-fallback``: the demo model's heads are swapped for random ones under traffic, and then swapped back.

A gateway process serves code prompts without a pause, by the shipped policy (fallback under a speedup of 1.0 over 5 s,
held for 20 s, 5% of requests probe, an alert) without lookup. Prints when the class falls back, when its alert fires
and when speculation returns. In between, throughput is measured against vanilla decoding: bursts of the same prompts
take turns, one decoded by the policy, one with ``decoding.method: vanilla``. Ends within five minutes, with status 0 if
every goal was reached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from backends.bench.prompts import PROMPTS
from tests.drills.demo_alert import write_random_heads
from tests.drills.progress import PROGRESS_S, await_line
from tests.support.paths import ROOT

MODEL = "smollm2-135m-instruct"
CLASS = "code"
FALLBACK_GOAL_S, RETURN_GOAL_S, RATIO_GOAL = 10.0, 60.0, 0.97
FALLBACK_GOAL_BURSTS, RETURN_GOAL_BURSTS = 10, 60
"""The goals in seconds are for a machine that has nothing else to do. Evidence comes with tokens, so on a busy one the
same goals are counted in bursts of requests, at the pace that was seen before anything was changed. There, ratios of
single pairs are far apart too: the goal is missed where three of four are below it."""
PATIENCE_S = 300.0
LIMIT_S = 1800.0
ALERT = "fell-back"


def serve(folder: Path) -> None:
    """The gateway: ``medusa-gateway serve`` in all but the signals, which swap the engine's heads between two steps."""
    from backends.checkpoints.loader import BackboneFacts, load_checkpoint
    from backends.engine.loading import EngineOptions, build_core, load_parts
    from backends.engine.thread import Engine
    from gateway.classifier import PromptClassifier
    from gateway.http.server import bind, run_server
    from gateway.serving.call import ServedModel
    from gateway.serving.controller import Controller
    from gateway.serving.state import GatewayState
    from policy.file.format import default_policy
    from policy.runtime import PolicyRuntime

    options = EngineOptions(max_model_len=1024)
    parts = load_parts(options)
    bad = load_checkpoint(folder / "random-heads", BackboneFacts.of(parts.model))
    loaded = build_core(parts, options)
    core = loaded.core
    heads: Any = core.heads
    asked = {signal.SIGUSR2: heads.propose, signal.SIGUSR1: bad.bind(core.runner).propose}  # type: ignore[arg-type]
    # Whoever drafts with the heads holds this object: what it answers is swapped.
    for number, propose in asked.items():
        signal.signal(number, lambda *_, propose=propose: setattr(heads, "propose", propose))
    engine = Engine(core, loaded.info)
    classifier = PromptClassifier.load()
    # Lookup pays whatever the heads.
    text = default_policy().replace(b"defaults:", b"defaults:\n  lookup: false")
    policy = PolicyRuntime.from_text(text, time.time())
    controller = Controller(policy, classify=lambda prompt: classifier.classify(prompt).label)
    state = GatewayState.create({loaded.info.name: ServedModel(engine, loaded.tokenizer)}, controller=controller)
    try:
        run_server(state, bind("127.0.0.1", 0))
    finally:
        engine.close()


@dataclass
class Burst:
    """What one burst of requests gave: tokens, seconds, and the methods by which they were decoded."""

    tokens: int
    seconds: float
    methods: list[str]

    @property
    def tps(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Traffic:
    """Requests to the gateway, ``concurrency`` at a time and ``size`` in a burst."""

    client: httpx.AsyncClient
    concurrency: int
    size: int
    sent: int = 0

    async def burst(self, prompts: list[str], method: str = "auto") -> Burst:
        places = asyncio.Semaphore(self.concurrency)

        async def ask(prompt: str) -> tuple[int, str]:
            body = {
                "model": MODEL,
                "max_tokens": 64,
                "temperature": 0,
                "messages": [{"role": "user", "content": prompt}],
                "decoding": {"class": CLASS, "method": method},
            }
            async with places:
                answer = (await self.client.post("/v1/chat/completions", json=body)).raise_for_status().json()
            return answer["usage"]["completion_tokens"], answer["decoding"]["method"]

        began = time.monotonic()
        found = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        return Burst(sum(tokens for tokens, _ in found), time.monotonic() - began, [method for _, method in found])

    def next_prompts(self) -> list[str]:
        self.sent += self.size
        return [PROMPTS[CLASS][(self.sent + i) % len(PROMPTS[CLASS])] for i in range(self.size)]

    async def until(self, seen: Callable[[], Awaitable[str | None]]) -> str | None:
        """Traffic without a pause until ``seen`` says what it has seen; None when patience ends first."""
        found: str | None = None
        deadline = time.monotonic() + PATIENCE_S

        async def look() -> None:
            nonlocal found
            while found is None and time.monotonic() < deadline:
                found = await seen()
                await asyncio.sleep(0.1)

        looking = asyncio.create_task(look())
        began = told = time.monotonic()
        while not looking.done():
            await self.burst(self.next_prompts())
            if time.monotonic() - told >= PROGRESS_S:
                told = time.monotonic()
                print(f"waiting, {told - began:.0f} of {PATIENCE_S:g} s", file=sys.stderr, flush=True)
        await looking
        return found

    async def pairs(self, count: int) -> list[tuple[Burst, Burst]]:
        """(by the policy, vanilla) on the same prompts, in turns: ABBA, so that a drift of the machine cancels out."""
        found, told = [], time.monotonic()
        for turn in range(count):
            prompts, bursts = self.next_prompts(), {}
            for method in ("auto", "vanilla") if turn % 2 else ("vanilla", "auto"):
                bursts[method] = await self.burst(prompts, method)
            found.append((bursts["auto"], bursts["vanilla"]))
            if time.monotonic() - told >= PROGRESS_S:
                told = time.monotonic()
                print(f"pair {turn + 1} of {count}", file=sys.stderr, flush=True)
        return found


def summary(pairs: list[tuple[Burst, Burst]]) -> dict[str, Any]:
    ratios = sorted(policy.tps / vanilla.tps for policy, vanilla in pairs)
    return {
        "pairs": len(pairs),
        "policy_tps": round(statistics.median(policy.tps for policy, _ in pairs), 1),
        "vanilla_tps": round(statistics.median(vanilla.tps for _, vanilla in pairs), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(each, 4) for each in statistics.quantiles(ratios, n=4)[::2]],
        "speculating_requests": sum(policy.methods.count("medusa") for policy, _ in pairs),
        "requests": sum(len(policy.methods) for policy, _ in pairs),
    }


async def demonstrate(process: subprocess.Popen[str], url: str, args: argparse.Namespace) -> dict[str, Any]:
    said = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - said:6.1f} s  {line}", file=sys.stderr, flush=True)

    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as client:
        traffic = Traffic(client, args.concurrency, args.burst)

        async def stats() -> Any:
            return (await client.get("/admin/stats")).json()

        async def told_of(kind: str) -> list[str]:
            return [each["message"] for each in (await stats())["events"] if each["kind"] == kind]

        async def event(kind: str, after: int) -> str | None:
            found = await told_of(kind)
            return found[-1] if len(found) > after else None

        async def alert() -> str | None:
            for each in (await client.get("/admin/alerts")).json()["alerts"]:
                if (each["alert"], each["state"], each["class"]) == (ALERT, "firing", CLASS):
                    return f"{each['alert']} fires for {each['model']}/{each['class']}"
            return None

        result: dict[str, Any] = {"concurrency": args.concurrency}
        before = await traffic.pairs(args.pairs)
        burst_s = statistics.median(policy.seconds for policy, _ in before)
        result["burst_s"] = round(burst_s, 2)
        result["good_heads"] = summary(before)
        say(f"good heads: {result['good_heads']}")

        fallbacks = len(await told_of("fallback"))
        result["fallbacks_before"] = fallbacks
        process.send_signal(signal.SIGUSR1)
        swapped = time.monotonic()
        say("random heads in their place")
        message = await traffic.until(lambda: event("fallback", fallbacks))
        result["fallback_s"] = round(time.monotonic() - swapped, 1) if message else None
        say(f"fallback: {message}")
        # A busy machine may have seen the class fall back and return before.
        returns = len(await told_of("resumed"))
        result["alert"] = await traffic.until(alert)
        result["alert_s"] = round(time.monotonic() - swapped, 1)
        say(f"alert: {result['alert']}")
        result["in_fallback"] = summary(await traffic.pairs(args.pairs))
        say(f"in fallback: {result['in_fallback']}")
        result["still_in_fallback"] = await event("resumed", returns) is None

        process.send_signal(signal.SIGUSR2)
        swapped = time.monotonic()
        say("good heads back")
        message = await traffic.until(lambda: event("resumed", returns))
        result["return_s"] = round(time.monotonic() - swapped, 1) if message else None
        say(f"returned: {message}")
        result["after_return"] = summary(await traffic.pairs(args.pairs))
        say(f"after the return: {result['after_return']}")
    goals = {
        "fallback": result["fallback_s"] is not None
        and result["fallback_s"] <= max(FALLBACK_GOAL_S, FALLBACK_GOAL_BURSTS * burst_s),
        "alert": result["alert"] is not None,
        "throughput": result["still_in_fallback"] and result["in_fallback"]["ratio_quartiles"][1] >= RATIO_GOAL,
        "return": result["return_s"] is not None
        and result["return_s"] <= max(RETURN_GOAL_S, RETURN_GOAL_BURSTS * burst_s),
    }
    return {**result, "goals": goals}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--concurrency", type=int, default=2, help="requests at once; default: %(default)s")
    parser.add_argument("--burst", type=int, default=4, help="requests of a burst; default: %(default)s")
    parser.add_argument("--pairs", type=int, default=16, help="pairs of bursts; default: %(default)s")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return 0
    with tempfile.TemporaryDirectory(prefix="medusa-demo-") as folder:
        write_random_heads(Path(folder) / "random-heads")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.drills.demo_fallback", "--serve", folder],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            found = await_line(process, r"at (http://\S+)/v1", lambda line: print(line, file=sys.stderr, flush=True))
            result = asyncio.run(asyncio.wait_for(demonstrate(process, found.group(1), args), LIMIT_S))
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        except (TimeoutError, RuntimeError) as error:
            print(f"failed: {error or f'not done within {LIMIT_S:g} s'}", file=sys.stderr)
            return 1
        finally:
            process.kill()
            process.wait()
    print(json.dumps(result, indent=2))
    return 0 if all(result["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
