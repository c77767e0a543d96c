"""Logs as text for people or as JSON for machines, both to standard error, and with the trace they belong to."""

from __future__ import annotations

import json
import logging
import re
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


QUIET: dict[str, int] = {
    # They log every URL that is asked for, and headers: both may hold secrets. Whatever level is asked for.
    **dict.fromkeys(("httpx", "httpcore", "urllib3", "h11", "hpack", "grpc"), logging.WARNING),
    # It warns at every start on a machine without a GPU.
    "torchao.kernel.intmm": logging.ERROR,
}
"""Loggers of libraries, and the least that they may say."""

_SECRETS = re.compile(
    r"""(?<=://)[^\s/@'"]+@"""  # user and password of a URL
    r"""|\?[^\s'"<>()?=]+=[^\s'"<>()]*"""  # its query
    r"""|(?<=with url: )[^\s()]+"""  # what urllib3 could not reach, without scheme and host
)


def without_secrets(text: str) -> str:
    """The same without what URLs in it may hold of secrets. Libraries quote URLs in errors that nobody foresees."""
    return _SECRETS.sub(lambda found: "?***" if found[0][0] == "?" else "***@" if found[0][-1] == "@" else "***", text)


class TextFormatter(logging.Formatter):
    """Lines for people."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


class JsonFormatter(logging.Formatter):
    """One object a line: timestamp (RFC 3339, UTC), level, logger, message, ids of the present span if there is one,
    the ``fields`` that the caller gave in ``extra``, and the traceback of an exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace_id"] = trace.format_trace_id(context.trace_id)
            line["span_id"] = trace.format_span_id(context.span_id)
            line["trace_flags"] = f"{context.trace_flags:02x}"
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the moment. The one of earlier may be closed: whoever replaced it, such as a
    test that captures it, takes it away again."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def configure_logging(form: LogFormat, level: str, stream: TextIO | None = None) -> None:
    """Set up the root logger, in place of whatever it had. ``level``: a name such as "warning"."""
    handler = StderrHandler() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, least in QUIET.items():
        logging.getLogger(name).setLevel(least)


def speaks_json() -> bool:
    """Whether the log is JSON lines by now, so that nothing else should be printed."""
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers)


def line_for(level: int, message: str) -> str:
    """What is printed rather than logged (where the gateway listens, why it can't start), in the form of the log."""
    if not speaks_json():
        return without_secrets(message)
    return JsonFormatter().format(logging.LogRecord("gateway", level, "", 0, "%s", (message,), None))
