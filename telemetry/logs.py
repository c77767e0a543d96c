"""Logs as text for people or as JSON for machines, both to standard error, and with the trace they belong to."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from opentelemetry import trace

LogFormat = Literal["text", "json"]
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

REQUEST_LOG = "gateway.requests"
"""One line a request, at INFO, without prompt and answer."""
CONTENT_LOG = "gateway.content"
"""Prompts and answers. Nothing is written to it unless the operator asks for that by name."""


class JsonFormatter(logging.Formatter):
    """One object a line: timestamp (RFC 3339, UTC), level, logger, message, ids of the present span if there is one,
    the ``fields`` that the caller gave in ``extra``, and the traceback of an exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace_id"] = trace.format_trace_id(context.trace_id)
            line["span_id"] = trace.format_span_id(context.span_id)
            line["trace_flags"] = f"{context.trace_flags:02x}"
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(form: LogFormat, level: str, stream: TextIO | None = None) -> None:
    """Set up the root logger, in place of whatever it had. ``level``: a name such as "warning"."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
