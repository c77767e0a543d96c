"""``medusa-gateway keys``: make, hash, list and check API keys. Needs no gateway."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gateway.commands.errors import CommandError
from gateway.commands.validating import read_input, validate_files

if TYPE_CHECKING:
    from gateway.auth.keyfile import ApiKey, KeySet


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "keys", help="make, hash, list and check API keys", description="Work with files of API keys."
    )
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)

    new = actions.add_parser(
        "new",
        help="make a key",
        description="Prints the entry for a key file on standard output and the key, this once, on standard error: "
        "'keys new alice >> keys.yaml' adds to a file that ends with 'keys:' or an entry.",
    )
    add = new.add_argument
    add("name", metavar="NAME", help="the tenant: seen in policies, decisions and logs")
    add("--scope", action="append", choices=("inference", "admin"), help="may be repeated; default: inference")
    add("--expires", metavar="WHEN", help="2027-01-31 or 2027-01-31T18:00:00Z; default: never")
    names = ("requests-per-minute", "tokens-per-minute", "concurrent-streams", "tokens-per-day", "tokens-per-month")
    for name in names:
        add(f"--{name}", type=int, metavar="N", help="default: no limit")
    add("--json", action="store_true", help="print key and entry as one JSON object on standard output")
    new.set_defaults(run=run_new)

    hashing = actions.add_parser("hash", help="print the digest of a key that is read from standard input")
    hashing.set_defaults(run=run_hash)

    listing = actions.add_parser("list", help="print the keys of a file: names, scopes, limits, state")
    listing.add_argument("file", metavar="FILE")
    listing.add_argument("--json", action="store_true", help="print them as JSON")
    listing.set_defaults(run=run_list)

    validate = actions.add_parser("validate", help="check files; status 1 if any is refused")
    validate.add_argument("files", nargs="+", metavar="FILE", help="- for standard input")
    validate.set_defaults(run=run_validate)

    schema = actions.add_parser("schema", help="print the JSON Schema of key files, for editors")
    schema.set_defaults(run=run_schema)


def run_new(args: argparse.Namespace) -> int:
    from gateway.auth.keyfile import KeyFileError, new_key, parse_keys, written_digest
    from policy.limits.arithmetic import KeyLimits

    key = new_key()
    entry: dict[str, Any] = {"name": args.name, "hash": written_digest(key), "scopes": args.scope or ["inference"]}
    if args.expires is not None:
        entry["expires"] = args.expires
    names = (field.name for field in fields(KeyLimits))
    if limits := {name: value for name in names if (value := getattr(args, name)) is not None}:
        entry["limits"] = limits
    try:
        # JSON is YAML: what a gateway would refuse is refused here, in its words.
        parse_keys(json.dumps({"version": 1, "keys": [entry]}).encode(), "new key")
    except KeyFileError as error:
        raise CommandError("; ".join(each.message for each in error.problems)) from None
    if args.json:
        print(json.dumps({"key": key, "entry": entry}))
        return 0
    lines = [f"{name}: {json.dumps(value)}" for name, value in entry.items()]
    print("  - " + "\n    ".join(lines))
    print(f"The key of {args.name}, shown this once: {key}", file=sys.stderr)
    return 0


def run_hash(args: argparse.Namespace) -> int:
    from gateway.auth.keyfile import LEAST_CHARS, written_digest

    key = sys.stdin.readline().strip()
    if len(key) < LEAST_CHARS:
        raise CommandError(
            f"a key needs {LEAST_CHARS} random characters or more, since it is hashed without salt; "
            "'medusa-gateway keys new' makes one"
        )
    print(written_digest(key))
    return 0


def run_list(args: argparse.Namespace) -> int:
    from gateway.auth.keyfile import KeyFileError

    try:
        keys = _load(args.file).keys
    except KeyFileError as error:
        raise CommandError(str(error)) from None
    rows = [_row(key, time.time()) for key in keys]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        limits = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in row["limits"].items()) or "no limits"
        expires = f", expires {row['expires']}" if row["expires"] else ""
        print(f"{row['name']}: {row['state']}, {' and '.join(row['scopes'])}, {limits}{expires}")
    return 0


def run_validate(args: argparse.Namespace) -> int:
    def summary(name: str) -> str:
        keys = _load(name)
        return f"version {keys.version}, {len(keys.keys)} keys"

    return validate_files(args.files, summary)


def run_schema(args: argparse.Namespace) -> int:
    from gateway.auth.keyfile import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _load(name: str) -> KeySet:
    """Raises KeyFileError or OSError."""
    from gateway.auth.keyfile import parse_keys

    return parse_keys(read_input(name), name)


def _row(key: ApiKey, now: float) -> dict[str, Any]:
    limits = {name: getattr(key.limits, name) for name in type(key.limits).__slots__}
    return {
        "name": key.name,
        "state": "disabled" if key.disabled else "expired" if key.expired(now) else "in force",
        "scopes": sorted(key.scopes),
        "limits": {name: value for name, value in limits.items() if value is not None},
        "expires": None if key.expires_at is None else datetime.fromtimestamp(key.expires_at, UTC).isoformat(),
    }
