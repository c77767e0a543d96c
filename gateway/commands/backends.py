"""``medusa-gateway backends``: check a backends file, and print its JSON Schema."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "backends", help="check backends files", description="Check what `serve --backends` would read."
    )
    commands = parser.add_subparsers(dest="what", metavar="what", required=True)
    validate = commands.add_parser("validate", help="check files; exit 1 if any is refused")
    validate.add_argument("files", nargs="+", metavar="FILE")
    validate.set_defaults(run=run_validate)
    schema = commands.add_parser("schema", help="print the JSON Schema of a backends file, for editors")
    schema.set_defaults(run=run_schema)


def run_validate(args: argparse.Namespace) -> int:
    from gateway.routing.file import parse_backends
    from policy.problems import PolicyError

    refused = False
    for file in args.files:
        try:
            spec = parse_backends(Path(file).read_bytes(), file)
        except PolicyError as error:
            refused = True
            print("\n".join(error.lines()))
        else:
            print(f"{file}: ok, {len(spec.engines)} engines and {len(spec.upstreams)} upstreams")
    return int(refused)


def run_schema(args: argparse.Namespace) -> int:
    from gateway.routing.file import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
