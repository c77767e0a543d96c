"""The file of API keys: YAML or JSON, strict, told with line and path. It holds digests; a key itself is nowhere.

A key is 256 random bits, so its plain SHA-256 gives nothing away: there is nothing to guess that a slow or salted hash
would have to protect, and a slow one would be paid for by every request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import yaml

from policy.config.fields import Block, Flag, Kind, ManyOf, Name, Number, OneOf
from policy.config.problems import ConfigError
from policy.config.yaml_source import Source, join, read_file
from policy.limits.arithmetic import MOST_PER_MINUTE, KeyLimits
from policy.limits.budgets import MOST_TOKENS

KEY_PREFIX = "mgw-"
DIGEST_PREFIX = "sha256:"
FORMAT_VERSION = 1
LEAST_CHARS = 32
"""Shorter keys than this are not random enough to be hashed plainly."""

Scope = Literal["inference", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


class KeyFileError(ConfigError):
    """A key file that can't be used."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """``name`` is the tenant. ``expires_at``: wall clock in seconds, None: never. Several digests: a rotation."""

    name: str
    digests: tuple[bytes, ...]
    scopes: frozenset[Scope] = frozenset({"inference"})
    limits: KeyLimits = field(default_factory=KeyLimits)
    expires_at: float | None = None
    disabled: bool = False

    def expired(self, wall_time: float) -> bool:
        return self.expires_at is not None and wall_time >= self.expires_at


class KeySet:
    """All keys of a file. ``version`` names the file's content."""

    def __init__(self, keys: tuple[ApiKey, ...], version: str) -> None:
        self.keys = keys
        self.version = version
        self._by_start: dict[bytes, list[tuple[bytes, ApiKey]]] = {}
        for key in keys:
            for digest in key.digests:
                self._by_start.setdefault(digest[:8], []).append((digest, key))

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented, be it in force or not.

        Digests are looked up by their start and then compared in constant time. How long either takes may tell of a
        digest's start, which leads nobody to a key: that would take a preimage.
        """
        digest = digest_of(presented)
        found = None
        for known, key in self._by_start.get(digest[:8], ()):
            if hmac.compare_digest(known, digest):
                found = key
        return found


def new_key() -> str:
    """256 random bits, with a prefix by which leak scanners know it."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def written_digest(key: str) -> str:
    """As it stands in a key file."""
    return DIGEST_PREFIX + digest_of(key).hex()


@dataclass(frozen=True, slots=True)
class _Digest:
    """Never shows what it could not read: that may be a key."""

    def read(self, source: Source, node: yaml.Node, path: str) -> bytes | None:
        value = node.value if isinstance(node, yaml.ScalarNode) else ""
        match = re.fullmatch(rf"{DIGEST_PREFIX}([0-9a-f]{{64}})", value)
        if match is None:
            source.complain(
                node,
                path,
                f"expected {DIGEST_PREFIX} and 64 hexadecimal digits, as 'medusa-gateway keys hash' prints them; "
                "never put a key itself here",
            )
            return None
        return bytes.fromhex(match[1])

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{DIGEST_PREFIX}[0-9a-f]{{64}}$"}


@dataclass(frozen=True, slots=True)
class _Instant:
    """A date (its first moment, UTC) or a date and time with its offset. Read as seconds since 1970."""

    def read(self, source: Source, node: yaml.Node, path: str) -> float | None:
        value = node.value if isinstance(node, yaml.ScalarNode) else ""
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is not None and moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC) if len(value) == len("2027-01-31") else None
        if moment is None:
            source.complain(node, path, "expected a date such as 2027-01-31, or a time such as 2027-01-31T18:00:00Z")
            return None
        return moment.timestamp()

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": r"^\d{4}-\d\d-\d\d([T ].*)?$"}


_PER_MINUTE = Number(1, MOST_PER_MINUTE, whole=True)
_BUDGET = Number(1, MOST_TOKENS, whole=True)
_LIMITS = Block(
    {
        "requests_per_minute": _PER_MINUTE,
        "tokens_per_minute": _PER_MINUTE,
        "concurrent_streams": Number(1, 1_000_000, whole=True),
        "tokens_per_day": _BUDGET,
        "tokens_per_month": _BUDGET,
    },
    "limits",
    about="What is left out is not limited.",
)
_FIELDS: dict[str, Kind] = {
    "name": Name(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}", "a name of letters, digits, '_', '.', '@' and '-'"),
    "hash": ManyOf(_Digest()),
    "scopes": ManyOf(OneOf(SCOPES)),
    "expires": _Instant(),
    "disabled": Flag(),
    "limits": _LIMITS,
}
_KEY = Block(_FIELDS, "a key", required=("name", "hash"))
_TOP = ("version", "keys")


def parse_keys(content: bytes, file: str) -> KeySet:
    """Read a key file. Raises :class:`KeyFileError` with every problem that was found."""
    keys = read_file(content, file, _read, what="key file", shortest="{version: 1, keys: []}", error_type=KeyFileError)
    return KeySet(keys, f"{FORMAT_VERSION}-{hashlib.sha256(content).hexdigest()[:12]}")


def json_schema() -> dict[str, Any]:
    """The form of a key file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "medusa-gateway API keys",
        "type": "object",
        "additionalProperties": False,
        "required": ["version", "keys"],
        "properties": {"version": {"const": FORMAT_VERSION}, "keys": {"type": "array", "items": _KEY.schema()}},
    }


def _read(source: Source, root: yaml.Node) -> tuple[ApiKey, ...]:
    nodes = source.known_items(root, "a key file", _TOP)
    source.check_version(root, nodes, FORMAT_VERSION)
    if isinstance(root, yaml.MappingNode) and "keys" not in nodes:
        source.complain(root, "keys", "is missing; add 'keys:'")
    keys: list[ApiKey] = []
    seen: dict[bytes | str, str] = {}
    if "keys" in nodes and not _is_nothing(nodes["keys"]):
        for at, node in source.elements(nodes["keys"], "keys", "the keys"):
            given = _KEY.read(source, node, at)
            if given is None or not given.keys() >= {"name", "hash"}:
                continue
            for mark, what in ((given["name"], "name"), *((digest, "hash") for digest in given["hash"])):
                if mark in seen:
                    source.complain(node, join(at, what), f"is that of {seen[mark]} too; every key has its own")
                seen[mark] = at
            keys.append(_key(given))
    return tuple(keys)


def _is_nothing(node: yaml.Node) -> bool:
    """``keys:`` with nothing below: a file that waits for its first key."""
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _key(given: Mapping[str, Any]) -> ApiKey:
    return ApiKey(
        name=given["name"],
        digests=given["hash"],
        scopes=frozenset(given.get("scopes", ("inference",))),
        limits=KeyLimits(**given.get("limits", {})),
        expires_at=given.get("expires"),
        disabled=given.get("disabled", False),
    )
