"""Whose chunks go when a tenant has too many: its own, those used longest ago. Must not do I/O."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from paceline_kvstore.policy.eviction import Lru, nothing_spared
from paceline_kvstore.policy.quotas import Quotas

K = TypeVar("K", bound=Hashable)


class TenantChunks(Generic[K]):
    """The chunks in one tier of each tenant that has a quota; others cost no memory. Safe to call from several threads.

    Room is reserved before a chunk is put; `remove` tells of every chunk that went, so that bytes are counted once.
    """

    def __init__(self, quotas: Quotas, spared: Callable[[K], bool] = nothing_spared) -> None:
        self._quotas = quotas
        self._spared = spared
        self._orders: dict[str, Lru[K]] = {}
        self._held: dict[K, tuple[str, int]] = {}
        self._lock = Lock()

    def used(self, tenant: str) -> int:
        """Bytes counted for a tenant with a quota."""
        return self._quotas.used(tenant)

    def reserve(self, tenant: str, key: K, num_bytes: int, parent: K | None = None) -> tuple[bool, list[K]]:
        """Count a chunk that is about to be put: whether it fits, and the tenant's own chunks that must go first.

        If it was not put after all, `remove` it. Chunks before it in its chain stay, and those that `spared` names.
        """
        if self._quotas.limit(tenant) is None:
            return True, []
        with self._lock:
            victims: list[K] = []
            if key in self._held:
                return True, victims
            while excess := self._quotas.excess(tenant, num_bytes):
                victim = self._orders[tenant].evict(self._spared, parent)
                if victim is None:
                    break
                self._quotas.charge(tenant, -self._held.pop(victim)[1])
                victims.append(victim)
            if excess != 0:
                return False, victims
            self._orders.setdefault(tenant, Lru()).add(key, num_bytes, parent)
            self._held[key] = (tenant, num_bytes)
            self._quotas.charge(tenant, num_bytes)
            return True, victims

    def touch(self, key: K) -> None:
        """The chunk was used."""
        if not self._held:
            return
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._orders[held[0]].touch(key)

    def remove(self, key: K) -> None:
        """The chunk is gone, or was never put. Unknown ones are ignored."""
        if not self._held:
            return
        with self._lock:
            held = self._held.pop(key, None)
            if held is None:
                return
            tenant, num_bytes = held
            self._quotas.charge(tenant, -num_bytes)
            order = self._orders[tenant]
            order.remove(key)
            if not len(order):
                del self._orders[tenant]

    def check_integrity(self) -> None:
        """Raise ValueError unless bytes add up and every quota holds."""
        with self._lock:
            sums: dict[str, int] = {}
            for tenant, num_bytes in self._held.values():
                sums[tenant] = sums.get(tenant, 0) + num_bytes
            counted = {tenant: self._quotas.used(tenant) for tenant in self._quotas.tenants()}
            if sums != counted or sum(map(len, self._orders.values())) != len(self._held):
                raise ValueError(f"the chunks have {sums} bytes, counted are {counted}")
            over = [tenant for tenant, used in sums.items() if used > (self._quotas.limit(tenant) or 0)]
            if over:
                raise ValueError(f"tenants over their quota: {over}")
