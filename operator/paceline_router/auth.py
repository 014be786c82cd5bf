"""Who is asking: API key to tenant, deny by default.

On one's own machine, where a Router names an anonymous tenant and no tenant has a key, any key counts as none: clients
that cannot leave it out always send one (docs/decisions/0010-anonymous-on-loopback.md).

Keys are held as SHA-256 digests under a random per-process prefix. The first half of a digest finds the entry, the
second half is compared in constant time; neither can be steered by a caller. Pure; must not import I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from paceline_router.errors import Unauthorized
from paceline_router.records import TenantRecord

Digest = bytes
_HALF = 16
FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip")


def digest(prefix: bytes, key: str) -> Digest:
    """Digest under which a key is kept."""
    return hashlib.sha256(prefix + key.encode()).digest()


class KeyIndex:
    """Which tenant a key digest belongs to. Immutable."""

    def __init__(self, owners: Mapping[Digest, str]) -> None:
        self._entries = {key[:_HALF]: (key[_HALF:], tenant) for key, tenant in owners.items()}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Digest) -> str | None:
        rest, tenant = self._entries.get(key[:_HALF], (b"", ""))
        return tenant if hmac.compare_digest(rest, key[_HALF:]) else None


def index_keys(owners: Iterable[tuple[str, Digest]]) -> tuple[KeyIndex, list[str]]:
    """The index, and one problem line for each key that more than one tenant claims: it opens neither."""
    tenants: dict[Digest, set[str]] = {}
    for tenant, key_digest in owners:
        tenants.setdefault(key_digest, set()).add(tenant)
    index = KeyIndex({key: next(iter(claims)) for key, claims in tenants.items() if len(claims) == 1})
    problems = [
        f"tenants {', '.join(sorted(claims))} share an API key: it is refused until only one of them has it"
        for claims in tenants.values()
        if len(claims) > 1
    ]
    return index, sorted(problems)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The parts of a request that say who sent it. `peer` is the address of the TCP connection's other end."""

    authorization: str | None
    peer: str | None
    host: str | None
    origin: str | None
    forwarded: bool

    @classmethod
    def of(cls, headers: Mapping[str, str], peer: str | None) -> Credentials:
        return cls(
            authorization=headers.get("authorization"),
            peer=peer,
            host=headers.get("host"),
            origin=headers.get("origin"),
            forwarded=any(name in headers for name in FORWARDING_HEADERS),
        )

    @property
    def local(self) -> bool:
        """Whether a program on this machine asks for itself: no proxy in front, no web page of another site."""
        return (
            is_loopback(self.peer)
            and not self.forwarded
            and (self.host is None or is_loopback(_hostname(f"//{self.host}")))
            and (self.origin is None or is_loopback(_hostname(self.origin)))
        )


class Authenticator:
    """Answers with the tenant of a request, or raises Unauthorized."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix

    def tenant_of(
        self,
        credentials: Credentials,
        *,
        keys: KeyIndex,
        tenants: Mapping[str, TenantRecord],
        anonymous_tenant: str | None,
    ) -> TenantRecord:
        scheme, _, token = (credentials.authorization or "").strip().partition(" ")
        token = token.strip()
        if not token:
            if scheme and scheme.lower() != "bearer":
                raise Unauthorized("scheme", "write the API key as 'Authorization: Bearer KEY'")
            return self._anonymous(credentials, tenants, anonymous_tenant)
        if scheme.lower() != "bearer":
            raise Unauthorized("scheme", "write the API key as 'Authorization: Bearer KEY'")
        name = keys.find(digest(self._prefix, token))
        if name is None or name not in tenants:
            if anonymous_tenant is not None and credentials.local and _no_keys(tenants):
                return self._anonymous(credentials, tenants, anonymous_tenant)
            raise Unauthorized("unknown_key", "the API key is not valid here; ask the platform team for one")
        return tenants[name]

    def _anonymous(
        self, credentials: Credentials, tenants: Mapping[str, TenantRecord], anonymous_tenant: str | None
    ) -> TenantRecord:
        if anonymous_tenant is None or not credentials.local:
            raise Unauthorized("missing_key", "send an API key as 'Authorization: Bearer KEY'")
        tenant = tenants.get(anonymous_tenant)
        if tenant is None:
            raise Unauthorized(
                "no_anonymous_tenant",
                f"the Router names {anonymous_tenant} as its anonymous tenant, which does not exist; apply that Tenant",
            )
        return tenant


def _no_keys(tenants: Mapping[str, TenantRecord]) -> bool:
    """Whether no tenant refers to a key, be its Secret there or not."""
    return not any(tenant.key_refs for tenant in tenants.values())


def salt_of(secret: bytes, tenant: str) -> str:
    """The tenant's KV salt: HMAC-SHA256 of its name under a secret of the namespace, in hex.

    Unguessable without the secret, equal in every router of the namespace. A rotated secret makes cached state
    unreachable, never wrong.
    """
    return hmac.new(secret, b"paceline-salt-v1:" + tenant.encode(), hashlib.sha256).hexdigest()


def is_loopback(host: str | None) -> bool:
    if host is None:
        return False
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
