"""``medusa-gateway bench``: Medusa against vanilla decoding and transformers' generate, in one run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from backends.engine.options import EngineOptions
from gateway.commands.bench_peers import add_options as add_peers_options
from gateway.commands.bench_peers import misplaced, run_load_command, run_peers_command, run_prompts_command
from gateway.commands.engine_options import add_engine_options, given_options
from gateway.commands.errors import CommandError

_ROUNDS = 3
_KINDS = ("decoding", "sweep", "structured", "prefix", "telemetry", "host", "peers", "load", "prompts", "misclassified")


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure Medusa, vanilla and transformers' generate side by side",
        description="Contestants take turns on the same prompts; cells report medians over rounds. `bench sweep` "
        "compares adaptive decoding with vanilla and static trees over classes and loads instead; `bench structured` "
        "measures answers by JSON schema; `bench prefix` conversations with and without the prefix cache; "
        "`bench telemetry` "
        "compares a gateway with full telemetry, and with an exporter that reaches nobody, with one without; "
        "`bench host` measures the engine's own share of a step, with the device stubbed out; "
        "`bench misclassified` decodes each class's prompts by the plan of each other class; "
        "`bench peers` compares with other engines, as `make peers` installs them; `bench load` does so over HTTP; "
        "`bench prompts` brings a public benchmark's prompts from where you say.",
    )
    add = parser.add_argument
    add("what", nargs="?", choices=_KINDS, default="decoding", help="default: %(default)s")
    add_engine_options(add, "--model", "--heads", "--device", "--dtype", "--runner", "--quantize")
    add("--quick", action="store_true", help="concurrency 1, greedy, within 45 seconds; of peers about 80")
    rounds = "default: 3; of telemetry 24; of prefix 8 conversations; of the host 100 steps"
    add("--rounds", type=int, metavar="N", help=rounds)
    add(
        "--concurrency",
        type=_integers,
        metavar="N,N",
        help="default: 1,4,16; of the sweep 1,2,4,8,16,32; of telemetry 16; of the host 1,16,64,256; of misclassified "
        "1,4",
    )
    add("--temperature", type=_numbers, metavar="T,T", help="of decoding only; default: 0,0.7")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="longest answer; default: 128; of telemetry 64, of peers 32, of misclassified 64, else 48",
    )
    add("--policy", metavar="FILE", help="of telemetry only; default: vanilla decoding, the same steps for all")
    add(
        "--export-every",
        type=float,
        metavar="SECONDS",
        help="of telemetry only: how often spans and metrics are exported; default: 5",
    )
    add("--json", action="store_true", help="print one JSON object")
    add_peers_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.quick and args.what not in ("decoding", "peers"):
        raise CommandError(f"--quick is not for bench {args.what}; use --rounds 1 and --concurrency instead")
    for flag in ("policy", "export_every"):
        if getattr(args, flag) is not None and args.what != "telemetry":
            raise CommandError(f"--{flag.replace('_', '-')} is only for bench telemetry, not for bench {args.what}")
    if problem := misplaced(args):
        raise CommandError(problem)
    try:
        if args.what == "peers":
            return run_peers_command(args, _progress)
        if args.what == "load":
            return run_load_command(args, _progress)
        if args.what == "prompts":
            return run_prompts_command(args)
        report = _BENCHES[args.what](args)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps(report))
        return 0
    print("machine: " + ", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    columns = list(report["cells"][0])
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for cell in report["cells"]:
        print("| " + " | ".join(str(cell[column]) for column in columns) + " |")
    for name, value in report.items():
        if name not in ("machine", "cells", "cost_ms"):
            print(f"{name}: {value}")
    return 0


def _decoding(args: argparse.Namespace) -> dict[str, Any]:
    from backends.bench.decoding import BenchOptions, run_bench

    if args.quick:
        return run_bench(BenchOptions.quick(_engine(args)), _progress)
    options = BenchOptions(
        _engine(args),
        temperatures=args.temperature or (0.0, 0.7),
        concurrencies=args.concurrency or (1, 4, 16),
        rounds=args.rounds or _ROUNDS,
        max_tokens=args.max_tokens or 128,
    )
    return run_bench(options, _progress)


def _sweep(args: argparse.Namespace) -> dict[str, Any]:
    from backends.bench.load_sweep import SweepOptions, run_sweep

    options = SweepOptions(
        _engine(args),
        concurrencies=args.concurrency or (1, 2, 4, 8, 16, 32),
        rounds=args.rounds or _ROUNDS,
        max_tokens=args.max_tokens or 48,
    )
    return run_sweep(options, _progress)


def _structured(args: argparse.Namespace) -> dict[str, Any]:
    from backends.bench.structured import StructuredOptions, run_structured

    options = StructuredOptions(_engine(args), rounds=args.rounds or _ROUNDS, max_tokens=args.max_tokens or 128)
    return run_structured(options, _progress)


def _prefix(args: argparse.Namespace) -> dict[str, Any]:
    from backends.bench.prefix import PrefixOptions, run_prefix

    usual = PrefixOptions()
    engine = replace(given_options(args), max_model_len=4096, kv_tokens=16_384)
    return run_prefix(
        replace(
            usual,
            engine=engine,
            conversations=args.rounds or usual.conversations,
            max_tokens=args.max_tokens or usual.max_tokens,
        ),
        _progress,
    )


def _misclassified(args: argparse.Namespace) -> dict[str, Any]:
    from gateway.bench.misclassified import MisclassifiedOptions, run_misclassified

    options = MisclassifiedOptions(
        _engine(args),
        concurrencies=args.concurrency or (1, 4),
        rounds=args.rounds or _ROUNDS,
        max_tokens=args.max_tokens or 64,
    )
    return run_misclassified(options, _progress)


def _telemetry(args: argparse.Namespace) -> dict[str, Any]:
    if args.concurrency is not None and len(args.concurrency) > 1:
        raise ValueError("--concurrency of bench telemetry is one number, such as 16")
    if args.runner != "auto":
        raise ValueError("--runner is not for bench telemetry, which measures `medusa-gateway serve`")
    from gateway.bench.telemetry.load import Load
    from gateway.bench.telemetry.run import TelemetryBench, run_telemetry_bench

    given = {f"--{name}": getattr(args, name) for name in ("model", "heads", "device", "dtype")}
    usual = TelemetryBench()
    bench = TelemetryBench(
        Load(
            usual.load.streams if args.concurrency is None else args.concurrency[0],
            args.max_tokens or usual.load.max_tokens,
        ),
        rounds=args.rounds or usual.rounds,
        generations=min(args.rounds or usual.rounds, usual.generations),
        engine=[part for flag, value in given.items() if value is not None for part in (flag, value)],
        policy=args.policy,
        export_every_s=usual.export_every_s if args.export_every is None else args.export_every,
    )
    try:
        return run_telemetry_bench(bench, _progress)
    except RuntimeError as error:  # a gateway that doesn't start says what is to be mended
        raise ValueError(str(error)) from error


def _host(args: argparse.Namespace) -> dict[str, Any]:
    for flag in ("model", "heads", "quantize", "max_tokens"):
        if getattr(args, flag, None) is not None:
            raise ValueError(f"--{flag.replace('_', '-')} is not for bench host, which runs no model")
    from backends.bench.host import HostOptions, run_host

    usual = HostOptions()
    options = HostOptions(
        sequences=args.concurrency or usual.sequences, steps=usual.steps if args.rounds is None else args.rounds
    )
    return run_host(options, _progress)


_BENCHES = {
    "decoding": _decoding,
    "sweep": _sweep,
    "structured": _structured,
    "prefix": _prefix,
    "telemetry": _telemetry,
    "host": _host,
    "misclassified": _misclassified,
}


def _engine(args: argparse.Namespace) -> EngineOptions:
    return replace(given_options(args), max_model_len=1024)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _integers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive whole numbers such as 1,4,16")
    return found


def _numbers(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= value <= 2 for value in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of temperatures such as 0,0.7")
    return found
