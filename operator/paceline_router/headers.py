"""Which headers pass in which direction, and request ids. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline_api import wire
from paceline_api.runtimes import RuntimeFacts

RawHeaders = Iterable[tuple[bytes, bytes]]

# RFC 9110 section 7.6.1, and the older names that still occur.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Set anew for each hop, or the client's own business: its key and cookies are not for engines. Answers come
# unencoded, since the router must read them to judge them.
_NOT_FORWARDED = frozenset(["host", "content-length", "expect", "authorization", "cookie", "accept-encoding"])
_NOT_RETURNED = frozenset(["content-length", "date", "server", "set-cookie"]) | {wire.HEADER_REQUEST_ID}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def decoded(raw: RawHeaders) -> dict[str, str]:
    """Headers by lower-case name; the first of several counts."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def request_id(headers: Mapping[str, str], fresh: str) -> str:
    """The client's id if it is printable and short, else `fresh`."""
    sent = headers.get(wire.HEADER_REQUEST_ID, "")
    return sent if _REQUEST_ID.fullmatch(sent) else fresh


def for_any_engine(headers: Mapping[str, str], *, request_id: str) -> dict[str, str]:
    """Headers of the request to whatever engine: the client's end-to-end ones, and the request id."""
    dropped = _NOT_FORWARDED | HOP_BY_HOP | _named_by_connection(headers.get("connection", ""))
    sent = {
        name: value
        for name, value in headers.items()
        if name not in dropped and not name.startswith(wire.HEADER_PREFIX_PRIVATE)
    }
    sent["accept-encoding"] = "identity"
    sent[wire.HEADER_REQUEST_ID] = request_id
    return sent


@dataclass(frozen=True, slots=True)
class Private:
    """What only engines that understand it are told: the tenant, its salt, and the namespace's internal token."""

    tenant: str
    salt: str
    token: str | None

    def for_runtime(self, runtime: RuntimeFacts) -> dict[str, str]:
        """The headers for engines of one kind; those of others would be ignored there, and be known there."""
        sent = {wire.HEADER_TENANT: self.tenant, wire.HEADER_SALT: self.salt} if runtime.ours else {}
        if self.token is not None and runtime.checks_token:
            sent["authorization"] = f"Bearer {self.token}"
        return sent


def for_client(raw: RawHeaders, *, request_id: str) -> list[tuple[bytes, bytes]]:
    """Headers of the answer to the client: the engine's end-to-end ones, and the request id."""
    listed = [(name.lower(), value) for name, value in raw]
    connection = ",".join(value.decode("latin-1") for name, value in listed if name == b"connection")
    dropped = _NOT_RETURNED | HOP_BY_HOP | _named_by_connection(connection)
    private = wire.HEADER_PREFIX_PRIVATE.encode()
    kept = [
        (name, value)
        for name, value in listed
        if name.decode("latin-1") not in dropped and not name.startswith(private)
    ]
    return [*kept, (wire.HEADER_REQUEST_ID.encode(), request_id.encode())]


def _named_by_connection(value: str) -> frozenset[str]:
    return frozenset(token.strip().lower() for token in value.split(",") if token.strip())
