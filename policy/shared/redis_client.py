"""From a URL to a redis-py client: standalone, Sentinel, Cluster, Unix socket, with TLS and authentication."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

TIMEOUT_S = 2.0
"""Of one command. It only ever holds up the statistics, never a request."""
_MOST_SAID = 300

Kind = Literal["standalone", "sentinel", "cluster", "unix"]
FORMS = (
    "redis://host:port/db, rediss://... (TLS), unix:///path, redis+sentinel://host:port,host:port/service, "
    "redis+cluster://host:port,host:port"
)
_KINDS: dict[str, tuple[Kind, bool]] = {
    "redis": ("standalone", False),
    "rediss": ("standalone", True),
    "unix": ("unix", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
# Not quoted: the rest of a password that is not written so stands where host and database should be.
_ENCODE = "in a password write '/' as %2F, '?' as %3F, '#' as %23 and '@' as %40"
_OPTIONS = ("db", "namespace", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")


class StoreUnavailable(Exception):
    """The store did not answer, or not as a store should. What the call did is unknown."""


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """A parsed URL. ``str()`` shows no password, so that it can be logged."""

    kind: Kind
    tls: bool
    hosts: tuple[tuple[str, int], ...] = ()
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    service: str = ""
    path: str = ""
    namespace: str = "medusa"
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix://{self.path}"
        scheme = ("rediss" if self.tls else "redis") + ("" if self.kind == "standalone" else f"+{self.kind}")
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{scheme}://{hosts}/{self.service or self.db}"


def parse_redis_url(url: str) -> RedisTarget:
    """Raises ValueError, without the password in it, for a URL that can't be used."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _KINDS:
        raise ValueError(f"a Redis URL has one of these forms: {FORMS}")
    kind, tls = _KINDS[scheme]
    # urlsplit knows one host only; several are taken apart by hand.
    parts = urlsplit(f"//{rest}")
    options = dict(parse_qsl(parts.query))
    allowed = (*_OPTIONS, *_SENTINEL_OPTIONS) if kind == "sentinel" else _OPTIONS
    for name in options:
        if name not in allowed:
            raise ValueError(f"a Redis URL of this form takes no '{name}'; it takes {', '.join(allowed)}")
    namespace = options.pop("namespace", "medusa")
    if not namespace.replace("-", "").replace("_", "").isalnum():
        raise ValueError("namespace must be letters, digits, '-' and '_'")
    if kind == "unix":
        if not parts.path or parts.netloc:
            raise ValueError("a Unix socket is named with three slashes: unix:///run/redis.sock")
        return RedisTarget(kind, tls, path=unquote(parts.path), db=_number(options.pop("db", "0"), "db"),
                           namespace=namespace, options=tuple(options.items()))  # fmt: skip
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, colon, password = credentials.partition(":")
    path = [unquote(each) for each in parts.path.split("/") if each]
    service = ""
    if kind == "sentinel":
        if not path:
            raise ValueError("a Sentinel URL names the service: redis+sentinel://host:port,host:port/SERVICE")
        service = path.pop(0)
    db = _number(path.pop(0) if path else options.pop("db", "0"), "db")
    options.pop("db", None)
    if path:
        raise ValueError("there is too much after the host: give /db, or for Sentinel /service/db")
    if kind == "cluster" and db:
        raise ValueError("a Redis Cluster has no databases but 0")
    return RedisTarget(
        kind,
        tls,
        hosts=tuple(_host(each, 26379 if kind == "sentinel" else 6379) for each in (hosts or "localhost").split(",")),
        username=unquote(username) or None,
        password=unquote(password) if colon else None,
        db=db,
        service=service,
        namespace=namespace,
        options=tuple(options.items()),
    )


