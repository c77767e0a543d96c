"""``medusa-gateway bench``: Medusa against vanilla decoding and transformers' generate, in one run."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure Medusa, vanilla and transformers' generate side by side",
        description="Contestants take turns on the same prompts; cells report medians over rounds.",
    )
    add = parser.add_argument
    add("--model", metavar="DIR_OR_ID", help="local folder or hub id; default: the demo model")
    add("--heads", metavar="DIR_OR_ID", help="Medusa heads; default: those that belong to the model")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="default: %(default)s")
    add("--runner", choices=("auto", "native", "transformers"), default="auto", help="default: %(default)s")
    add("--quick", action="store_true", help="concurrency 1, greedy, within 45 seconds")
    add("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    add("--concurrency", default="1,4,16", metavar="N,N", help="default: %(default)s")
    add("--temperature", default="0,0.7", metavar="T,T", help="default: %(default)s")
    add("--max-tokens", type=int, default=128, metavar="N", help="longest answer; default: %(default)s")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from backends.bench import BenchOptions, run_bench
    from backends.loading import EngineOptions
    from gateway.cli import CommandError

    engine = EngineOptions(
        model=args.model, heads=args.heads, device=args.device, dtype=args.dtype, runner=args.runner, max_model_len=1024
    )
    try:
        options = (
            BenchOptions.quick(engine)
            if args.quick
            else BenchOptions(
                engine,
                temperatures=tuple(float(part) for part in args.temperature.split(",")),
                concurrencies=tuple(int(part) for part in args.concurrency.split(",")),
                rounds=args.rounds,
                max_tokens=args.max_tokens,
            )
        )
        report = run_bench(options, progress=lambda line: print(line, file=sys.stderr, flush=True))
    except ValueError as error:
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps(report))
        return 0
    print("machine: " + ", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    columns = ("class", "temperature", "concurrency", "medusa_tps", "vanilla_tps", "generate_tps")
    columns += ("medusa_over_vanilla", "tokens_per_step", "nodes", "identical")
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for cell in report["cells"]:
        print("| " + " | ".join(str(cell[column]) for column in columns) + " |")
    return 0
