"""The options of ``serve`` that say who may ask, and from where."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from gateway.auth.access import Access, open_keys
from gateway.auth.keyfile import KeyFileError
from gateway.commands.errors import CommandError
from gateway.settings import GatewaySettings, is_loopback

KEYS_VARIABLE = "MEDUSA_API_KEYS"


def add_options(parser: argparse.ArgumentParser, own: GatewaySettings) -> None:
    add = parser.add_argument_group("access").add_argument
    add(
        "--api-keys",
        metavar="FILE",
        help="keys that may ask, watched for edits; see 'medusa-gateway keys' and docs/security.md "
        f"(default: {KEYS_VARIABLE}, else no keys, and loopback addresses only)",
    )
    add(
        "--insecure-no-auth",
        "--insecure-allow-remote",
        dest="insecure_no_auth",
        action="store_true",
        help="without keys, listen on an address that others can reach all the same",
    )
    add("--admin-port", type=int, metavar="PORT", help="serve /admin and /metrics on this port, and only there")
    add("--admin-host", default="127.0.0.1", metavar="HOST", help="where the admin port is; default: %(default)s")
    add(
        "--cors-origin",
        action="append",
        default=[],
        type=_origin,
        metavar="URL",
        help="a web site whose pages may ask, such as https://chat.example.com; may be repeated; default: none",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        type=_host,
        metavar="NAME",
        help="without keys, a further host name that requests may name, such as box.lan; may be repeated",
    )
    most = "of a request's line and headers together; default: %(default)s"
    add("--max-header-bytes", type=int, metavar="BYTES", default=own.max_header_bytes, help=most)
    patience = "what a client gets to send its headers; default: %(default)g"
    add("--header-timeout", type=seconds, metavar="SECONDS", default=own.header_timeout_s, help=patience)
    patience = "what a client gets to send its body; default: %(default)g"
    add("--body-timeout", type=seconds, metavar="SECONDS", default=own.body_timeout_s, help=patience)
    patience = "how long an idle connection is kept; longer than the load balancer's; default: %(default)g"
    add("--keep-alive", type=seconds, metavar="SECONDS", default=own.keep_alive_s, help=patience)


def open_access(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Access:
    """Who may ask, by the options. Raises CommandError for what is unsafe or can't be read."""
    path = args.api_keys or environ.get(KEYS_VARIABLE)
    hosts = [("--host", args.host)]
    if args.admin_port is not None:
        if not 1 <= args.admin_port <= 65535 or args.admin_port == args.port:
            raise CommandError(f"--admin-port {args.admin_port} must be from 1 to 65535 and not that of --port")
        hosts.append(("--admin-host", args.admin_host))
    remote = [f"{flag} {host}" for flag, host in hosts if not is_loopback(host)]
    if path:
        try:
            keys = open_keys(Path(path), time.time())
        except OSError as error:
            raise CommandError(f"--api-keys {path}: {error.strerror or error}") from None
        except KeyFileError as error:
            raise CommandError(f"the key file is refused: {error}") from None
        return Access(keys, admin_port=args.admin_port, local=is_loopback(args.host))
    if remote and not args.insecure_no_auth:
        raise CommandError(
            f"{' and '.join(remote)} can be reached from other machines, and there are no API keys: give "
            f"--api-keys FILE or {KEYS_VARIABLE} (make one with 'medusa-gateway keys new'), keep to 127.0.0.1, or add "
            "--insecure-no-auth if everybody who can reach it may use and administer it."
        )
    return Access(
        admin_port=args.admin_port,
        local=not remote and not args.insecure_no_auth,
        allowed_hosts=args.allowed_host,
    )


def seconds(text: str) -> float:
    """An argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.001 to 86400")
    return value


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a host name: give it without scheme and port, such as box.lan"
        )
    return text


def _origin(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or text != f"{parts.scheme}://{parts.netloc}".lower():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an origin: a scheme, a host in lower case and maybe a port, such as https://chat.example.com"
        )
    if "*" in text or "@" in text:
        raise argparse.ArgumentTypeError(f"{text!r}: name every origin by itself")
    return text
