"""A guarded tier answers a miss to every fault, stops asking an ill place, and asks again when it is well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline_kvstore import ChunkKey
from paceline_kvstore.breaker import BreakerLimits, Outcome, State
from paceline_kvstore.errors import TierFault
from paceline_kvstore.tiers import GuardedTier, MemoryTier, Tier

LIMITS = BreakerLimits(least=2)
KEY = ChunkKey(b"n" * 32, b"c" * 32, 16)


class Ill(MemoryTier):
    """A memory tier that fails as told, and counts how often it was asked."""

    error: Exception | None = None
    seconds = 0.0
    asked = 0

    def __init__(self) -> None:
        super().__init__(10_000)
        self.now = 0.0

    def _ask(self) -> None:
        self.asked += 1
        self.now += self.seconds
        if self.error is not None:
            raise self.error

    def put(self, key: ChunkKey, payload: Any, **options: Any) -> bool:
        self._ask()
        return super().put(key, payload, **options)

    def get(self, key: ChunkKey, *, deadline: float | None = None) -> memoryview | None:
        self._ask()
        return super().get(key, deadline=deadline)

    def contains(self, keys: Any, *, deadline: float | None = None) -> int:
        self._ask()
        return super().contains(keys, deadline=deadline)

    def keys(self) -> Iterator[ChunkKey]:
        self._ask()
        return super().keys()

    def flush(self) -> bool:
        self._ask()
        return super().flush()


def guarded() -> tuple[GuardedTier, Ill]:
    place = Ill()
    return GuardedTier(place, LIMITS, clock=lambda: place.now), place


def test_it_is_a_tier():
    tier: Tier = guarded()[0]
    assert tier.put(KEY, b"state", durable=False)
    assert tier.get(KEY) == b"state"
    assert tier.contains([KEY]) == 1
    target = bytearray(8)
    assert tier.read_into(KEY, target) == 5 and target[:5] == b"state"
    with tier.lease(KEY) or pytest.fail("no lease") as payload:
        assert payload == b"state"
    assert list(tier.keys()) == [KEY]
    assert not tier.flush()  # Memory is never durable.
    assert tier.delete(KEY)
    assert tier.clear() == 0


@pytest.mark.parametrize("error", [TierFault("down"), OSError("no such device"), KeyError("a bug"), MemoryError()])
def test_a_fault_is_a_miss_and_soon_nobody_asks(error: Exception):
    tier, place = guarded()
    place.put(KEY, b"state")
    place.error, place.asked = error, 0
    answers = [tier.get(KEY) for _ in range(20)]
    assert answers == [None] * 20
    assert place.asked == LIMITS.least
    assert tier.contains([KEY]) == 0
    assert list(tier.keys()) == []
    assert tier.reads.state is State.OPEN


def test_a_place_that_refuses_writes_is_still_read():
    tier, place = guarded()
    place.put(KEY, b"state")
    place.error = TierFault("403", Outcome.DENIED)
    assert not tier.put(KEY, b"other")
    place.error = None
    assert not tier.put(KEY, b"other")  # Not asked again yet.
    assert tier.get(KEY) == b"state"


def test_a_slow_place_is_left_alone():
    tier, place = guarded()
    place.seconds = LIMITS.slow_seconds
    for _ in range(10):
        tier.get(KEY)
    assert place.asked == LIMITS.least


def test_a_put_that_waits_to_be_durable_is_not_held_against_the_place():
    tier, place = guarded()
    place.seconds = LIMITS.slow_seconds
    for _ in range(10):
        assert tier.put(KEY, b"state", durable=True) is False  # Memory is never durable.
        tier.clear()
    assert place.asked == 10


def test_it_comes_back_by_itself():
    tier, place = guarded()
    place.put(KEY, b"state")
    place.error = TierFault("down")
    for _ in range(200):  # A long outage, asked once a second.
        tier.get(KEY)
        place.now += 1
    place.error = None
    healed = place.now
    while tier.get(KEY) is None:
        place.now += 1
    assert place.now - healed <= 60
    assert all(tier.get(KEY) == b"state" for _ in range(5))


def test_the_callers_mistake_is_told_and_not_held_against_the_place():
    tier, place = guarded()
    place.put(KEY, b"state")
    for _ in range(10):
        with pytest.raises(ValueError, match="buffer"):
            tier.read_into(KEY, bytearray(2))
    assert tier.reads.state is State.CLOSED


def test_flush_is_asked_of_an_ill_place_too():
    tier, place = guarded()
    place.error = TierFault("403", Outcome.DENIED)
    tier.put(KEY, b"state")
    asked = place.asked
    assert not tier.flush()
    assert place.asked == asked + 1