def with_password(url: str, password: str) -> str:
    """``url`` with a password, which may hold any character; one that the URL has itself counts.

    Raises ValueError for a Unix socket, which is protected by its file mode and is asked no password.
    """
    scheme, separator, rest = url.partition("://")
    if _KINDS.get(scheme, ("standalone", False))[0] == "unix":
        raise ValueError("a Unix socket takes no password")
    # Of several hosts too, only the first has credentials before it.
    authority = rest.partition("/")[0].partition("?")[0]
    credentials, _, hosts = authority.rpartition("@")
    if not separator or ":" in credentials:
        return url
    return f"{scheme}://{credentials}:{quote(password, safe='')}@{hosts}{rest[len(authority) :]}"


def connect(target: RedisTarget) -> Redis | RedisCluster:
    """A client; nothing is sent yet.

    No retries below the caller's own loop: a client that keeps asking a dead Sentinel master finds the new one late.
    """
    options: dict[str, Any] = dict(target.options)
    common: dict[str, Any] = {
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": TIMEOUT_S,
        "decode_responses": True,
    }
    account: dict[str, Any] = {"username": target.username, "password": target.password}
    if target.tls:
        options["ssl"] = True
        options["ssl_cert_reqs"] = options.get("ssl_cert_reqs", "required")
        options["ssl_check_hostname"] = options.get("ssl_check_hostname", "true").lower() != "false"
        options["ssl_min_version"] = ssl.TLSVersion.TLSv1_2
    sentinel_account = {
        name.removeprefix("sentinel_"): value for name in _SENTINEL_OPTIONS if (value := options.pop(name, None))
    }
    if target.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in target.hosts]
        return RedisCluster(startup_nodes=nodes, **common, **account, **options)
    common["retry"] = Retry(NoBackoff(), 0)
    if target.kind == "unix":
        return _leaving_replicas(Redis(unix_socket_path=target.path, db=target.db, **common))
    if target.kind == "sentinel":
        sentinel = Sentinel(
            list(target.hosts),
            sentinel_kwargs={**common, **sentinel_account, **options},
            **common,
            **account,
            **options,
        )
        return _leaving_replicas(sentinel.master_for(target.service, db=target.db))
    host, port = target.hosts[0]
    return _leaving_replicas(Redis(host=host, port=port, db=target.db, **common, **account, **options))


def _leaving_replicas(client: Redis) -> Redis:
    """Have ``client`` drop a connection on which it is told that the server has become a replica.

    Behind one address (a proxy, a Service, DNS) the new master is found by a new connection only: the old one lives on
    and goes on refusing. A cluster's replicas send clients to the master by themselves.
    """
    pool = client.connection_pool
    base: Any = pool.connection_class

    class LeavingReplicas(base):
        async def read_response(self, *args: Any, **options: Any) -> Any:
            try:
                return await super().read_response(*args, **options)
            except ResponseError as error:
                # Older servers wrap the refusal of what a script wrote.
                if not isinstance(error, ReadOnlyError) and "READONLY" not in str(error):
                    raise
                await self.disconnect()
                raise NoConnection("the server is a read-only replica now; the connection is made anew") from error

    pool.connection_class = LeavingReplicas
    return client


def reason(error: BaseException) -> str:
    """What a client raised, in a line: redis-py quotes the whole command before it, and servers the script after."""
    text = str(error).rpartition("of pipeline caused error: ")[2]
    text = " ".join(text.removeprefix("(").removesuffix(",)").strip("'\"").partition(" script: ")[0].split())
    return f"{type(error).__name__}: {text[:_MOST_SAID]}"


@contextmanager
def unavailable_on_error() -> Iterator[None]:
    """Turn whatever a client raises into :class:`StoreUnavailable`."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise StoreUnavailable(reason(error)) from error


def _host(text: str, port: int) -> tuple[str, int]:
    split = urlsplit(f"//{text}")
    try:
        return split.hostname or "localhost", split.port or port
    except ValueError:
        raise ValueError(f"a host of it is not host:port; {_ENCODE}") from None


def _number(text: str, what: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{what} must be a number; {_ENCODE}")
    return int(text)
