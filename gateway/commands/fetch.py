"""``medusa-gateway fetch``: bring a model and its heads onto this machine, before anything is served."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gateway.commands.engine_options import add_engine_options
from gateway.commands.errors import CommandError


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "fetch",
        help="bring a model and its heads into the cache",
        description="Bring a model and its heads into the cache from which `serve` loads them, without loading them. "
        "Safe to repeat, and to run in several processes on one cache.",
    )
    add = parser.add_argument
    add_engine_options(add, "--model", "--heads")
    add("--backends", metavar="FILE", help="the models and heads of all engines in a backends file, instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from backends.models.demo import DemoModelError
    from backends.models.fetch import FetchError, fetch_heads, fetch_model

    try:
        for model, heads in _wanted(args):
            print(f"model: {fetch_model(model)}", flush=True)
            if heads is not None:
                print(f"heads: {fetch_heads(heads)}", flush=True)
    except (FetchError, DemoModelError) as error:
        raise CommandError(str(error)) from error
    return 0


def _wanted(args: argparse.Namespace) -> list[tuple[str | None, str | None]]:
    """Model and heads of each engine, without repetitions."""
    if args.backends is None:
        return [(args.model, args.heads)]
    if args.model is not None or args.heads is not None:
        raise CommandError(f"--model and --heads exclude --backends: say it in {args.backends}.")

    from gateway.routing.backends_file import parse_backends
    from policy.config.problems import ConfigError

    try:
        spec = parse_backends(Path(args.backends).read_bytes(), args.backends)
    except ConfigError as error:
        raise CommandError(f"the backends file is refused: {error}") from None
    return list(dict.fromkeys((engine.options.model, engine.options.heads) for engine in spec.engines))
