"""``medusa-gateway backends``: check a backends file, and print its JSON Schema."""

from __future__ import annotations

import argparse
import json
from typing import Any

from gateway.commands.validating import read_input, validate_files


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "backends", help="check backends files", description="Check what `serve --backends` would read."
    )
    commands = parser.add_subparsers(dest="what", metavar="what", required=True)
    validate = commands.add_parser("validate", help="check files; exit 1 if any is refused")
    validate.add_argument("files", nargs="+", metavar="FILE", help="- for standard input")
    validate.set_defaults(run=run_validate)
    schema = commands.add_parser("schema", help="print the JSON Schema of a backends file, for editors")
    schema.set_defaults(run=run_schema)


def run_validate(args: argparse.Namespace) -> int:
    from gateway.routing.backends_file import parse_backends

    def summary(name: str) -> str:
        spec = parse_backends(read_input(name), name)
        return f"{len(spec.engines)} engines and {len(spec.upstreams)} upstreams"

    return validate_files(args.files, summary)


def run_schema(args: argparse.Namespace) -> int:
    from gateway.routing.backends_file import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
