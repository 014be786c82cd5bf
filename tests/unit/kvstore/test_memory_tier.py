"""The memory tier against a model of it: the byte bound, the order of eviction, and what happens to bad chunks."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline_kvstore import ChunkKey, CorruptChunk, codec
from paceline_kvstore.tiers import MemoryTier, Tier

CAPACITY = 1000
HEADER = codec.HEADER_BYTES


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 16)


def stored(tier: MemoryTier, number: int) -> bytearray:
    """The tier's own buffer, to damage it as a stray write would."""
    return tier._chunks[key(number)][0]


class TierAgainstModel(RuleBasedStateMachine):
    """An ordered dict with the same bound, written the slow and obvious way."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = MemoryTier(CAPACITY)
        self.model: OrderedDict[int, bytes] = OrderedDict()

    def model_bytes(self) -> int:
        return sum(HEADER + len(payload) for payload in self.model.values())

    @rule(number=st.integers(0, 9), payload=st.binary(max_size=CAPACITY))
    def put(self, number: int, payload: bytes) -> None:
        fits = HEADER + len(payload) <= CAPACITY
        assert self.tier.put(key(number), payload) is fits
        if fits:
            self.model.pop(number, None)
            self.model[number] = payload
            while self.model_bytes() > CAPACITY:
                self.model.popitem(last=False)

    @rule(number=st.integers(0, 9))
    def get(self, number: int) -> None:
        payload = self.tier.get(key(number))
        assert payload == self.model.get(number)
        if payload is not None:
            self.model.move_to_end(number)

    @rule(number=st.integers(0, 9))
    def delete(self, number: int) -> None:
        assert self.tier.delete(key(number)) is (self.model.pop(number, None) is not None)

    @rule(number=st.integers(0, 9), bit=st.integers(0, 7))
    def damage(self, number: int, bit: int) -> None:
        if number in self.model:
            stored(self.tier, number)[-1] ^= 1 << bit
            assert self.tier.get(key(number)) is None
            del self.model[number]

    @invariant()
    def bounded_and_balanced(self) -> None:
        self.tier.check_integrity()
        assert self.tier.bytes_used == self.model_bytes() <= self.tier.capacity
        assert len(self.tier) == len(self.model)


TestTierAgainstModel = TierAgainstModel.TestCase
TestTierAgainstModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_it_is_a_tier():
    tier: Tier = MemoryTier(CAPACITY)
    assert tier.put(key(1), b"abc")
    assert tier.get(key(1)) == b"abc"
    assert tier.bytes_used == HEADER + 3


def test_the_least_recently_used_chunk_goes_first():
    tier = MemoryTier(3 * (HEADER + 10))
    for number in (1, 2, 3):
        tier.put(key(number), bytes(10))
    tier.get(key(1))
    tier.put(key(4), bytes(10))
    assert [number for number in (1, 2, 3, 4) if key(number) in tier] == [1, 3, 4]
    assert tier.stats.evictions == 1


def test_what_can_never_fit_is_refused_and_costs_nothing():
    tier = MemoryTier(HEADER + 10)
    tier.put(key(1), bytes(10))
    assert not tier.put(key(2), bytes(11))
    assert not tier.put(key(1), bytes(11))
    assert tier.get(key(1)) == bytes(10)


def test_a_tier_of_zero_bytes_keeps_nothing():
    tier = MemoryTier(0)
    assert not tier.put(key(1), b"")
    assert tier.get(key(1)) is None


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="must not be negative"):
        MemoryTier(-1)


def test_a_damaged_chunk_is_a_miss_once_and_then_gone():
    tier = MemoryTier(CAPACITY)
    tier.put(key(1), b"attention")
    stored(tier, 1)[HEADER] ^= 1
    with pytest.raises(CorruptChunk):
        tier.check_integrity()
    assert tier.get(key(1)) is None
    assert tier.get(key(1)) is None
    assert (tier.stats.corrupt, tier.stats.misses, tier.stats.hits) == (1, 2, 0)
    assert tier.bytes_used == 0


def test_a_chunk_under_the_wrong_key_is_never_served():
    tier = MemoryTier(CAPACITY)
    tier.put(key(1), b"one")
    tier.put(key(2), b"two")
    stored(tier, 2)[:] = stored(tier, 1)
    assert tier.get(key(2)) is None
    assert tier.stats.corrupt == 1


def test_the_tier_keeps_its_own_copy():
    tier = MemoryTier(CAPACITY)
    payload = bytearray(b"before")
    tier.put(key(1), payload)
    payload[:] = b"after!"
    assert tier.get(key(1)) == b"before"


def test_a_view_outlives_eviction():
    tier = MemoryTier(HEADER + 10)
    tier.put(key(1), b"0123456789")
    view = tier.get(key(1))
    tier.put(key(2), bytes(10))
    assert view == b"0123456789"


def test_counts_add_up_under_threads():
    tier = MemoryTier(5 * (HEADER + 8))

    def work(seed: int) -> int:
        for step in range(300):
            number = (seed * 7 + step * 3) % 11
            if step % 3 == 0:
                tier.put(key(number), number.to_bytes(8, "big"))
            elif step % 17 == 0:
                tier.delete(key(number))
            else:
                payload = tier.get(key(number))
                assert payload is None or payload == number.to_bytes(8, "big")
        return sum(1 for step in range(300) if step % 3 != 0 and step % 17 != 0)

    with ThreadPoolExecutor(8) as pool:
        gets = sum(pool.map(work, range(8)))
    tier.check_integrity()
    assert tier.stats.hits + tier.stats.misses == gets
    assert tier.stats.corrupt == 0
