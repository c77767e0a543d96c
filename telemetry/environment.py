"""The OTEL_* variables, read and checked before anything of OpenTelemetry is imported.

The SDK reads most of them by itself, some as early as its import, and meets a wrong one in its own way: a traceback, a
warning in the middle of its start, or an error at every export for as long as the gateway runs. Here each is refused
at the start, in one line that names it. Values are not quoted where they may hold a secret.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal, cast
from urllib.parse import unquote, urlsplit

Signal = Literal["traces", "metrics"]
Protocol = Literal["grpc", "http/protobuf"]

PROPAGATORS = ("tracecontext", "baggage")
"""Of a gateway that is not told otherwise."""
_SIGNALS: tuple[Signal, ...] = ("traces", "metrics")
_PROTOCOLS = ("grpc", "http/protobuf")
_SAMPLERS = ("always_on", "always_off", "traceidratio")
_EXPORTERS = {"traces": ("otlp", "none"), "metrics": ("otlp", "prometheus", "none")}
_COMPRESSIONS = {"grpc": ("gzip",), "http/protobuf": ("none", "gzip", "deflate")}
_OTHER_SCHEMES = ("unix", "dns", "ipv4", "ipv6")
"""How gRPC names a server beside host:port and http."""
# As the specification has them, with spaces in values for those that other SDKs take.
_HEADER = re.compile(r"""[!#-'*+\-.0-9A-Z^-z|~]+[ \t]*=[ !#-+\--:<-\[\]-~]*""")


class TelemetryError(ValueError):
    """An OTEL_* variable that can't be used; the message names it and says what can."""


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """What is exported, by which protocol; None: not at all. ``disabled``: not even ``/metrics``, and nothing else of
    the environment is read. ``propagators``: how traces are passed on. ``doubts``: what is probably not meant so.
    """

    traces: Protocol | None = None
    metrics: Protocol | None = None
    disabled: bool = False
    propagators: tuple[str, ...] = PROPAGATORS
    doubts: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> TelemetrySettings:
        """Raises :class:`TelemetryError`."""
        environment = dict(environment)
        drop_empty(environment)
        if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return cls(disabled=True)
        _check_sampler(environment)
        for name, check in _CHECKS.items():
            if name in environment:
                check(name, environment[name])
        protocols: dict[Signal, Protocol | None] = {signal: _export(environment, signal) for signal in _SIGNALS}
        exported: list[Signal] = [signal for signal in _SIGNALS if protocols[signal] is not None]
        return cls(
            traces=protocols["traces"],
            metrics=protocols["metrics"],
            propagators=_propagators(environment),
            doubts=_doubts(environment, exported),
        )


def drop_empty(environment: MutableMapping[str, str]) -> None:
    """Unset what is empty: the specification takes the two for the same, the SDK not always."""
    for name in [name for name, value in environment.items() if name.startswith("OTEL_") and not value.strip()]:
        del environment[name]


def _export(environment: Mapping[str, str], signal: Signal) -> Protocol | None:
    upper = signal.upper()
    name = f"OTEL_{upper}_EXPORTER"
    asked = [each.strip() for each in environment.get(name, "otlp").split(",") if each.strip()] or ["otlp"]
    for each in asked:
        _among(*_EXPORTERS[signal])(name, each)
    found = _given(environment, signal, "ENDPOINT")
    if "otlp" not in asked or found is None:
        return None
    protocol = _protocol(environment, signal)
    _check_endpoint(*found, protocol)
    if compression := _given(environment, signal, "COMPRESSION"):
        _among(*_COMPRESSIONS[protocol])(*compression)
    return protocol


def _protocol(environment: Mapping[str, str], signal: Signal) -> Protocol:
    name, protocol = _given(environment, signal, "PROTOCOL") or ("", "http/protobuf")
    _among(*_PROTOCOLS)(name, protocol)
    return cast(Protocol, protocol)


def _given(environment: Mapping[str, str], signal: Signal, what: str) -> tuple[str, str] | None:
    """Name and value of the variable that counts for ``signal``: its own, or the one for both."""
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}", f"OTEL_EXPORTER_OTLP_{what}"):
        if value := environment.get(name, "").strip():
            return name, value
    return None


def _check_endpoint(name: str, value: str, protocol: str) -> None:
    try:
        parts = urlsplit(value)
        host, scheme, _ = parts.hostname, parts.scheme, parts.port
    except ValueError:
        host, scheme = None, ""
    if scheme in ("http", "https") and host and not re.search(r"\s", value):
        return
    if protocol == "http/protobuf":
        raise TelemetryError(f"{name} must be a URL with http:// or https:// for {protocol}, as http://collector:4318")
    named_otherwise = scheme in _OTHER_SCHEMES or re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[\w.-]+)(:\d+)?", value)
    if not named_otherwise:
        raise TelemetryError(f"{name} must be a URL with http:// or https://, or host:port, as http://collector:4317")


