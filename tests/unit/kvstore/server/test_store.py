"""What the node server adds to a tiered store: pins with bounds, age, purges of all tiers and of what follows a chunk.

On a clock of the test's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline_kvstore import ChunkKey
from paceline_kvstore.breaker import BreakerLimits
from paceline_kvstore.config import parse_settings
from paceline_kvstore.opening import open_store
from paceline_kvstore.policy.holds import Holds
from paceline_kvstore.server.store import ADMIN, NodeStore, Pinned, Removed
from paceline_kvstore.tiered.level import Level, LevelOptions
from paceline_kvstore.tiered.store import TieredStore
from paceline_kvstore.tiers import GuardedTier, MemoryTier

PAGE = 4096


def key(number: int, namespace: bytes = b"n" * 32) -> ChunkKey:
    return ChunkKey(namespace, bytes([number]) * 32, 16)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, pages: int = 8, ttl: float | None = None) -> NodeStore:
    pins: Holds[ChunkKey] = Holds(4, 3 * PAGE)

    def is_pinned(chunk: ChunkKey) -> bool:
        return pins.is_held(chunk, clock())

    options = LevelOptions(name="memory", is_immediate=True, ttl_s=ttl)
    level = Level(MemoryTier(pages * PAGE, spared=is_pinned), options, clock)
    return NodeStore(TieredStore([level], pins=pins, clock=clock), pin_seconds_max=60)


def put(store: NodeStore, number: int, parent: int | None = None, tenant: str = "") -> bool:
    above = None if parent is None else key(parent)
    return store.tier.put(key(number), bytes([number]) * PAGE, parent=above, tenant=tenant)


def held(store: NodeStore) -> set[int]:
    return {number for number in range(40) if store.tier.contains([key(number)])}


def test_a_pinned_chunk_outlives_any_number_of_puts(clock: Clock) -> None:
    store = make(clock, pages=4)
    put(store, 1)
    assert store.pin(ADMIN, [key(1)], 30) == 1
    for number in range(10, 30):
        put(store, number)
    assert 1 in held(store) and len(held(store)) == 4
    clock.now += 30
    assert store.pinned == Pinned(0, 0)
    for number in range(10, 30):
        put(store, number)
    assert 1 not in held(store)


def test_pins_count_up_to_the_first_chunk_that_is_missing_and_hold_it_when_it_comes(clock: Clock) -> None:
    store = make(clock, pages=4)
    put(store, 1), put(store, 3)
    assert store.pin(ADMIN, [key(1), key(2), key(3)], 30) == 1
    assert store.pinned == Pinned(3, 2 * PAGE)
    put(store, 2)
    assert store.pinned == Pinned(3, 3 * PAGE)
    for number in range(10, 30):
        put(store, number)
    assert {1, 2, 3} <= held(store)


def test_pins_are_bounded_in_number_bytes_and_time(clock: Clock) -> None:
    store = make(clock)
    for number in range(5):
        put(store, number)
    assert store.pin(ADMIN, [key(number) for number in range(5)], 10**9) == 3, "three pages are the bound"
    clock.now += 60
    assert store.pinned.count == 0, "a minute is the bound"
    for number in range(10, 15):
        store.tier.put(key(number), b"x")
    assert store.pin(ADMIN, [key(number) for number in range(10, 15)], 30) == 4, "four pins are the bound"


def test_what_comes_later_does_not_get_around_the_bound_on_bytes(clock: Clock) -> None:
    store = make(clock)
    assert store.pin(ADMIN, [key(number) for number in range(4)], 30) == 0
    for number in range(4):
        put(store, number)
    assert store.pinned == Pinned(3, 3 * PAGE)
    assert store.is_pinned(key(2)) and not store.is_pinned(key(3))


def test_pinning_again_takes_no_more_room_and_lasts_from_then(clock: Clock) -> None:
    store = make(clock)
    put(store, 1)
    for _ in range(10):
        assert store.pin(ADMIN, [key(1)], 20) == 1
        clock.now += 19
    assert store.pinned == Pinned(1, PAGE)
    assert store.extend(ADMIN, 20)
    clock.now += 19
    assert store.unpin(ADMIN) and not store.unpin(ADMIN) and not store.extend(ADMIN, 20)
    assert store.pinned == Pinned(0, 0)


def test_a_chunk_stays_while_one_of_its_holders_wants_it(clock: Clock) -> None:
    store = make(clock)
    put(store, 1)
    assert store.pin("one", [key(1)], 30) == store.pin("two", [key(1)], 10) == 1
    assert store.pinned == Pinned(1, PAGE)
    assert store.unpin("one") and store.is_pinned(key(1))
    clock.now += 10
    assert not store.is_pinned(key(1))


def test_a_purge_takes_pinned_chunks_too_and_gives_their_memory_back(clock: Clock) -> None:
    store = make(clock)
    put(store, 1, tenant="a"), put(store, 2, tenant="b")
    store.pin(ADMIN, [key(1), key(2)], 30)
    assert store.clear(tenant="a") == Removed(1)
    assert store.pinned == Pinned(1, PAGE) and store.tier.bytes_used == PAGE
    assert store.tier.delete(key(2))
    assert store.pinned == Pinned(0, 0) and store.tier.bytes_used == 0


def test_clear_is_by_namespace_and_tenant(clock: Clock) -> None:
    store = make(clock)
    for number, (namespace, tenant) in enumerate([(b"m", "a"), (b"m", "b"), (b"n", "a"), (b"n", "b")]):
        store.tier.put(key(number, namespace * 32), b"x", tenant=tenant)
    assert store.clear(namespace=b"m" * 32, tenant="a") == Removed(1)
    assert store.clear(tenant="a") == Removed(1)
    assert store.clear(namespace=b"n" * 32) == Removed(1)
    assert list(store.tier.keys()) == [key(1, b"m" * 32)]


def test_an_invalidated_chain_goes_with_all_that_follows_it(clock: Clock) -> None:
    store = make(clock)
    for number, parent in ((1, None), (2, 1), (3, 2), (4, 2), (5, 1), (6, None)):
        put(store, number, parent)
    assert store.invalidate_chain(key(2).chain.hex()[:8]) == Removed(3)
    assert held(store) == {1, 5, 6}
    assert store.invalidate_chain("ff" * 8) == Removed(0)


def test_a_chunk_is_gone_at_the_end_of_its_life_and_not_before(clock: Clock) -> None:
    store = make(clock, ttl=10)
    put(store, 1)
    clock.now += 9.9
    assert put(store, 1), "it is there already, and stays as old as it is"
    assert store.tier.get(key(1)) is not None and store.tier.contains([key(1)]) == 1
    clock.now += 0.1
    assert store.tier.contains([key(1)]) == 0
    assert store.tier.lease(key(1)) is None
    assert store.tier.stats.expired == 1 and store.tier.bytes_used == 0
    assert put(store, 1) and store.tier.contains([key(1)]) == 1


def test_a_pin_does_not_make_a_life_longer(clock: Clock) -> None:
    store = make(clock, ttl=10)
    put(store, 1)
    store.pin(ADMIN, [key(1)], 60)
    clock.now += 10
    store.sweep()
    assert store.pinned == Pinned(0, 0) and store.tier.bytes_used == 0 and store.tier.stats.expired == 1
    assert store.pin(ADMIN, [key(1)], 60) == 0


@pytest.fixture
def over_disk(tmp_path: Path) -> Iterator[Callable[[], NodeStore]]:
    """A store over memory and disk; called again, as after a restart."""
    document = {"memory": {"capacity": "1Mi"}, "disk": {"path": str(tmp_path / "kv"), "capacity": "8Mi"}}
    stores: list[NodeStore] = []

    def begin() -> NodeStore:
        for store in stores:
            store.close()
        stores.append(NodeStore(open_store(parse_settings(document))))
        return stores[-1]

    yield begin
    stores[-1].close()


def put_twice(store: NodeStore, *numbers: int, **more: Any) -> None:
    """The second offer brings a chunk to the disk."""
    for _ in range(2):
        for number in numbers:
            put(store, number, number - 1, **more)
    assert store.tier.flush()


def test_a_purge_and_a_lookup_know_all_tiers(over_disk: Callable[[], NodeStore]) -> None:
    store = over_disk()
    put_twice(store, 1, 2, tenant="a")
    put(store, 3, tenant="a")
    put(store, 4, tenant="b")
    assert store.where([key(number) for number in range(1, 6)]) == [
        ("memory", "disk"), ("memory", "disk"), ("memory",), ("memory",), (),
    ]  # fmt: skip
    assert store.clear(tenant="a") == Removed(5)
    assert held(store) == {4}
    assert held(over_disk()) == set()


def test_chains_are_known_after_a_restart(over_disk: Callable[[], NodeStore]) -> None:
    put_twice(over_disk(), 1, 2, 3, 4)
    store = over_disk()
    assert held(store) == {1, 2, 3, 4}
    assert store.invalidate_chain(key(3).chain.hex()[:8]) == Removed(2)
    assert held(store) == {1, 2}


def test_a_drain_leaves_all_on_disk(over_disk: Callable[[], NodeStore]) -> None:
    store = over_disk()
    put(store, 1), put(store, 2, 1)
    assert store.where([key(1)]) == [("memory",)]
    assert store.drain(20)
    assert held(over_disk()) == {1, 2}


def test_a_bucket_is_a_tier_like_the_others(s3_url: str, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "AWS_ACCESS_KEY_ID").write_text("key")
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text("secret")
    s3 = {"bucket": bucket, "prefix": "node-store", "endpoint": s3_url, "credentialsDir": str(tmp_path)}
    document = parse_settings({"memory": {"capacity": "1Mi"}, "s3": s3})
    keys = [key(number) for number in range(1, 5)]
    with closing(NodeStore(open_store(document))) as store:
        put_twice(store, 1, 2, 3, tenant="a")
        assert store.where(keys) == [("memory", "s3")] * 3 + [()]
    # Another node: nothing but the bucket.
    with closing(NodeStore(open_store(document))) as other:
        assert other.tier.get(keys[0]) == bytes([1]) * PAGE
        assert other.where(keys) == [("s3",)] * 3 + [()]
        assert other.pin("transfer", keys, 30) == 3, "they stay for as long as the bucket keeps them"
        assert other.clear(tenant="a").count == 3
        assert other.where(keys) == [()] * 4


def test_a_purge_that_a_tier_did_not_hear_of_says_so(clock: Clock) -> None:
    class Ill(MemoryTier):
        is_ill = True

        def clear(self, **which: Any) -> int:
            if self.is_ill:
                raise OSError("no route")
            return super().clear(**which)

    place = Ill(8 * PAGE)
    guarded = GuardedTier(place, BreakerLimits(least=1, window=1), clock)
    levels = [
        Level(MemoryTier(8 * PAGE), LevelOptions(name="memory", is_immediate=True), clock),
        Level(guarded, LevelOptions(name="far", is_indexed=False), clock),
    ]
    store = NodeStore(TieredStore(levels, clock=clock))
    put(store, 1, tenant="a")
    place.put(key(1), b"x", tenant="a")
    assert store.clear(tenant="a") == Removed(1, ("far",))
    place.is_ill = False
    assert store.clear(tenant="a") == Removed(0, ("far",)), "its breaker is open: it was not even asked"
    clock.now += 60
    assert store.clear(tenant="a") == Removed(1)
    store.close()


class StoreAgainstModel(RuleBasedStateMachine):
    """No chunk is served past its life, pinned ones stay, and bytes of pins add up, in any order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = make(self.clock, pages=6, ttl=20)
        self.stored: dict[int, float] = {}
        self.pins: dict[str, tuple[int, float]] = {}

    def drop(self, *numbers: int) -> None:
        for number in numbers:
            self.stored.pop(number, None)
        self.pins = {name: pin for name, pin in self.pins.items() if pin[0] not in numbers}

    def settle(self) -> None:
        """Forget in the model what is over by now."""
        now = self.clock.now
        self.store.sweep()
        self.drop(*[number for number, at in self.stored.items() if now - at >= 20])
        self.pins = {name: pin for name, pin in self.pins.items() if pin[1] > now}

    @rule(number=st.integers(0, 9), parent=st.none() | st.integers(0, 9))
    def put(self, number: int, parent: int | None) -> None:
        there = self.store.tier.contains([key(number)])
        if put(self.store, number, parent) and not there:
            self.stored[number] = self.clock.now

    @rule(number=st.integers(0, 9))
    def read(self, number: int) -> None:
        lease = self.store.tier.lease(key(number))
        if lease is not None:
            assert lease.payload == bytes([number]) * PAGE and self.clock.now - self.stored[number] < 20
            lease.release()

    @rule(number=st.integers(0, 9), holder=st.sampled_from(["a", "b", "c"]), seconds=st.integers(1, 30))
    def pin(self, number: int, holder: str, seconds: int) -> None:
        there = self.store.tier.contains([key(number)])
        if there:
            assert self.store.pin(holder, [key(number)], seconds) == 1
            self.pins[holder] = number, self.clock.now + seconds

    @rule(holder=st.sampled_from(["a", "b", "c"]))
    def unpin(self, holder: str) -> None:
        assert self.store.unpin(holder) == (holder in self.pins)
        self.pins.pop(holder, None)

    @rule(number=st.integers(0, 9))
    def delete(self, number: int) -> None:
        self.store.tier.delete(key(number))
        self.drop(number)

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def adds_up(self) -> None:
        self.settle()
        pinned = {number for number, _ in self.pins.values()}
        assert self.store.pinned == Pinned(len(pinned), len(pinned) * PAGE)
        assert pinned <= held(self.store) <= self.stored.keys()
        assert self.store.tiered.leases.num == 0


StoreAgainstModel.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestStoreAgainstModel = StoreAgainstModel.TestCase
