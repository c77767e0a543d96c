"""The load balancer drill: replicas behind a real haproxy on one Redis, under load, and four faults.

``make drill`` or ``python -m tests.drills.drill [--engine tiny|fake|MODEL] [--seconds 5] [--json]``. Every stream asks
for an answer that is known token by token. Exit status 1 when a promise is broken:

- no token comes twice and none is missing, in whole streams and in the part that came of broken ones;
- a stream breaks only if the replica that was writing it is killed; nothing else fails, before, during or after;
- a drained replica ends with status 0;
- counters are whole: of every living or drained replica Redis has what it counted, of a killed one all but its last
  moments.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from policy.shared.redis_client import parse_redis_url
from policy.statistics.epoch_book import RETAINED_EPOCHS, epoch_of
from policy.statistics.store import RedisStore
from tests.drills.drill_report import Fault, Stream, report, show
from tests.drills.drill_rig import MODEL, PATIENCE_S, Replica, Rig
from tests.drills.progress import ended
from tests.support.debian import Unavailable

PROMPTS = 12
THINK_S = 0.05
LIMIT_S = 900.0
"""On a machine that has much else to do. With nothing else it takes two to three minutes."""
COUNTERS_S = 60.0
LAG_S = 3.0
"""What a killed replica may take with it: a second of counting, one of writing, and the machine's own sluggishness."""


