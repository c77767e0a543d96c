"""``medusa-gateway``: one subcommand per module in ``gateway.commands``."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from importlib import util

from gateway.commands.engine_options import refuse_missing_folders
from gateway.commands.errors import CommandError
from gateway.version import package_version

COMMANDS = (
    *("serve", "backends", "fetch", "policy", "keys", "alerts"),
    *("heads", "classifier", "classify", "verify_lossless", "bench"),
)
"""Modules of ``gateway.commands``. Each has ``add_parser(subparsers)``, sets ``run`` and imports nothing heavy."""


def available_commands() -> tuple[str, ...]:
    """The commands of this installation, in the order in which help lists them."""
    return tuple(name for name in COMMANDS if util.find_spec(f"gateway.commands.{name}") is not None)


def build_parser(commands: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-gateway",
        description="OpenAI-compatible LLM gateway that decodes with Medusa trees where they pay.",
    )
    parser.add_argument("--version", action="version", version=f"medusa-gateway {package_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name in commands:
        importlib.import_module(f"gateway.commands.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: the command's own, 2 for a mistake in how it was called, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = available_commands()
    # Only the module that is asked for is imported, so a broken one doesn't stop the others.
    asked = arguments[0].replace("-", "_") if arguments else ""
    try:
        parsed = build_parser([asked] if asked in commands else commands).parse_args(arguments)
        refuse_missing_folders(parsed)
        return int(parsed.run(parsed) or 0)
    except CommandError as error:
        return _told(str(error))
    except OSError as error:
        return _told(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        # argparse prints its own line and brings 2; a message instead of a number is what sys.exit("...") brings.
        if isinstance(stop.code, str):
            return _told(stop.code)
        return stop.code or 0
    except Exception:
        logs = sys.modules.get("telemetry.logs")
        if logs is None or not logs.speaks_json():
            raise
        # In the form of the log, as all else.
        logging.getLogger("gateway").critical("ended by an error that nobody foresaw", exc_info=True)
        return 1


def _told(message: str) -> int:
    told = f"medusa-gateway: error: {' '.join(message.split())}"
    if logs := sys.modules.get("telemetry.logs"):
        # Whoever set up a log of JSON lines reads nothing else.
        told = logs.line_for(logging.CRITICAL, told)
    print(told, file=sys.stderr)
    return 2