def _doubts(environment: Mapping[str, str], exported: Sequence[Signal]) -> tuple[str, ...]:
    found = []
    for signal in exported:
        name = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
        if _protocol(environment, signal) == "http/protobuf" and (value := environment.get(name, "").strip()):
            path = urlsplit(value).path
            if path in ("", "/"):
                found.append(
                    f"{name} is used as it stands, and has no path: most collectors take {signal} at /v1/{signal} "
                    "(which is added to OTEL_EXPORTER_OTLP_ENDPOINT only)"
                )
    return tuple(found)


def _propagators(environment: Mapping[str, str]) -> tuple[str, ...]:
    given = environment.get("OTEL_PROPAGATORS", "").strip()
    if not given:
        return PROPAGATORS
    names = [each.strip().lower() for each in given.split(",")]
    known = sorted({*PROPAGATORS, *(each.name for each in entry_points(group="opentelemetry_propagator"))})
    for name in names:
        _among(*known, "none")("OTEL_PROPAGATORS", name)
    return () if "none" in names else tuple(names)


def _check_sampler(environment: Mapping[str, str]) -> None:
    # The SDK would warn and sample everything.
    sampler = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    if sampler and sampler.removeprefix("parentbased_") not in _SAMPLERS:
        _among(*_SAMPLERS, *(f"parentbased_{each}" for each in _SAMPLERS))("OTEL_TRACES_SAMPLER", sampler)
    if sampler.endswith("traceidratio"):
        text = environment.get("OTEL_TRACES_SAMPLER_ARG", "1.0")
        try:
            known = 0.0 <= float(text) <= 1.0
        except ValueError:
            known = False
        if not known:
            raise TelemetryError(f"OTEL_TRACES_SAMPLER_ARG is '{text[:40]}'; use a share from 0 to 1")


_Check = Callable[[str, str], None]


def _among(*choices: str) -> _Check:
    def check(name: str, value: str) -> None:
        if value.strip().lower() not in choices:
            entry = f"is '{value[:40]}'" if value.strip() else "has an empty entry"
            raise TelemetryError(f"{name} {entry}; use one of: {', '.join(choices)}")

    return check


def _whole(low: int, *words: str) -> _Check:
    def check(name: str, value: str) -> None:
        text = value.strip()
        if text.lower() in words or (re.fullmatch(r"[0-9]{1,18}", text) and int(text) >= low):
            return
        also = "".join(f", or {word}" for word in words)
        raise TelemetryError(f"{name} is '{value[:40]}'; use a whole number from {low} up{also}, or leave it out")

    return check


def _positive(name: str, value: str) -> None:
    try:
        good = 0.0 < float(value) < math.inf
    except ValueError:
        good = False
    if not good:
        raise TelemetryError(f"{name} is '{value[:40]}'; use a number over 0, or leave it out")


def _headers(name: str, value: str) -> None:
    # Values are keys and passwords, so they are told of by their place only.
    for number, each in enumerate(value.split(","), 1):
        entry = each.strip()
        if entry and not (_HEADER.fullmatch(entry) and unquote(entry).isascii() and unquote(entry).isprintable()):
            raise TelemetryError(f"{name}: entry {number} is no name=value of ASCII; write odd characters as %20")


def _file(name: str, value: str) -> None:
    try:
        with Path(value).open("rb"):
            pass
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else "no such path"
        raise TelemetryError(f"{name} names a file that can't be read: {words}") from None


_LIMITS = (
    *("OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"),
    *("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT"),
    *("OTEL_SPAN_EVENT_COUNT_LIMIT", "OTEL_SPAN_LINK_COUNT_LIMIT"),
    *("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT"),
)
_BATCHES = ("MAX_QUEUE_SIZE", "SCHEDULE_DELAY", "MAX_EXPORT_BATCH_SIZE", "EXPORT_TIMEOUT")
_FOR_ANY = ("OTEL_EXPORTER_OTLP", *(f"OTEL_EXPORTER_OTLP_{each.upper()}" for each in _SIGNALS))
_TEMPORALITY = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
_AGGREGATION = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
_CHECKS: dict[str, _Check] = {
    **{name: _whole(0, "unset") for name in _LIMITS},
    **{f"OTEL_BSP_{each}": _whole(1) for each in _BATCHES},
    "OTEL_METRIC_EXPORT_INTERVAL": _positive,
    "OTEL_METRIC_EXPORT_TIMEOUT": _positive,
    "OTEL_METRICS_EXEMPLAR_FILTER": _among("always_on", "always_off", "trace_based"),
    _TEMPORALITY: _among("cumulative", "delta", "lowmemory"),
    _AGGREGATION: _among("explicit_bucket_histogram", "base2_exponential_bucket_histogram"),
    **{f"{each}_TIMEOUT": _positive for each in _FOR_ANY},
    **{f"{each}_HEADERS": _headers for each in _FOR_ANY},
    **{f"{each}_{what}": _file for each in _FOR_ANY for what in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")},
}