def request_of(index: int) -> dict[str, Any]:
    """Half of them greedy, half sampled with a seed."""
    sampled = {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0}
    messages = [{"role": "user", "content": f"Question {index}: what comes after {index * 7}?"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 160, "logprobs": True, **sampled}


def tokens_of(choice: dict[str, Any]) -> list[str]:
    entries = (choice.get("logprobs") or {}).get("content") or []
    return [each["token"] for each in entries]


def compare(expected: list[str], found: list[str], whole: bool) -> tuple[int, int]:
    """(duplicated, lost) tokens. What a broken stream did not come to is not lost: its client knows that it is not
    whole."""
    if found == expected or (not whole and found == expected[: len(found)]):
        return 0, 0
    duplicated = lost = 0
    for kind, a, b, c, d in difflib.SequenceMatcher(None, expected, found, autojunk=False).get_opcodes():
        if kind != "equal":
            duplicated += d - c
            lost += 0 if not whole and b == len(expected) else b - a
    return duplicated, lost


class Load:
    """``clients`` that each keep one stream open at a time, until stopped."""

    def __init__(self, url: str, expected: list[list[str]], clients: int) -> None:
        self.streams: list[Stream] = []
        self._url = url
        self._expected = expected
        self._going = True
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
        self._client = httpx.AsyncClient(timeout=PATIENCE_S, limits=limits, trust_env=False)
        self._tasks = [asyncio.create_task(self._work(i)) for i in range(clients)]

    async def stop(self) -> None:
        self._going = False
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def _work(self, number: int) -> None:
        turn = number
        while self._going:
            self.streams.append(await self._one(turn % PROMPTS))
            turn += 1
            # Clients that leave no core to the replicas would only measure themselves.
            await asyncio.sleep(THINK_S)

    async def _one(self, index: int) -> Stream:
        stream, found, finished, done = Stream(time.monotonic()), list[str](), False, False
        try:
            body = {**request_of(index), "stream": True}
            async with self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                stream.server = response.headers.get("x-served-by", "")
                if response.status_code != 200:
                    raw = await response.aread()
                    stream.problem = f"status {response.status_code}: {raw[:120].decode(errors='replace')}"
                async for line in response.aiter_lines() if stream.problem is None else _nothing():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            stream.problem = f"error event {chunk['error']['code']}"
                            continue
                        for choice in chunk["choices"]:
                            found += tokens_of(choice)
                            finished = finished or choice["finish_reason"] is not None
                        stream.first = stream.first or time.monotonic()
        except httpx.HTTPError as error:
            stream.problem = f"{type(error).__name__}: {error}"
        stream.ended = time.monotonic()
        if stream.problem is None and not (finished and done):
            stream.problem = "ended without an end"
        stream.duplicated, stream.lost = compare(self._expected[index], found, stream.problem is None)
        return stream


async def _nothing() -> Any:
    return
    yield


class Drill:
    def __init__(self, rig: Rig, seconds: float, clients: int, restart: bool) -> None:
        self.rig = rig
        self.restart = restart
        self.alive = list(rig.replicas)
        self.streams: list[Stream] = []
        self.seconds = seconds
        self.clients = clients
        self.faults: list[Fault] = []
        self.broken: list[str] = []
        self.counted: dict[str, dict[str, int]] = {}
        """Steps by replica: what it counted, and what Redis has of it."""

    async def run(self) -> None:
        expected = [await self._answer(index) for index in range(PROMPTS)]
        load = Load(self.rig.url, expected, self.clients)
        try:
            a, b, c = self.rig.replicas[:3]
            await self._fault("SIGKILL", a, self._kill)
            await self._fault("SIGTERM drain", b, self._drain)
            await self._fault("Redis restart", None, self._restart_redis)
            await self._fault("cut from Redis", c, self._cut)
        finally:
            await load.stop()
        self.streams = load.streams
        await self._check_counters()
        self._check_streams()

    async def _answer(self, index: int) -> list[str]:
        """The truth: plain decoding, asked of one replica directly and before anything happens."""
        body = {**request_of(index), "decoding": {"method": "vanilla"}}
        answered = await self.rig.client.post(f"{self.rig.replicas[0].url}/v1/chat/completions", json=body)
        return tokens_of(answered.json()["choices"][0])

    async def _fault(self, name: str, victim: Replica | None, strike: Any) -> None:
        fault = Fault(name, victim.name if victim else "redis", time.monotonic())
        self.faults.append(fault)
        print(f"fault: {name}", file=sys.stderr, flush=True)
        await asyncio.sleep(self.seconds)
        await strike(fault, victim)
        fault.healed = time.monotonic()
        await asyncio.sleep(self.seconds)
        fault.over = time.monotonic()

    async def _kill(self, fault: Fault, victim: Replica) -> None:
        sample = await self._own_steps(victim)
        await asyncio.sleep(LAG_S)
        fault.struck = time.monotonic()
        victim.signal(signal.SIGKILL)
        await victim.ended()
        await asyncio.sleep(self.seconds)
        kept = (await self._stored()).get(victim.identity, 0)
        self.counted[f"{victim.name} (killed)"] = {"own": sample, "redis": kept}
        if kept < sample:
            self.broken.append(
                f"{fault.name}: Redis lost {sample - kept} steps that are {LAG_S:g} s older than the kill"
            )
        await self._restart(fault, victim)

    async def _drain(self, fault: Fault, victim: Replica) -> None:
        fault.struck = time.monotonic()
        sample = await self._own_steps(victim)
        victim.signal(signal.SIGTERM)
        status = await victim.ended()
        fault.notes.append(f"ended {time.monotonic() - fault.struck:.1f} s after SIGTERM")
        if status != 0:
            self.broken.append(f"{fault.name}: exit status {status}: {victim.last_words()}")
        kept = (await self._stored()).get(victim.identity, 0)
        self.counted[f"{victim.name} (drained)"] = {"own": sample, "redis": kept}
        if kept < sample:
            self.broken.append(f"{fault.name}: Redis lost {sample - kept} steps of a drained replica")
        await asyncio.sleep(self.seconds / 2)
        await self._restart(fault, victim)

    async def _restart(self, fault: Fault, victim: Replica) -> None:
        if not self.restart:
            self.alive.remove(victim)
            return
        began = time.monotonic()
        victim.launch()
        await victim.ready(self.rig.client)
        await self.rig.balanced(victim)
        fault.notes.append(f"started again in {time.monotonic() - began:.1f} s")

    async def _restart_redis(self, fault: Fault, _: Replica | None) -> None:
        fault.struck = time.monotonic()
        await asyncio.to_thread(self.rig.redis.kill)
        await self._until_store_is(self.alive, ok=False)
        await asyncio.to_thread(self.rig.redis.start)
        await self._until_store_is(self.alive, ok=True)
        fault.notes.append(f"all replicas back on it after {time.monotonic() - fault.struck:.1f} s")

    async def _cut(self, fault: Fault, victim: Replica) -> None:
        fault.struck = time.monotonic()
        victim.proxy.cut()
        await self._until_store_is([victim], ok=False)
        await asyncio.sleep(self.seconds)
        for each in self.alive:
            if each is not victim and not (await each.stats(self.rig.client))["health"]["store"]["ok"]:
                self.broken.append(f"{fault.name}: {each.name} lost Redis too")
        victim.proxy.heal()
        await self._until_store_is([victim], ok=True)

    async def _until_store_is(self, replicas: list[Replica], *, ok: bool) -> None:
        for replica in replicas:
            deadline = time.monotonic() + PATIENCE_S
            while (await replica.stats(self.rig.client))["health"]["store"]["ok"] is not ok:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{replica.name} never noticed that Redis is {'back' if ok else 'gone'}")
                await asyncio.sleep(0.05)

    async def _own_steps(self, replica: Replica) -> int:
        counters = (await replica.stats(self.rig.client))["own_counters"]
        return sum(each["steps"] for each in counters.values())

    async def _stored(self) -> dict[str, int]:
        """Steps in Redis by the identity of replicas, over all epochs it keeps."""
        store = RedisStore(parse_redis_url(self.rig.redis.url))
        now = epoch_of(time.time())
        registers, _ = await store.read(range(now - RETAINED_EPOCHS, now + 2))
        await store.close()
        found: dict[str, int] = {}
        for register, counters in registers.items():
            found[register.replica] = found.get(register.replica, 0) + counters.steps
        return found

    async def _check_counters(self) -> None:
        print("counters are compared", file=sys.stderr, flush=True)
        deadline = time.monotonic() + COUNTERS_S
        for replica in self.alive:
            before = -1
            while True:
                own, kept = await self._own_steps(replica), (await self._stored()).get(replica.identity, 0)
                # Two equal looks: an engine's last steps may not be in its replica's book yet.
                if own == kept == before or time.monotonic() > deadline:
                    break
                before = own
                await asyncio.sleep(1.1)
            self.counted[replica.name] = {"own": own, "redis": kept}
            if own != kept:
                self.broken.append(f"counters of {replica.name}: it counted {own} steps, Redis has {kept}")

    def _check_streams(self) -> None:
        for stream in self.streams:
            if stream.duplicated or stream.lost:
                what = f"{stream.duplicated} tokens twice, {stream.lost} missing"
                self.broken.append(f"a stream of {stream.server}: {what}")
            if stream.problem is not None and not self._excused(stream):
                self.broken.append(f"a stream of {stream.server or 'nobody'} failed: {stream.problem}")
        for fault in self.faults:
            if not any(fault.phase_of(each) == "after" for each in self.streams):
                self.broken.append(f"{fault.name}: no stream after it")

    def _excused(self, stream: Stream) -> bool:
        """Its replica was killed while it wrote."""
        return any(
            fault.name == "SIGKILL" and stream.server == fault.victim and stream.started <= fault.struck <= stream.ended
            for fault in self.faults
        )


async def drill(engine: str, replicas: int, seconds: float, clients: int, *, restart: bool = True) -> dict[str, Any]:
    """Run it all. ``restart`` false: replicas that end stay away.

    Raises :class:`tests.support.debian.Unavailable` where no haproxy can be had, TimeoutError after :data:`LIMIT_S`.
    """
    with tempfile.TemporaryDirectory(prefix="medusa-drill-") as folder:
        async with asyncio.timeout(LIMIT_S), Rig(Path(folder), engine, replicas) as rig:
            run = Drill(rig, seconds, clients, restart)
            await run.run()
            return report(run.streams, run.faults, run.counted, run.broken)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drills.drill", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add(
        "--engine",
        default="tiny",
        help="'tiny': random weights; 'demo': the demo model; 'fake': no model; else a folder; default: tiny",
    )
    add("--replicas", type=int, default=3, help="default: %(default)s")
    add("--seconds", type=float, default=5.0, help="of load before and after each fault; default: %(default)g")
    add("--clients", type=int, default=6, help="streams at a time; default: %(default)s")
    add("--json", action="store_true", help="print one JSON object")
    add("--no-restart", action="store_true", help="leave the killed and the drained replica away")
    args = parser.parse_args()
    if args.replicas < 3:
        parser.error("--replicas must be at least 3: one is killed, one drained, one cut from Redis")
    try:
        done = asyncio.run(drill(args.engine, args.replicas, args.seconds, args.clients, restart=not args.no_restart))
    except Unavailable as error:
        print(f"no haproxy: {error}", file=sys.stderr)
        return 2
    except TimeoutError:
        print(f"not done within {LIMIT_S:g} s: this machine is too slow or too busy for it", file=sys.stderr)
        return 1
    return ended(done, show, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
