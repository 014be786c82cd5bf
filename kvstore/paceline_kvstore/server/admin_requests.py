"""Bodies of the admin port's requests, checked field by field. Must not do I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self, cast

from paceline_kvstore.keys import DIGEST_BYTES, KEY_BYTES, ChunkKey
from paceline_kvstore.server.store import ADMIN
from paceline_kvstore.wire.messages import HOLDER_BYTES_MAX, KEYS_MAX, TENANT_BYTES_MAX

CHAIN_DIGITS_MIN = 8
"""A shorter prefix would hit chains by chance."""
_HEX = re.compile("[0-9a-f]*")


class BadRequest(ValueError):
    """The request can't be done as it is. `field` names what is wrong with it."""

    def __init__(self, field: str | None, message: str, status: int = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.field = field
        self.status = status


def read_json(body: bytes) -> Mapping[str, Any]:
    """The object in a body. Raises BadRequest."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest("body", f"body: it isn't JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("body", "body: it must be a JSON object")
    return cast("dict[str, Any]", value)


def _only(body: Mapping[str, Any], *allowed: str) -> None:
    for name in body:
        if name not in allowed:
            raise BadRequest(name[:64], f"{name[:64]}: no such field, there are {', '.join(allowed)}")


def _hex(body: Mapping[str, Any], name: str, num_bytes: int) -> bytes:
    text = body[name]
    if not isinstance(text, str) or len(text) != 2 * num_bytes or not _HEX.fullmatch(text):
        raise BadRequest(name, f"{name}: it must be {2 * num_bytes} hexadecimal digits, a-f in lower case")
    return bytes.fromhex(text)


def _keys(body: Mapping[str, Any]) -> tuple[ChunkKey, ...]:
    texts = body.get("keys")
    if not isinstance(texts, list) or not texts:
        raise BadRequest("keys", "keys: it must be a list of keys, at least one")
    wires = cast("list[Any]", texts)
    if len(wires) > KEYS_MAX:
        raise BadRequest("keys", f"keys: {len(wires)} are too many, the limit is {KEYS_MAX}")
    found: list[ChunkKey] = []
    for index, text in enumerate(wires):
        name = f"keys[{index}]"
        try:
            found.append(ChunkKey.from_bytes(_hex({name: text}, name, KEY_BYTES)))
        except BadRequest:
            raise
        except ValueError as error:
            raise BadRequest(name, f"{name}: {error}") from None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class KeysRequest:
    """`{"keys": [...]}`: each key in hex, as `ChunkKey.to_bytes` writes it."""

    keys: tuple[ChunkKey, ...]

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises BadRequest."""
        _only(body, "keys")
        return cls(_keys(body))


def _holder(body: Mapping[str, Any]) -> str:
    holder = body.get("holder", ADMIN)
    if not isinstance(holder, str) or not 0 < len(holder.encode()) <= HOLDER_BYTES_MAX:
        raise BadRequest("holder", f"holder: it must be a string of 1 to {HOLDER_BYTES_MAX} bytes")
    return holder


@dataclass(frozen=True, slots=True)
class PinRequest:
    """`{"keys": [...], "seconds": 60, "holder": "nightly"}`: instead of what the holder held before."""

    keys: tuple[ChunkKey, ...]
    seconds: float
    holder: str

    @classmethod
    def parse(cls, body: Mapping[str, Any], seconds_max: float) -> Self:
        """Raises BadRequest."""
        _only(body, "keys", "seconds", "holder")
        seconds = body.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= seconds_max:
            raise BadRequest("seconds", f"seconds: it must be a number above 0, at most {seconds_max:g}")
        return cls(_keys(body), float(seconds), _holder(body))


@dataclass(frozen=True, slots=True)
class UnpinRequest:
    """`{"holder": "nightly"}`."""

    holder: str

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises BadRequest."""
        _only(body, "holder")
        return cls(_holder(body))


@dataclass(frozen=True, slots=True)
class Invalidate:
    """`{"chain": ...}`: a chunk, by the first digits of its chain hash, and all that follow it. Or `namespace` (hex),
    `tenant`, or both: what belongs to them; nothing else is forgotten."""

    chain: str | None = None
    namespace: bytes | None = None
    tenant: str | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises BadRequest."""
        _only(body, "chain", "namespace", "tenant")
        if not body or ("chain" in body and len(body) > 1):
            raise BadRequest("chain", "chain: give either this, or one or both of namespace and tenant")
        if "chain" in body:
            return cls(chain=_chain(body["chain"]))
        tenant = body.get("tenant")
        if "tenant" in body and (not isinstance(tenant, str) or len(tenant.encode()) > TENANT_BYTES_MAX):
            raise BadRequest("tenant", f"tenant: it must be a string of at most {TENANT_BYTES_MAX} bytes")
        return cls(namespace=_hex(body, "namespace", DIGEST_BYTES) if "namespace" in body else None, tenant=tenant)


def _chain(text: Any) -> str:
    digits = 2 * DIGEST_BYTES
    if not isinstance(text, str) or not CHAIN_DIGITS_MIN <= len(text) <= digits or not _HEX.fullmatch(text):
        raise BadRequest("chain", f"chain: it must be {CHAIN_DIGITS_MIN} to {digits} hexadecimal digits in lower case")
    return text
