"""The keys in force and the limiter behind them, with what keeps both current."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from gateway.auth.errors import InvalidApiKey, NotAllowed, NotHere
from gateway.auth.keyfile import ApiKey, KeySet, parse_keys
from policy.background import cancel_and_wait, pause
from policy.config.watched_file import FileWatch, WatchedFile, read_regular
from policy.limits.limiter import Limiter
from policy.shared.redis_client import RedisTarget

logger = logging.getLogger("gateway.auth")

POLL_EVERY_S = 1.0

Need = Literal["open", "any", "metrics", "inference", "admin"]
"""What a route asks for: nothing; any key; either of the scopes; or, for metrics, admin where others could ask."""

PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".test")
"""Names that the public DNS will never have (RFC 6761, 6762, 8375; ICANN's .internal). Not .lan and .home: nobody has
reserved them."""


def open_keys(path: Path, wall_time: float = 0.0) -> WatchedFile[KeySet]:
    """Raises OSError or KeyFileError: a gateway doesn't start with keys that it can't read."""
    return WatchedFile(parse_keys, read_regular(path), str(path), path, wall_time)


class Access:
    """``keys`` None: everybody may ask. Used from one event loop only.

    ``admin_port``: where admin routes are served, and nowhere else; None: on the only port, for keys with that scope.
    ``local``: what is bound can be reached from this machine only. ``allowed_hosts``: further names that requests may
    give it then, without keys.
    """

    def __init__(
        self,
        keys: WatchedFile[KeySet] | None = None,
        *,
        limiter: Limiter | None = None,
        admin_port: int | None = None,
        local: bool = True,
        allowed_hosts: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.keys = keys
        self.limiter = limiter or Limiter()
        self.admin_port = admin_port
        self.local = local
        self.allowed_hosts = frozenset(host.lower().rstrip(".") for host in allowed_hosts)
        self._wall_clock = wall_clock
        self._file = None if keys is None else FileWatch(keys, clock, wall_clock)
        self._watching: asyncio.Task[None] | None = None

    async def start(self, target: RedisTarget | None) -> None:
        """Watch the key file, and share limits through ``target``."""
        if self.keys is not None and self._file is not None:
            await self.limiter.start(target)
            self._watching = asyncio.create_task(self._watch(self.keys, self._file))

    async def stop(self) -> None:
        """Idempotent."""
        watching, self._watching = self._watching, None
        if watching is not None:
            await cancel_and_wait(watching)
        await self.limiter.stop()

    def check(self, need: Need, headers: Sequence[tuple[bytes, bytes]], port: int | None) -> ApiKey | None:
        """The key of a request that may ask for ``need``; None where none is needed.

        Raises :class:`InvalidApiKey`, :class:`NotAllowed` or :class:`NotHere`.
        """
        self._check_port(need, port)
        if self.keys is None:
            if self.local:
                self._refuse_foreign_host(headers)
            return None
        if need == "open" or (need == "metrics" and (self.local or self.admin_port is not None)):
            return None
        key = self._authenticate(headers, self.keys.value)
        wanted = "admin" if need == "metrics" else need
        if wanted != "any" and wanted not in key.scopes:
            raise NotAllowed(f"The API key '{key.name}' has no scope '{wanted}', which this route needs.")
        return key

    @property
    def keys_hang(self) -> bool:
        """Whether the key file can't be read now."""
        return self._file is not None and self._file.hangs

    def problems(self) -> list[str]:
        """What is not as it should be, in words that anybody may read."""
        found = []
        if self.keys is not None and self.keys.status.rejection is not None:
            found.append("the key file's last edit was refused; the keys before it are in force")
        if self._file is not None and (problem := self._file.problem("the key file")) is not None:
            found.append(problem)
        if not self.limiter.health.ok:
            found.append("limits of API keys hold for each replica by itself, since their store is unavailable")
        if self.limiter.evicts_by is not None:
            found.append(
                "the store of the limits of API keys may forget them when its memory is full (maxmemory-policy "
                f"{self.limiter.evicts_by}); with volatile-ttl or noeviction it keeps them"
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """For operators."""
        status = None if self.keys is None else self.keys.status
        return {
            "keys": None
            if status is None
            else {
                "file": status.file,
                "version": status.version,
                "accepted": status.accepted,
                "rejected": status.rejected,
                "last_rejection": None if status.rejection is None else list(status.rejection.problems),
            },
            "limits": self.limiter.as_dict(),
        }

    def _authenticate(self, headers: Sequence[tuple[bytes, bytes]], keys: KeySet) -> ApiKey:
        key = keys.find(presented_key(headers))
        if key is None:
            raise InvalidApiKey("The API key is not known here.")
        if key.disabled:
            raise InvalidApiKey(f"The API key '{key.name}' is disabled.")
        if key.expired(self._wall_clock()):
            raise InvalidApiKey(f"The API key '{key.name}' has expired.")
        return key

    def _check_port(self, need: Need, port: int | None) -> None:
        if self.admin_port is None or need == "open":
            return
        if (need in ("admin", "metrics")) != (port == self.admin_port):
            raise NotHere("There is no such route on this port.")

    def _refuse_foreign_host(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """A web page can give its own name this machine's address and then ask as if from it (DNS rebinding).

        Its requests still name it as the host; those of programs on this machine say localhost, a name that only a
        private network can know, or an address.
        """
        host = next((value for name, value in headers if name == b"host"), b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if name.removesuffix(".") in self.allowed_hosts or not can_be_rebound(name):
            return
        raise NotAllowed(
            f"Without API keys this gateway does not answer to the host '{name[:100]}', which the request names: only "
            "to localhost, addresses, and names that are in no public DNS. If the name is yours, start it with "
            f"--allowed-host {name[:100]}; or give it --api-keys, or have the proxy in front send 'Host: localhost'.",
            code="host_not_allowed",
        )

    async def _watch(self, keys: WatchedFile[KeySet], file: FileWatch[KeySet]) -> None:
        while True:
            await pause(POLL_EVERY_S)
            try:
                outcome = await file.poll()
            except Exception:
                logger.exception("reading the key file failed; it is tried again")
                continue
            status = keys.status
            if outcome == "accepted":
                logger.warning("API keys %s are in force, %d of them", status.version, len(keys.value.keys))
            elif outcome == "rejected" and status.rejection is not None:
                logger.error(
                    "key file refused, %s stays in force:\n%s", status.version, "\n".join(status.rejection.problems)
                )


def presented_key(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The key in ``Authorization: Bearer KEY``, or, without that header, in ``x-api-key``, as Anthropic's clients send
    it. Raises :class:`InvalidApiKey`. Pure."""
    given = [value for name, value in headers if name == b"authorization"]
    if not given:
        bare = [value.decode("latin-1").strip() for name, value in headers if name == b"x-api-key"]
        if len(bare) == 1 and bare[0]:
            return bare[0]
        raise InvalidApiKey("There is no API key; send one as 'Authorization: Bearer KEY'.")
    scheme, _, presented = given[0].decode("latin-1").partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not presented.strip():
        raise InvalidApiKey("The Authorization header can't be read; send one, as 'Authorization: Bearer KEY'.")
    return presented.strip()


def can_be_rebound(host: str) -> bool:
    """Whether ``host``, a name or an address without port, may be one that a stranger has in the public DNS. Pure."""
    name = host.lower().removesuffix(".")
    # A name without a dot is nobody's on the internet.
    if "." not in name and ":" not in name:
        return False
    if name.endswith(PRIVATE_SUFFIXES):
        return False
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return True
    return False
