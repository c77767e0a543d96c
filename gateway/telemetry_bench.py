"""What telemetry costs: one engine behind gateways with and without it, which take turns under the same load.

The client is a process of its own, as clients are. Each turn has a fresh gateway (controller, telemetry, app), so that
none inherits another's statistics; starting and ending it is not measured. With telemetry on, spans and metrics are
exported every second, `/metrics` is scraped every five and every request is logged as JSON: more than the defaults.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from backends.bench_prompts import PROMPTS
from backends.types import ChatTokenizer, Decoder
from gateway.controller import Controller
from gateway.routing.backends import ServedModel
from gateway.server import GatewayServer, bind, url_of
from gateway.state import GatewayState
from policy.runtime import PolicyRuntime
from telemetry.logs import REQUEST_LOG, JsonFormatter
from telemetry.service import Telemetry

VARIANTS = ("none", "full", "black hole")
SCRAPE_EVERY_S = 5.0
_START_S = 60.0
_POLICY = b"version: 1\ndefaults: {method: medusa}\n"
"""Neither control group nor fallback: what is decoded how must not differ between turns."""
_EXPORT = {
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_TRACES_SAMPLER": "always_on",
    "OTEL_BSP_SCHEDULE_DELAY": "1000",
    "OTEL_METRIC_EXPORT_INTERVAL": "1000",
}


@dataclass(frozen=True, slots=True)
class Load:
    """``streams`` at once, each of ``requests`` streamed answers of ``max_tokens`` tokens, one after the other."""

    streams: int = 16
    requests: int = 3
    max_tokens: int = 96


def run_telemetry_bench(
    decoder: Decoder,
    tokenizer: ChatTokenizer,
    load: Load,
    rounds: int,
    progress: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """``{machine, cells: [...]}``; ``ratio``: the median over rounds of tokens/s against "none" in the same round."""
    served = ServedModel(decoder, tokenizer)
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with ExitStack() as opened:
        context = multiprocessing.get_context("spawn")
        client = opened.enter_context(ProcessPoolExecutor(1, mp_context=context))
        endpoints = {"full": opened.enter_context(_sink()), "black hole": opened.enter_context(_black_hole())}

        def turn(name: str, load: Load) -> float:
            with _telemetry(endpoints.get(name)) as telemetry, _gateway(served, telemetry) as url:
                return client.submit(drive, url, decoder.info.name, load, name != "none").result()

        turn("none", Load(load.streams, 1, 16))  # first touch of everything
        for number in range(rounds):
            # Another one begins each round.
            for name in VARIANTS[number % 3 :] + VARIANTS[: number % 3]:
                rates[name].append(turn(name, load))
                progress(f"round {number + 1}/{rounds}, telemetry {name}: {rates[name][-1]:.1f} tokens/s")
    info = decoder.info
    return {
        "machine": {"cpus": os.cpu_count(), "model": info.name, "dtype": info.dtype, "device": info.device},
        "load": {"streams": load.streams, "requests": load.requests, "max_tokens": load.max_tokens, "rounds": rounds},
        "cells": [
            {
                "telemetry": name,
                "tokens_per_s": round(statistics.median(found), 1),
                "ratio": round(statistics.median(a / b for a, b in zip(found, rates["none"], strict=True)), 4),
                "rounds": [round(rate, 1) for rate in found],
            }
            for name, found in rates.items()
        ],
    }


def drive(url: str, model: str, load: Load, scrape: bool) -> float:
    """Tokens a second over all streams, measured by the client, from the first request to the last answer."""
    return asyncio.run(_drive(url, model, load, scrape))


async def _drive(url: str, model: str, load: Load, scrape: bool) -> float:
    import httpx

    prompts = [prompt for each in zip(*PROMPTS.values(), strict=False) for prompt in each]

    async def stream(http: httpx.AsyncClient, number: int) -> int:
        tokens = 0
        for turn in range(load.requests):
            prompt = prompts[(number * load.requests + turn) % len(prompts)]
            body = {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": load.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            last = ""
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        last = line
            tokens += json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]
        return tokens

    async def scraping(http: httpx.AsyncClient) -> None:
        while True:
            (await http.get("/metrics")).raise_for_status()
            await asyncio.sleep(SCRAPE_EVERY_S)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as http:
        scraper = asyncio.ensure_future(scraping(http)) if scrape else None
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(stream(http, number) for number in range(load.streams))))
        seconds = time.perf_counter() - began
        if scraper is not None:
            scraper.cancel()
    return tokens / seconds


@contextmanager
def _gateway(served: ServedModel, telemetry: Telemetry) -> Iterator[str]:
    state = GatewayState.create(
        {served.decoder.info.name: served}, controller=Controller(PolicyRuntime.from_text(_POLICY)), telemetry=telemetry
    )
    bound, ready = bind("127.0.0.1", 0), threading.Event()
    server = GatewayServer(state, on_ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    if not ready.wait(_START_S):
        raise RuntimeError("the gateway to be measured did not start; its log says why")
    try:
        yield url_of(bound)
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


@contextmanager
def _telemetry(endpoint: str | None) -> Iterator[Telemetry]:
    """As ``serve`` would make it of an environment that names ``endpoint``; None: switched off."""
    if endpoint is None:
        yield Telemetry.off()
        return
    environment = {**_EXPORT, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    before = {name: os.environ.get(name) for name in environment}
    logger, log = logging.getLogger(REQUEST_LOG), open(os.devnull, "w")  # noqa: SIM115
    handler = logging.StreamHandler(log)
    handler.setFormatter(JsonFormatter())
    # What an exporter says of a black hole is no news here.
    exporters = logging.getLogger("opentelemetry")
    levels = logger.level, exporters.level
    os.environ.update(environment)
    try:
        telemetry = Telemetry.from_environment(os.environ, version="bench", instance="bench")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        exporters.setLevel(logging.CRITICAL)
        yield telemetry
        telemetry.shutdown(1.0)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(levels[0])
        exporters.setLevel(levels[1])
        log.close()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _sink() -> Iterator[str]:
    """An OTLP receiver in a process of its own that takes everything and forgets it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def _receive(ready: Any) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    ready.send(server.server_port)
    server.serve_forever()


class _Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing to say."""


@contextmanager
def _black_hole() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(512)
        yield f"http://127.0.0.1:{hole.getsockname()[1]}"
