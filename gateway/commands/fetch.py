"""``medusa-gateway fetch``: bring a model and its heads onto this machine, before anything is served."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "fetch",
        help="bring a model and its heads into the cache",
        description="Bring a model and its heads into the cache from which `serve` loads them, without loading them. "
        "Safe to repeat, and to run in several processes on one cache.",
    )
    add = parser.add_argument
    add("--model", metavar="DIR_OR_ID", help="local folder or hub id; default: the demo model")
    add("--heads", metavar="DIR_OR_ID", help="Medusa heads; default: those that belong to the model")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from backends.demo import DemoModelError
    from backends.fetch import FetchError, fetch_heads, fetch_model
    from gateway.cli import CommandError

    try:
        print(f"model: {fetch_model(args.model)}", flush=True)
        if args.heads is not None:
            print(f"heads: {fetch_heads(args.heads)}", flush=True)
    except (FetchError, DemoModelError) as error:
        raise CommandError(str(error)) from error
    return 0
