"""How many bytes of a tier each tenant may take. Must not do I/O.

A tenant that reaches its quota pays with its own chunks: nobody else's go for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NO_QUOTAS: Mapping[str, int] = MappingProxyType({})


class Quotas:
    """Bytes in use and bytes allowed, by tenant. `default` is for tenants without a quota of their own; None: no bound.

    Not thread-safe: the tier's lock covers it.
    """

    def __init__(self, default: int | None = None, of: Mapping[str, int] = NO_QUOTAS) -> None:
        for tenant, quota in [("default", default or 0), *of.items()]:
            if quota < 0:
                raise ValueError(f"the quota of {tenant} must not be negative, it is {quota} bytes")
        self._default = default
        self._of = dict(of)
        self._used: dict[str, int] = {}

    def limit(self, tenant: str) -> int | None:
        return self._of.get(tenant, self._default)

    def used(self, tenant: str) -> int:
        return self._used.get(tenant, 0)

    def excess(self, tenant: str, size: int) -> int | None:
        """Bytes of the tenant's own that must go before `size` more fit; None if that can never be."""
        limit = self.limit(tenant)
        if limit is None:
            return 0
        return None if size > limit else max(0, self.used(tenant) + size - limit)

    def charge(self, tenant: str, size: int) -> None:
        """`size` bytes more, or fewer if negative. ValueError if the tenant would use less than nothing."""
        used = self.used(tenant) + size
        if used < 0:
            raise ValueError(f"tenant {tenant!r} would use {used} bytes")
        if used:
            self._used[tenant] = used
        else:
            self._used.pop(tenant, None)

    def tenants(self) -> list[str]:
        """Tenants that use anything."""
        return list(self._used)
