"""What a tiered store keeps: pins, purges, times to live and quotas."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from store_steps import SECONDS, Keys, Make, Payloads, chain, load, offer, settled, wait

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiers import MemoryTier


def test_pinned_chunks_outlive_pressure_until_their_pin_ends(make_store: Make, key: Keys, payload: Payloads) -> None:
    now = [0.0]
    store = make_store(memory_chunks=8, clock=lambda: now[0])
    keys = chain(key, 4)
    offer(store, keys, payload)
    settled(store)
    assert store.pin("first", keys, 60.0) and store.pin("second", keys[:1], 60.0)
    offer(store, chain(key, 40, start=100), payload)
    settled(store)
    assert len(store.lookup(keys).plan) == 4
    assert store.unpin("first") and not store.unpin("first")
    offer(store, chain(key, 40, start=200), payload)
    settled(store)
    assert len(store.lookup(keys).plan) == 1
    now[0] = 60.0
    store.lookup(())
    offer(store, chain(key, 40, start=300), payload)
    settled(store)
    assert len(store.lookup(keys).plan) == 0
    assert store.levels[0].tier.num_leased == 0  # type: ignore[attr-defined]


def test_a_pin_holds_what_is_still_on_its_way(make_store: Make, key: Keys, payload: Payloads) -> None:
    store = make_store(memory_chunks=8)
    keys = chain(key, 3)
    assert store.pin("transfer", keys, 60.0) == 3
    offer(store, keys, payload)
    assert store.pins.num_bytes(store.clock()) == sum(len(payload(each)) for each in keys), "against the bound on bytes"
    offer(store, chain(key, 40, start=100), payload)
    settled(store)
    assert len(store.lookup(keys).plan) == 3
    assert store.delete(keys[0]) and not store.pins.is_held(keys[0], store.clock()), "gone for good"


def test_a_tenants_quota_takes_no_pinned_chunk(make_store: Make, key: Keys, payload: Payloads) -> None:
    size = len(payload(key(0)))
    store = make_store(memory={"quotas": {"acme": 4 * size}})
    keys = chain(key, 2)
    offer(store, keys, payload, tenant="acme")
    assert store.pin("transfer", keys, 60.0) == 2
    offer(store, chain(key, 20, start=100), payload, tenant="acme")
    settled(store)
    assert len(store.lookup(keys).plan) == 2


class _Elsewhere(MemoryTier):
    """A tier that holds chunks for others, and takes note of what it is told."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.told: dict[str, tuple[tuple[ChunkKey, ...], float] | None] = {}
        self.gate = threading.Event()

    def pin(self, holder: str, keys: Sequence[ChunkKey], seconds: float) -> int:
        self.gate.wait(SECONDS)
        self.told[holder] = tuple(keys), seconds
        return len(keys)

    def extend(self, holder: str, seconds: float) -> bool:
        raise AssertionError("a pin as a whole says the same")

    def unpin(self, holder: str) -> bool:
        self.gate.wait(SECONDS)
        self.told[holder] = None
        return True


def test_a_tier_elsewhere_hears_of_pins_behind_the_callers_back(make_store: Make, key: Keys) -> None:
    place = _Elsewhere()
    store = make_store(other=(place, {"is_indexed": False}))
    keys = chain(key, 3)
    assert store.pin("kept", keys, 60.0) == 3
    assert store.extend("kept", 90.0)
    store.pin("ended", keys, 60.0), store.unpin("ended")
    assert place.told == {}, "nobody waited for it"
    place.gate.set()
    settled(store)
    assert place.told["ended"] is None
    told = place.told["kept"]
    assert told is not None and told[0] == tuple(keys) and 60 < told[1] <= 90


def test_pins_hold_on_disk(make_store: Make, key: Keys, payload: Payloads) -> None:
    store = make_store(memory_chunks=0, disk={"capacity": 256 << 10, "needs_second_offer": False})
    keys = chain(key, 4)
    offer(store, keys, payload)
    settled(store)
    assert store.pin("me", keys, 60.0)
    for start in (100, 200):
        offer(store, chain(key, 50, start=start), payload)
        settled(store)
    assert store.levels[1].tier.stats.evictions > 0
    assert load(store, store.lookup(keys).plan, payload) == 4


def test_what_is_read_while_its_tenant_is_purged_does_not_come_back(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    store = make_store(other=(held, {}))
    held.put(key(1), payload(key(1)), tenant="acme")
    plan = store.lookup([key(1)]).plan
    held.reads.shut()
    fetch = store.fetch(plan, SECONDS, tenant="acme")
    held.reads.wait_entered()
    assert store.clear(tenant="acme") == 1
    held.reads.set()
    fetch.wait(SECONDS)
    wait(lambda: store.levels[1].reads.num_jobs == 0)
    settled(store)
    assert len(store.lookup([key(1)]).plan) == 0
    assert not store.levels[0].has(key(1))


def test_a_purge_takes_back_what_is_on_its_way(make_store: Make, held: Any, key: Keys, payload: Payloads) -> None:
    store = make_store(memory_chunks=0, other=(held, {"writers": 1}))
    held.writes.shut()
    mine, others = chain(key, 3), chain(key, 3, start=10)
    offer(store, others[:1], payload, tenant="other")
    held.writes.wait_entered()
    offer(store, mine, payload, tenant="acme")
    offer(store, others[1:], payload, tenant="other")
    store.clear(tenant="acme")
    held.writes.set()
    settled(store)
    assert set(held.keys()) == set(others)
    assert len(store.writes) == 0


def test_a_purge_waits_for_what_a_level_is_taking(make_store: Make, held: Any, key: Keys, payload: Payloads) -> None:
    store = make_store(memory_chunks=0, other=(held, {}))
    held.writes.shut()
    offer(store, [key(1)], payload, tenant="acme")
    held.writes.wait_entered()
    later = threading.Timer(0.05, held.writes.set)
    later.start()
    store.clear(tenant="acme")
    later.join()
    settled(store)
    assert not store.levels[1].has(key(1))


def test_chunks_live_no_longer_than_they_may(make_store: Make, key: Keys, payload: Payloads) -> None:
    now = [0.0]
    store = make_store(memory={"ttl_s": 60.0}, clock=lambda: now[0])
    offer(store, [key(1)], payload)
    settled(store)
    now[0] = 30.0
    offer(store, [key(2)], payload)
    settled(store)
    now[0] = 59.9
    assert [len(store.lookup([key(number)]).plan) for number in (1, 2)] == [1, 1]
    now[0] = 60.0
    assert [len(store.lookup([key(number)]).plan) for number in (1, 2)] == [0, 1]
    assert store.levels[0].counts.expired == 1
    now[0] = 90.0
    store.offer(key(3), payload(key(3)))
    assert not store.levels[0].has(key(2))


def test_a_tenant_over_its_quota_loses_only_its_own(make_store: Make, key: Keys, payload: Payloads) -> None:
    size = len(payload(key(0)))
    store = make_store(memory={"quotas": {"acme": 3 * size}})
    others = chain(key, 5)
    offer(store, others, payload, tenant="other")
    for start in (100, 200, 300):
        offer(store, chain(key, 3, start=start), payload, tenant="acme")
        settled(store)
        store.check_integrity()
    assert len(store.lookup(others).plan) == 5
    assert len(list(store.keys())) == 8
    assert store.levels[0].tenants.used("acme") == 3 * size
