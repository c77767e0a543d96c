"""Two real replicas with a real Redis under an open load of all kinds for a long time, with faults by schedule.

``make soak SOAK_S=1800`` or ``python -m tests.drills.soak [--seconds S] [--rate R] [--engine NAME] [--json]``.
Requests arrive by chance at a fixed rate, whatever became of those before. Every prompt has one right answer, which is
asked for at the start, by plain decoding. Exit status 1 when

- an answer, or the part of one that came, differs from it in any character,
- a request failed that no fault excuses,
- an engine holds pages, or a gateway places, after the last request,
- a fault was not noticed by the replica that it was meant for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gateway.auth.keyfile import new_key, written_digest
from tests.drills.drill_rig import MODEL, Replica, model_fields
from tests.drills.progress import PROGRESS_S, ended
from tests.drills.soak_report import KINDS, Fault, Outcome, Usage, report, show, usage_of
from tests.drills.soak_rig import BACKENDS, end, launch_upstream, replica_of
from tests.support.ports import free_port
from tests.support.valkey import ValkeyProcess

REMOTE = "remote"
PROMPTS = 8
LIMIT_S = 300.0
"""What all but the load may take: starts, references, waiting for the last requests."""
REQUEST_S = 60.0
BROKEN_POLICY = "version: 1\ndefaults: {nodes: a lot}\n"
POLICY = "version: 1\ncost: {per_gpu_hour: 2.5}\n"
BAD = (
    b"{",
    b'{"model": "drill"}',
    b'{"model": "drill", "messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "drill", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
)


def wrong_tokens(expected: str, found: str, *, whole: bool) -> int:
    """How many characters of ``found`` are not those of the right answer, or missing from a whole one. Pure."""
    wrong = sum(a != b for a, b in zip(expected, found, strict=False)) + max(len(found) - len(expected), 0)
    return wrong + (max(len(expected) - len(found), 0) if whole else 0)


def body_of(index: int, model: str = MODEL, *, long: bool = False) -> dict[str, Any]:
    """Half of them greedy, half sampled with a seed."""
    sampled = {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0}
    messages = [{"role": "user", "content": f"Question {index}: what comes after {index * 7}?"}]
    return {"model": model, "messages": messages, "max_tokens": 200 if long else 24, **sampled}


@dataclass
class Soak:
    """``replicas``, ``redis`` and ``upstream`` run already."""

    folder: Path
    replicas: list[Replica]
    redis: ValkeyProcess
    upstream: subprocess.Popen[bytes]
    client: httpx.AsyncClient
    seconds: float
    rate: float
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    outcomes: list[Outcome] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    usage: dict[str, dict[str, Usage]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    memory: tuple[list[float], list[float], list[float]] = field(default_factory=lambda: ([], [], []))
    """Of the replica that lives throughout, looked at by thirds of the time."""
    expected: dict[tuple[str, int, bool], str] = field(default_factory=dict)

    async def run(self) -> dict[str, Any]:
        for model in (MODEL, REMOTE):
            for index in range(PROMPTS):
                for long in (False, True):
                    self.expected[model, index, long] = await self._right_answer(model, index, long)
        say(f"{len(self.expected)} right answers are known; {self.seconds:g} s of load begin")
        idle = {each.name: await self._held(each) for each in self.replicas}
        began = time.monotonic()
        load = asyncio.create_task(self._load(began))
        schedule = asyncio.create_task(self._schedule(began))
        telling = asyncio.create_task(self._tell(began))
        try:
            await asyncio.gather(load, schedule)
        finally:
            for task in (load, schedule, telling):
                task.cancel()
        await self._settled(idle)
        self._look("end")
        return report(self.outcomes, self.faults, self.usage, self.memory, self.broken, self.seconds)

    # The load.

    async def _load(self, began: float) -> None:
        kinds, weights = list(KINDS), list(KINDS.values())
        async with asyncio.TaskGroup() as running:
            at = began
            while (at := at + self.chance.expovariate(self.rate)) < began + self.seconds:
                await asyncio.sleep(max(at - time.monotonic(), 0))
                kind = self.chance.choices(kinds, weights)[0]
                replica = self.chance.choice(self.replicas)
                index, leave = self.chance.randrange(PROMPTS), self.chance.randrange(1, 12)
                running.create_task(self._one(kind, replica, index, leave))

    async def _one(self, kind: str, replica: Replica, index: int, leave: int) -> None:
        outcome = Outcome(kind, replica.name, time.monotonic())
        try:
            async with asyncio.timeout(REQUEST_S):
                await self._ask(outcome, replica, index, leave)
        except httpx.HTTPError as error:
            outcome.problem = type(error).__name__
        except TimeoutError:
            outcome.problem = f"no end within {REQUEST_S:g} s"
        outcome.ended = time.monotonic()
        self.outcomes.append(outcome)

    async def _ask(self, outcome: Outcome, replica: Replica, index: int, leave: int) -> None:
        kind, url = outcome.kind, f"{replica.url}/v1/chat/completions"
        if kind == "bad input":
            headers = {"content-type": "application/json"}
            answer = await self.client.post(url, content=self.chance.choice(BAD), headers=headers)
            if not 400 <= answer.status_code < 500:
                outcome.problem = f"bad input was answered with {answer.status_code}"
            return
        model, long = REMOTE if kind == "upstream" else MODEL, kind in ("long", "cancelled", "slow reader")
        body, right = body_of(index, model, long=long), self.expected[model, index, long]
        if kind == "whole":
            answer = await self.client.post(url, json=body)
            if answer.status_code != 200:
                outcome.problem = f"status {answer.status_code}"
                return
            outcome.wrong = wrong_tokens(right, answer.json()["choices"][0]["message"]["content"], whole=True)
            return
        found, chunks, ended = "", 0, False
        async with self.client.stream("POST", url, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                outcome.problem = f"status {answer.status_code}"
                return
            try:
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            outcome.problem = f"error event {event['error']['code']}"
                            break
                        found += "".join(each["delta"].get("content") or "" for each in event["choices"])
                        chunks += 1
                    if kind == "cancelled" and chunks >= leave:
                        break
                    if kind == "slow reader":
                        await asyncio.sleep(0.05)
            finally:
                outcome.wrong = wrong_tokens(right, found, whole=ended)
        if not ended and outcome.problem is None and kind != "cancelled":
            outcome.problem = "ended without an end"

    async def _right_answer(self, model: str, index: int, long: bool) -> str:
        plain = {"decoding": {"method": "vanilla"}} if model == MODEL else {}
        body = body_of(index, model, long=long) | plain
        answer = await self.client.post(f"{self.replicas[0].url}/v1/chat/completions", json=body)
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]["content"]

    # The faults.

    async def _schedule(self, began: float) -> None:
        """Each at its share of the time; what they change is put back in between."""
        policy, killed = self.folder / "policy.yaml", self.replicas[1]
        killed_process = killed.process
        assert killed_process is not None
        await self._until(began, 0.10)
        self._look("start")

        fault = await self._begin("Redis away", began, 0.15)
        await asyncio.to_thread(self.redis.kill)
        await self._notice(fault, self.replicas, "statistics store is unavailable", began, 0.25)
        await asyncio.to_thread(self.redis.start)
        await self._well(fault)

        fault = await self._begin("policy broken", began, 0.30)
        policy.write_text(BROKEN_POLICY)
        await self._notice(fault, self.replicas, "last edit was refused", began, 0.38)
        policy.write_text(POLICY)
        await self._well(fault)

        self._look("middle")
        fault = await self._begin("replica killed", began, 0.45, killed.name)
        killed.signal(signal.SIGKILL)
        await killed.ended()
        fault.noticed = True
        killed.launch()
        await killed.ready(self.client)
        fault.ended = time.monotonic()
        self._look("its restart", killed)
        say(f"{killed.name} is back after {fault.ended - fault.began:.1f} s")

        fault = await self._begin("upstream hung", began, 0.65, "upstream")
        self.upstream.send_signal(signal.SIGSTOP)
        await self._notice(fault, self.replicas, f"no healthy backend for {REMOTE}", began, 0.75, required=False)
        self.upstream.send_signal(signal.SIGCONT)
        await self._remote_is_back(fault)

        fault = await self._begin("clock jumped", began, 0.80)
        self.replicas[0].signal(signal.SIGUSR1)
        await self._notice(fault, self.replicas[:1], "this machine's clock is", began, 0.90)
        self.replicas[0].signal(signal.SIGUSR1)
        await self._well(fault)

    async def _begin(self, name: str, began: float, share: float, *victims: str) -> Fault:
        await self._until(began, share)
        fault = Fault(name, victims, time.monotonic())
        self.faults.append(fault)
        say(f"fault: {name}")
        return fault

    async def _until(self, began: float, share: float) -> None:
        await asyncio.sleep(max(began + share * self.seconds - time.monotonic(), 0))

    async def _notice(
        self, fault: Fault, replicas: list[Replica], words: str, began: float, share: float, *, required: bool = True
    ) -> None:
        """Until each says so, and at least until ``share`` of the time is over."""
        if required:
            fault.noticed = await self._health_says(replicas, lambda told: any(words in each for each in told))
            if not fault.noticed:
                self.broken.append(f"{fault.name}: /healthz never said '{words}'")
        else:
            fault.noticed = await self._backend_is(up=False)
            if not fault.noticed:
                self.broken.append(f"{fault.name}: the upstream was never found unhealthy")
        await self._until(began, share)

    async def _well(self, fault: Fault) -> None:
        if not await self._health_says(self.replicas, lambda told: not told):
            self.broken.append(f"{fault.name}: a replica did not recover")
        fault.ended = time.monotonic()

    async def _remote_is_back(self, fault: Fault) -> None:
        if not await self._backend_is(up=True):
            self.broken.append(f"{fault.name}: the upstream was never found healthy again")
        fault.ended = time.monotonic()

    async def _health_says(self, replicas: list[Replica], wanted: Any) -> bool:
        return await eventually(replicas, lambda each: self._degraded(each), wanted)

    async def _backend_is(self, *, up: bool) -> bool:
        async def healthy(replica: Replica) -> bool:
            told = (await self.client.get(f"{replica.url}/admin/backends")).json()["backends"]
            far = next(each for each in told if each["name"] == "far")
            return bool(far["healthy"])

        return await eventually(self.replicas, healthy, lambda found: found is up)

    async def _degraded(self, replica: Replica) -> list[str]:
        return (await self.client.get(f"{replica.url}/healthz")).json()["degraded"]

    # What is measured.

    def _look(self, when: str, *which: Replica) -> None:
        for replica in which or self.replicas:
            if replica.process is not None and replica.process.poll() is None:
                self.usage.setdefault(replica.name, {})[when] = usage_of(replica.process.pid)

    async def _held(self, replica: Replica) -> dict[str, float]:
        """Pages of the KV cache, and sequences that run or wait."""
        text = (await self.client.get(f"{replica.url}/metrics")).text
        names = ("medusa_kv_pages_used{", "medusa_running_sequences{", "medusa_queue_depth{")
        return {
            line.split("{")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(names)
        }

    async def _settled(self, idle: dict[str, dict[str, float]]) -> None:
        for replica in self.replicas:
            if not await eventually([replica], self._held, lambda held, name=replica.name: held == idle[name]):
                self.broken.append(
                    f"{replica.name} still holds {await self._held(replica)}; idle: {idle[replica.name]}"
                )

    async def _tell(self, began: float) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            wrong = sum(each.wrong for each in self.outcomes)
            failed = sum(each.problem is not None for each in self.outcomes)
            at = time.monotonic() - began
            survivor = self.replicas[0].process
            if survivor is not None and survivor.poll() is None and at < self.seconds:
                self.memory[min(int(3 * at / self.seconds), 2)].append(usage_of(survivor.pid).memory_mb)
            done = len(self.outcomes)
            say(f"{at:.0f} of {self.seconds:g} s: {done} requests, {failed} failed, {wrong} characters wrong")


async def eventually(replicas: list[Replica], look: Any, wanted: Any, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    for replica in replicas:
        while not wanted(await look(replica)):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)
    return True


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def soak(engine: str, seconds: float, rate: float) -> dict[str, Any]:
    """Raises TimeoutError when it takes :data:`LIMIT_S` longer than its load."""
    with tempfile.TemporaryDirectory(prefix="medusa-soak-") as name:
        folder = Path(name)
        async with asyncio.timeout(seconds + LIMIT_S), AsyncExitStack() as stack:
            key = new_key()
            entry = {"name": "soak", "hash": written_digest(key), "scopes": ["inference", "admin"]}
            entry["limits"] = {"requests_per_minute": 10**6, "tokens_per_day": 10**9}
            (folder / "keys.yaml").write_text(json.dumps({"version": 1, "keys": [entry]}))
            (folder / "policy.yaml").write_text(POLICY)
            redis = ValkeyProcess(folder, ("--appendonly", "yes"))
            await asyncio.to_thread(redis.start)
            stack.callback(redis.kill)
            port = free_port()
            upstream = launch_upstream(port, folder)
            stack.callback(upstream.wait)
            stack.callback(upstream.kill)
            backends = BACKENDS.format(model=model_fields(engine), name=MODEL, remote=REMOTE, port=port)
            (folder / "backends.yaml").write_text(backends)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
            client = httpx.AsyncClient(
                timeout=REQUEST_S, limits=limits, trust_env=False, headers={"authorization": f"Bearer {key}"}
            )
            await stack.enter_async_context(client)
            replicas = [replica_of(f"r{i}", redis.port, folder) for i in range(2)]
            for replica in replicas:
                await replica.proxy.start()
                stack.push_async_callback(replica.proxy.stop)
                replica.launch()
                stack.push_async_callback(end, replica)
            say("two replicas start")
            for replica in replicas:
                await replica.ready(client)
            run = Soak(folder, replicas, redis, upstream, client, seconds, rate)
            await eventually(replicas[:1], lambda _: run._backend_is(up=True), bool)
            return await run.run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drills.soak", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--engine", default="tiny", help="'tiny': random weights; 'demo': the demo model; else a folder; default: tiny")
    add("--seconds", type=float, default=60.0, help="of load; default: %(default)g")
    add("--rate", type=float, default=6.0, help="requests a second; default: %(default)g")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    try:
        done = asyncio.run(soak(args.engine, args.seconds, args.rate))
    except TimeoutError:
        print(f"not done {LIMIT_S:g} s after its load: too slow or too busy for it", file=sys.stderr)
        return 1
    return ended(done, show, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
