"""What the node server adds to a tier: pins, age, purges of what follows a chunk. On a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline_kvstore import ChunkKey
from paceline_kvstore.server.pins import PinLimits
from paceline_kvstore.server.store import ADMIN, NodeStore, Pinned
from paceline_kvstore.tiers import MemoryTier

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
    return NodeStore(MemoryTier(pages * PAGE), ttl=ttl, pin_limits=PinLimits(4, 3 * PAGE, 60), clock=clock)


def put(store: NodeStore, number: int, parent: int | None = None, tenant: str = "") -> bool:
    above = None if parent is None else key(parent)
    return store.put(key(number), bytes([number]) * PAGE, parent=above, tenant=tenant, durable=False)


def held(store: NodeStore) -> set[int]:
    return {number for number in range(40) if store.contains([key(number)])}


def test_a_pinned_chunk_outlives_any_number_of_puts(clock: Clock) -> None:
    store = make(clock, pages=4)
    put(store, 1)
    assert store.pin(ADMIN, [key(1)], 30) == 1
    for number in range(10, 30):
        put(store, number)
    assert 1 in held(store) and len(held(store)) == 4
    clock.now += 30
    store.sweep()
    assert store.pinned == Pinned(0, 0)
    for number in range(10, 30):
        put(store, number)
    assert 1 not in held(store)


def test_pins_stop_at_the_first_chunk_that_is_missing(clock: Clock) -> None:
    store = make(clock)
    put(store, 1), put(store, 3)
    assert store.pin(ADMIN, [key(1), key(2), key(3)], 30) == 1
    assert store.pinned == Pinned(1, PAGE)


def test_pins_are_bounded_in_number_bytes_and_time(clock: Clock) -> None:
    store = make(clock)
    for number in range(5):
        put(store, number)
    assert store.pin(ADMIN, [key(number) for number in range(5)], 10**9) == 3, "three pages are the bound"
    clock.now += 60
    store.sweep()
    assert store.pinned.count == 0, "a minute is the bound"
    for number in range(10, 15):
        store.put(key(number), b"x", parent=None, tenant="", durable=False)
    assert store.pin(ADMIN, [key(number) for number in range(10, 15)], 30) == 4, "four pins are the bound"


def test_pinning_again_makes_it_longer_and_takes_no_more_room(clock: Clock) -> None:
    store = make(clock)
    put(store, 1)
    for _ in range(10):
        assert store.pin(ADMIN, [key(1)], 20) == 1
        clock.now += 19
        store.sweep()
    assert store.pinned == Pinned(1, PAGE)
    assert store.unpin(ADMIN, [key(1), key(1), key(2)]) == 1
    assert store.pinned == Pinned(0, 0)


def test_the_pins_of_a_session_end_with_its_last_connection(clock: Clock) -> None:
    store = make(clock)
    put(store, 1)
    session, other = b"s" * 16, b"o" * 16
    for each in (session, session, other):
        store.open_session(each)
    assert store.pin(session, [key(1)], 30) == store.pin(other, [key(1)], 30) == 1
    store.close_session(session)
    assert store.pinned.count == 2
    store.close_session(session)
    assert store.pinned.count == 1 and store.is_pinned(key(1))
    assert store.pin(session, [key(1)], 30) == 0, "nobody would be there to end it"
    assert store.unpin(session, [key(1)]) == 0, "nobody lets go of another's pin"


def test_a_purge_takes_pinned_chunks_too_and_gives_their_memory_back(clock: Clock) -> None:
    store = make(clock)
    put(store, 1, tenant="a"), put(store, 2, tenant="b")
    store.pin(ADMIN, [key(1), key(2)], 30)
    assert store.clear(tenant="a") == 1
    assert store.pinned == Pinned(1, PAGE) and store.tier.bytes_used == PAGE
    assert store.delete([key(2)]) == 1
    assert store.pinned == Pinned(0, 0) and store.tier.bytes_used == 0


def test_clear_is_by_namespace_and_tenant(clock: Clock) -> None:
    store = make(clock)
    for number, (namespace, tenant) in enumerate([(b"m", "a"), (b"m", "b"), (b"n", "a"), (b"n", "b")]):
        store.put(key(number, namespace * 32), b"x", parent=None, tenant=tenant, durable=False)
    assert store.clear(namespace=b"m" * 32, tenant="a") == 1
    assert store.clear(tenant="a") == 1
    assert store.clear(namespace=b"n" * 32) == 1
    assert list(store.tier.keys()) == [key(1, b"m" * 32)]


def test_an_invalidated_chain_goes_with_all_that_follows_it(clock: Clock) -> None:
    store = make(clock)
    for number, parent in ((1, None), (2, 1), (3, 2), (4, 2), (5, 1), (6, None)):
        put(store, number, parent)
    assert store.invalidate_chain(key(2).chain.hex()[:8]) == 3
    assert held(store) == {1, 5, 6}
    assert store.invalidate_chain("ff" * 8) == 0


def test_a_chunk_is_gone_at_the_end_of_its_life_and_not_before(clock: Clock) -> None:
    store = make(clock, ttl=10)
    put(store, 1)
    clock.now += 9.9
    assert put(store, 1), "it is there already, and stays as old as it is"
    assert store.lease(key(1)) is not None and store.contains([key(1)]) == 1
    clock.now += 0.1
    assert store.contains([key(1)]) == 0
    assert store.lease(key(1)) is None
    assert store.stats.expired == 1 and store.tier.bytes_used == 0
    assert put(store, 1) and store.contains([key(1)]) == 1


def test_a_pin_does_not_make_a_life_longer(clock: Clock) -> None:
    store = make(clock, ttl=10)
    put(store, 1)
    store.pin(ADMIN, [key(1)], 60)
    clock.now += 10
    store.sweep()
    assert store.pinned == Pinned(0, 0) and store.tier.bytes_used == 0 and store.stats.expired == 1
    assert store.pin(ADMIN, [key(1)], 60) == 0


def test_what_it_remembers_of_chunks_that_are_gone_is_bounded() -> None:
    clock = Clock()
    store = make(clock, pages=4)
    for number in range(5000):
        chunk = ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 16)
        store.put(chunk, b"x", parent=None, tenant="", durable=False)
        clock.now += 1
        if number % 100 == 0:
            store.sweep()
    assert len(store._ledger) <= 1024 + 100


class StoreAgainstModel(RuleBasedStateMachine):
    """No chunk is served past its life, pinned ones stay, and bytes of pins add up, in any order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = make(self.clock, pages=6, ttl=20)
        self.store.open_session(b"a" * 16)
        self.stored: dict[int, float] = {}
        self.pins: dict[tuple[bytes, int], float] = {}

    def drop(self, *numbers: int) -> None:
        for number in numbers:
            self.stored.pop(number, None)
            for owner in (ADMIN, b"a" * 16):
                self.pins.pop((owner, number), None)

    def settle(self) -> None:
        """Forget in the model what is over by now."""
        now = self.clock.now
        self.drop(*[number for number, at in self.stored.items() if now - at >= 20])
        self.pins = {pin: until for pin, until in self.pins.items() if until > now}

    @rule(number=st.integers(0, 9), parent=st.none() | st.integers(0, 9))
    def put(self, number: int, parent: int | None) -> None:
        there = self.store.contains([key(number)])
        if put(self.store, number, parent) and not there:
            self.stored[number] = self.clock.now

    @rule(number=st.integers(0, 9))
    def read(self, number: int) -> None:
        lease = self.store.lease(key(number))
        if lease is not None:
            assert lease.payload == bytes([number]) * PAGE and self.clock.now - self.stored[number] < 20
            lease.release()

    @rule(number=st.integers(0, 9), owner=st.sampled_from([ADMIN, b"a" * 16]), seconds=st.integers(1, 30))
    def pin(self, number: int, owner: bytes, seconds: int) -> None:
        if self.store.pin(owner, [key(number)], seconds):
            until = self.clock.now + seconds
            self.pins[owner, number] = max(until, self.pins.get((owner, number), 0))

    @rule(number=st.integers(0, 9), owner=st.sampled_from([ADMIN, b"a" * 16]))
    def unpin(self, number: int, owner: bytes) -> None:
        assert self.store.unpin(owner, [key(number)]) == ((owner, number) in self.pins)
        self.pins.pop((owner, number), None)

    @rule(number=st.integers(0, 9))
    def delete(self, number: int) -> None:
        self.store.delete([key(number)])
        self.drop(number)

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        self.store.sweep()

    @invariant()
    def adds_up(self) -> None:
        self.settle()
        assert self.store.pinned == Pinned(len(self.pins), len(self.pins) * PAGE)
        for _, number in self.pins:
            assert self.store.contains([key(number)]) == 1
        assert held(self.store) <= self.stored.keys()


StoreAgainstModel.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestStoreAgainstModel = StoreAgainstModel.TestCase
