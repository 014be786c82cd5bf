"""The memory tier against a model of it: the byte bound, leases, eviction, and what happens to bad chunks."""

from __future__ import annotations

import random
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline_kvstore import ChunkKey, CorruptChunk
from paceline_kvstore.arena import PAGE
from paceline_kvstore.codec import encode_header
from paceline_kvstore.policy.eviction import Lru
from paceline_kvstore.tiers import Lease, MemoryTier, Tier

SLOTS = 5


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 16)


def stored(tier: MemoryTier, number: int) -> np.ndarray:
    """The tier's own memory, to damage it as a stray write would."""
    return tier._chunks[key(number)].payload


class TierAgainstModel(RuleBasedStateMachine):
    """Chunks of up to one page, so that an ordered dict of SLOTS entries is the whole truth. Leases are held across
    everything: a leased chunk is never evicted, and its bytes never change."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = MemoryTier(SLOTS * PAGE + 100, eviction=Lru())
        self.model: OrderedDict[int, bytes] = OrderedDict()
        self.leases: list[tuple[int, Lease, bytes]] = []

    def leased(self, number: int) -> bool:
        return any(number == leased for leased, _, _ in self.leases)

    @rule(number=st.integers(0, 9), payload=st.binary(max_size=300))
    def put(self, number: int, payload: bytes) -> None:
        zombies = len([1 for leased, _, _ in self.leases if leased < 0])
        kept = self.tier.put(key(number), payload)
        if number in self.model:
            assert kept
            self.model.move_to_end(number)
            return
        victim = next((held for held in self.model if not self.leased(held)), None)
        full = len(self.model) + zombies >= SLOTS
        assert kept is not (full and victim is None)
        if kept:
            if full:
                del self.model[victim]
            self.model[number] = payload

    @rule(number=st.integers(0, 9))
    def get(self, number: int) -> None:
        payload = self.tier.get(key(number))
        assert payload == self.model.get(number)
        if payload is not None:
            self.model.move_to_end(number)

    @rule(number=st.integers(0, 9))
    def read_into(self, number: int) -> None:
        target = bytearray(300)
        size = self.tier.read_into(key(number), target)
        assert (None if size is None else bytes(target[:size])) == self.model.get(number)
        if size is not None:
            self.model.move_to_end(number)

    @rule(number=st.integers(0, 9))
    def lease(self, number: int) -> None:
        if self.leased(number):
            return
        lease = self.tier.lease(key(number))
        assert (lease is None) == (number not in self.model)
        if lease is not None:
            self.leases.append((number, lease, self.model[number]))
            self.model.move_to_end(number)

    @rule()
    def release(self) -> None:
        if self.leases:
            self.leases.pop(0)[1].release()

    @rule(number=st.integers(0, 9))
    def delete(self, number: int) -> None:
        assert self.tier.delete(key(number)) is (self.model.pop(number, None) is not None)
        # A dropped chunk that is leased keeps its page: a zombie, known by a negative number.
        self.leases = [(~held if held == number else held, lease, payload) for held, lease, payload in self.leases]

    @rule(first=st.integers(0, 9), count=st.integers(0, 4))
    def contains(self, first: int, count: int) -> None:
        numbers = range(first, first + count)
        leading = next((index for index, number in enumerate(numbers) if number not in self.model), count)
        assert self.tier.contains([key(number) for number in numbers]) == leading

    @rule(number=st.integers(0, 9), bit=st.integers(0, 7))
    def damage(self, number: int, bit: int) -> None:
        if self.model.get(number) and not self.leased(number):
            stored(self.tier, number)[-1] ^= 1 << bit
            assert self.tier.get(key(number)) is None
            del self.model[number]

    @invariant()
    def bounded_and_balanced(self) -> None:
        self.tier.check_integrity()
        assert set(self.tier.keys()) == {key(number) for number in self.model}
        zombies = len([1 for leased, _, _ in self.leases if leased < 0])
        assert self.tier.bytes_used == PAGE * (len(self.model) + zombies) <= self.tier.capacity
        assert self.tier.num_leased == len(self.leases)
        for _, lease, payload in self.leases:
            assert lease.payload == payload


TestTierAgainstModel = TierAgainstModel.TestCase
TestTierAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_it_is_a_tier():
    tier: Tier = MemoryTier(1 << 20)
    assert tier.put(key(1), b"abc")
    assert tier.get(key(1)) == b"abc"
    assert tier.bytes_used == PAGE


def test_what_must_survive_the_machine_is_refused():
    tier = MemoryTier(1 << 20)
    assert not tier.put(key(1), b"abc", durable=True)
    assert tier.stats.refused == 1
    assert not tier.flush()


def test_what_can_never_fit_is_refused_and_costs_nothing():
    tier = MemoryTier(2 * PAGE)
    tier.put(key(1), bytes(10))
    assert not tier.put(key(2), bytes(2 * PAGE + 1))
    assert tier.get(key(1)) == bytes(10)
    assert tier.stats.refused == 1


def test_a_tier_of_zero_bytes_keeps_nothing():
    tier = MemoryTier(0)
    assert not tier.put(key(1), b"")
    assert tier.get(key(1)) is None


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="must not be negative"):
        MemoryTier(-1)


def test_a_buffer_that_is_too_small_is_refused():
    tier = MemoryTier(PAGE)
    tier.put(key(1), bytes(10))
    with pytest.raises(ValueError, match="the payload has 10 bytes, the buffer 9"):
        tier.read_into(key(1), bytearray(9))


def test_a_damaged_chunk_is_a_miss_once_and_then_gone():
    tier = MemoryTier(PAGE)
    tier.put(key(1), b"attention")
    stored(tier, 1)[0] ^= 1
    with pytest.raises(CorruptChunk):
        tier.check_integrity()
    assert tier.get(key(1)) is None
    assert tier.get(key(1)) is None
    assert (tier.stats.corrupt, tier.stats.misses, tier.stats.hits) == (1, 2, 0)
    assert tier.quarantine.counts["corrupt"] == 1
    assert tier.bytes_used == 0


def test_a_chunk_under_the_wrong_key_is_never_served():
    tier = MemoryTier(2 * PAGE)
    tier.put(key(1), b"one")
    tier.put(key(2), b"two")
    tier._chunks[key(2)] = tier._chunks[key(1)]
    assert tier.get(key(2)) is None
    assert tier.quarantine.counts["foreign"] == 1


def test_the_tier_keeps_its_own_copy():
    tier = MemoryTier(PAGE)
    payload = bytearray(b"before")
    tier.put(key(1), payload)
    payload[:] = b"after!"
    assert tier.get(key(1)) == b"before"


def test_views_of_a_released_lease_keep_the_bytes():
    tier = MemoryTier(PAGE)
    tier.put(key(1), b"0123456789")
    lease = tier.lease(key(1))
    assert lease is not None
    with lease as payload:
        array = np.frombuffer(payload, dtype=np.uint8)[2:]
    tier.delete(key(1))
    assert not tier.put(key(2), bytes(10))
    assert array.tobytes() == b"23456789"
    del array, payload
    assert tier.num_leased == 0
    assert tier.put(key(2), bytes(10))


def test_a_released_lease_is_unusable():
    tier = MemoryTier(PAGE)
    tier.put(key(1), b"0123456789")
    lease = tier.lease(key(1))
    assert lease is not None
    lease.release()
    lease.release()
    with pytest.raises(ValueError, match="released"):
        bytes(lease.payload)


def test_a_leased_chunk_is_never_evicted():
    tier = MemoryTier(3 * PAGE)
    tier.put(key(0), b"leased")
    lease = tier.lease(key(0))
    assert lease is not None
    for number in range(1, 20):
        assert tier.put(key(number), bytes(10))
    assert key(0) in tier
    assert tier.stats.evictions == 17
    lease.release()
    for number in range(20, 40):
        assert tier.put(key(number), bytes(10))
    assert key(0) not in tier


def test_room_is_never_made_by_evicting_what_comes_before_in_the_chain():
    tier = MemoryTier(2 * PAGE)
    assert tier.put(key(1), b"1")
    assert tier.put(key(2), b"2", parent=key(1))
    assert not tier.put(key(3), b"3", parent=key(2))
    assert tier.contains([key(1), key(2)]) == 2
    assert tier.put(key(9), b"9")
    assert set(tier.keys()) == {key(1), key(9)}, "the end of the chain goes before its head"


def test_clear_by_namespace_and_tenant():
    tier = MemoryTier(1 << 20)
    other = ChunkKey(b"m" * 32, b"c" * 32, 16)
    tier.put(key(1), b"1", tenant="a")
    tier.put(key(2), b"2", tenant="b")
    tier.put(other, b"3", tenant="a")
    assert tier.clear(tenant="a", namespace=other.namespace) == 1
    assert tier.clear(tenant="a") == 1
    assert set(tier.keys()) == {key(2)}
    assert tier.clear() == 1
    assert tier.bytes_used == 0


def test_odd_sizes_for_a_long_time_do_not_eat_the_room():
    """Full chunks and chain ends of any length: most of the arena stays in use, and a full chunk always finds room."""
    full, capacity = 32 * PAGE, 640 * PAGE
    tier = MemoryTier(capacity)
    rng = random.Random(7)
    used: list[int] = []
    for number in range(4000):
        size = full if rng.random() < 0.7 else rng.randrange(1, full)
        assert tier.put(key(number), bytes(size))
        if rng.random() < 0.1:
            tier.delete(key(rng.randrange(number + 1)))
        used.append(tier.bytes_used)
    tier.check_integrity()
    assert sum(used[500:]) / len(used[500:]) > 0.85 * capacity
    assert tier.put(key(-1 % 2**64), bytes(full))


def test_memory_comes_from_the_allocator_that_is_given():
    given: list[bytearray] = []

    def allocate(size: int) -> bytearray:
        given.append(bytearray(size))
        return given[-1]

    tier = MemoryTier(3 * PAGE, allocate)
    tier.put(key(1), b"pinned")
    assert [len(memory) for memory in given] == [3 * PAGE]
    assert b"pinned" in given[0]


def test_counts_add_up_under_threads():
    tier = MemoryTier(5 * PAGE)

    def work(seed: int) -> int:
        for step in range(300):
            number = (seed * 7 + step * 3) % 11
            if step % 3 == 0:
                tier.put(key(number), number.to_bytes(8, "big") * 64)
            elif step % 17 == 0:
                tier.delete(key(number))
            else:
                payload = tier.get(key(number))
                assert payload is None or payload == number.to_bytes(8, "big") * 64
        return sum(1 for step in range(300) if step % 3 != 0 and step % 17 != 0)

    with ThreadPoolExecutor(8) as pool:
        gets = sum(pool.map(work, range(8)))
    tier.check_integrity()
    assert tier.stats.hits + tier.stats.misses == gets
    assert tier.stats.corrupt == 0
    assert tier.num_leased == 0


def test_a_chunk_received_into_the_tier_is_there_once_it_is_kept_and_not_before() -> None:
    tier = MemoryTier(4 * PAGE)
    filling = tier.fill(key(1), 5000, tenant="a")
    assert filling is not None and len(filling.buffer) == 5000
    filling.buffer[:] = b"x" * 5000
    assert key(1) not in tier and tier.bytes_used == 2 * PAGE
    assert filling.keep(encode_header(key(1), filling.buffer))
    del filling
    assert tier.stats.puts == 1 and tier.num_leased == 0
    assert tier.get(key(1)) == b"x" * 5000
    tier.check_integrity()
    assert tier.clear(tenant="a") == 1 and tier.bytes_used == 0


def test_a_chunk_whose_writer_gave_up_takes_no_room() -> None:
    tier = MemoryTier(2 * PAGE)
    for _ in range(10):
        filling = tier.fill(key(1), 2 * PAGE)
        assert filling is not None
        del filling
    assert tier.bytes_used == 0 and key(1) not in tier
    assert tier.put(key(2), bytes(2 * PAGE))


def test_receiving_evicts_as_a_put_does_and_never_what_is_being_received() -> None:
    tier = MemoryTier(2 * PAGE)
    tier.put(key(1), b"old")
    first, second = tier.fill(key(2), PAGE), tier.fill(key(3), PAGE)
    assert first is not None and second is not None and key(1) not in tier
    assert tier.fill(key(4), PAGE) is None and not tier.put(key(4), b"x")
    assert tier.stats.refused == 2 and tier.fill(key(5), 3 * PAGE) is None


def test_of_two_writers_of_one_chunk_the_first_to_finish_stays() -> None:
    tier = MemoryTier(4 * PAGE)
    fillings = [tier.fill(key(1), 3), tier.fill(key(1), 3)]
    for filling, payload in zip(fillings, (b"one", b"two"), strict=True):
        assert filling is not None
        filling.buffer[:] = payload
        assert filling.keep(encode_header(key(1), payload))
    del filling
    fillings.clear()
    assert tier.get(key(1)) == b"one" and tier.bytes_used == PAGE
    assert tier.fill(key(1), 3) is None, "it is there already"
    tier.check_integrity()
