"""A tiered store behind the Protocol of one tier: what a node server does with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from paceline_kvstore import codec
from paceline_kvstore.crypto import KeyRing, SecretKey, Suite
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.store import TieredStore
from paceline_kvstore.tiered.tier import StoreTier
from paceline_kvstore.tiers import FillableTier, GuardedTier, Lease, MemoryTier, Tier
from paceline_kvstore.tiers.sealed import SealedTier, SealOptions

SECONDS = 10.0
Make = Callable[..., TieredStore]
Keys = Callable[..., ChunkKey]
Payloads = Callable[..., bytes]


def test_a_store_is_a_tier(make_store: Make, key: Keys, payload: Payloads) -> None:
    tier: Tier = StoreTier(make_store(disk={}))
    keys = [key(number) for number in range(4)]
    for name in keys[:3]:
        assert tier.put(name, payload(name), tenant="acme")
    assert tier.contains(keys) == 3
    assert set(tier.keys()) == set(keys[:3])
    for name in keys[:3]:
        assert tier.get(name) == payload(name)
    target = bytearray(len(payload(keys[0])))
    assert tier.read_into(keys[0], target) == len(target)
    assert target == payload(keys[0])
    with pytest.raises(ValueError, match="the buffer 1"):
        tier.read_into(keys[0], bytearray(1))
    assert tier.get(keys[3]) is None and tier.lease(keys[3]) is None
    lease = tier.lease(keys[1])
    assert lease is not None and lease.payload == payload(keys[1])
    lease.release()
    assert (tier.stats.puts, tier.stats.hits, tier.stats.misses) == (3, 6, 2)
    assert 0 < tier.bytes_used < tier.capacity
    assert tier.delete(keys[0]) and not tier.delete(keys[0])
    assert tier.clear(tenant="acme") >= 2
    assert list(tier.keys()) == []


def test_a_durable_put_is_on_disk_when_it_returns(make_store: Make, key: Keys, payload: Payloads) -> None:
    store = make_store(disk={})
    tier = StoreTier(store)
    assert tier.put(key(1), payload(key(1)), durable=True)
    assert store.levels[1].tier.contains([key(1)]) == 1
    assert tier.get(key(1)) == payload(key(1))
    memory_only = StoreTier(make_store())
    assert not memory_only.put(key(1), payload(key(1)), durable=True)
    assert memory_only.stats.refused == 1


def test_a_second_put_reaches_the_disk_and_what_is_used_stays_its_tenants(
    make_store: Make, key: Keys, payload: Payloads
) -> None:
    store = make_store(disk={})
    tier = StoreTier(store)
    for _ in range(2):
        tier.put(key(1), payload(key(1)), tenant="acme")
    assert tier.flush()
    assert store.levels[1].tier.contains([key(1)]) == 1
    # Read from disk, whose owner only the disk knows: no copy that a purge would miss.
    store.levels[0].tier.clear()
    assert tier.get(key(1)) == payload(key(1))
    assert tier.flush()
    tier.clear(tenant="acme")
    assert tier.contains([key(1)]) == 0


def test_levels_that_must_be_asked_are_asked(make_store: Make, held: Any, key: Keys, payload: Payloads) -> None:
    tier = StoreTier(make_store(other=(held, {"is_indexed": False})))
    keys = [key(number) for number in range(3)]
    tier.put(keys[0], payload(keys[0]))
    held.put(keys[1], payload(keys[1]))
    assert tier.contains(keys) == 2
    assert tier.get(keys[1]) == payload(keys[1])
    held.put(keys[2], payload(keys[2]))
    assert tier.store.levels[1].writes.wait_idle(float("inf"))
    held.is_broken = True
    assert tier.get(keys[2]) is None
    assert tier.stats.errors == 1


class _Clocked(MemoryTier):
    """Takes note of the time that its calls are given."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.seconds: list[float | None] = []

    def lease(self, key: ChunkKey, *, deadline: float | None = None) -> Lease | None:
        self.seconds.append(deadline)
        return super().lease(key, deadline=deadline)

    def contains(self, keys: Sequence[ChunkKey], *, deadline: float | None = None) -> int:
        self.seconds.append(deadline)
        return super().contains(keys, deadline=deadline)


def test_the_callers_deadline_reaches_a_tier_that_must_be_asked(make_store: Make, key: Keys) -> None:
    place = _Clocked()
    ring = KeyRing(SecretKey(bytes(32)))
    for wrapped in (place, GuardedTier(SealedTier(place, ring, SealOptions(Suite.SIGNED)))):
        tier = StoreTier(make_store(other=(wrapped, {"is_indexed": False})))
        assert tier.get(key(1), deadline=20.0) is None and tier.lease(key(1), deadline=20.0) is None
        assert tier.contains([key(1)], deadline=1.5) == 0
        assert len(place.seconds) == 3
        assert all(seconds is not None and 0 < seconds <= 20 for seconds in place.seconds), place.seconds
        place.seconds.clear()


def test_a_chunk_in_memory_comes_and_goes_without_a_copy(make_store: Make, key: Keys, payload: Payloads) -> None:
    store = make_store()
    tier = StoreTier(store)
    assert isinstance(tier, FillableTier)
    filling = tier.fill(key(1), 5000)
    assert filling is not None
    filling.buffer[:] = payload(key(1), 5000)[:5000]
    header = codec.encode_header(key(1), filling.buffer)
    where = np.frombuffer(filling.buffer, np.uint8).ctypes.data
    assert filling.keep(header)
    lease = tier.lease(key(1))
    assert lease is not None and lease.header == header
    assert np.frombuffer(lease.payload, np.uint8).ctypes.data == where
    lease.release()
    assert tier.fill(key(1), 5000) is None, "it is there"
    assert (tier.stats.puts, tier.stats.hits, store.leases.num) == (1, 1, 0)


def test_a_chunk_that_came_into_memory_counts_for_its_tenant(make_store: Make, key: Keys) -> None:
    store = make_store(memory={"quotas": {"acme": 8000}})
    tier = StoreTier(store)

    def fill(number: int) -> bool:
        filling = tier.fill(key(number), 5000, tenant="acme")
        assert filling is not None
        filling.buffer[:] = bytes(5000)
        return filling.keep(codec.encode_header(key(number), filling.buffer))

    assert tier.fill(key(0), 5000, tenant="acme") is not None, "one that never arrives counts for nobody"
    assert fill(1) and fill(2)
    assert tier.contains([key(1)]) == 0 and tier.contains([key(2)]) == 1
    assert store.levels[0].tenants.used("acme") == 5000
    store.check_integrity()
