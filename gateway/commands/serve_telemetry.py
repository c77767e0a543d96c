"""The options of ``serve`` about logs and telemetry, and what is made of them."""

from __future__ import annotations

import argparse
import logging
import os
from typing import TYPE_CHECKING

from gateway.commands.errors import CommandError

if TYPE_CHECKING:
    from telemetry.service import Telemetry


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "telemetry", "Metrics are at /metrics; traces and metrics are exported as the OTEL_* variables say."
    ).add_argument
    add("--log-format", choices=("text", "json"), default="text", help="default: %(default)s")
    levels = ("debug", "info", "warning", "error")
    add("--log-level", choices=levels, default="warning", help="info: one line a request; default: %(default)s")
    add(
        "--log-content",
        action="store_true",
        help="log prompts and answers, which is never done otherwise; needs --log-format json",
    )
    add(
        "--metrics-by-tenant",
        action="store_true",
        help="count requests and tokens by API key too, in series that name the keys",
    )


def configure_logs(args: argparse.Namespace) -> None:
    """Raises CommandError for options that contradict each other."""
    from backends.types import START_LOG
    from telemetry.logs import CONTENT_LOG, configure_logging

    if args.log_content and args.log_format != "json":
        raise CommandError("--log-content needs --log-format json: a prompt would be many lines of a text log.")
    configure_logging(args.log_format, args.log_level)
    if args.log_level != "error":
        # A start may take minutes, and whoever waits for it has not asked for a line a request.
        logging.getLogger(START_LOG).setLevel(logging.INFO)
    if args.log_content:
        logging.getLogger(CONTENT_LOG).setLevel(logging.INFO)


def open_telemetry(args: argparse.Namespace, instance: str) -> Telemetry:
    """Raises CommandError for OTEL_* variables that can't be used."""
    from gateway.version import package_version
    from telemetry.environment import TelemetryError, drop_empty
    from telemetry.service import Telemetry

    drop_empty(os.environ)
    try:
        return Telemetry.from_environment(
            os.environ,
            version=package_version(),
            instance=instance,
            log_content=args.log_content,
            by_tenant=args.metrics_by_tenant,
        )
    except TelemetryError as error:
        raise CommandError(str(error)) from None
