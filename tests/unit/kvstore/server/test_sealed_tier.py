"""A sealed tier around memory and around a node server: what the place sees, and what it can do to the reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline_kvstore import ChunkKey
from paceline_kvstore.crypto import KeyRing, SecretKey, Suite
from paceline_kvstore.tiers import MemoryTier, Tier
from paceline_kvstore.tiers.sealed import SealedTier, SealOptions

Key = Callable[..., ChunkKey]
OLD, NEW = SecretKey(b"\x01" * 32), SecretKey(b"\x02" * 32)
SUITES = pytest.mark.parametrize("suite", list(Suite))
PAYLOAD = b"attention" * 500


@SUITES
def test_it_is_a_tier_like_any_other(node: Any, key: Key, suite: Suite) -> None:
    for place in (MemoryTier(1 << 20), node.client()):
        tier: Tier = SealedTier(place, KeyRing(NEW), SealOptions(suite))
        assert tier.put(key(1), PAYLOAD, tenant="a") and tier.put(key(2), b"")
        assert tier.get(key(1)) == PAYLOAD and tier.get(key(2)) == b"" and tier.get(key(3)) is None
        target = bytearray(len(PAYLOAD))
        assert tier.read_into(key(1), target) == len(PAYLOAD) and target == PAYLOAD
        with pytest.raises(ValueError, match=f"the payload has {len(PAYLOAD)} bytes, the buffer 10"):
            tier.read_into(key(1), bytearray(10))
        lease = tier.lease(key(1))
        assert lease is not None
        with lease as payload:
            assert payload == PAYLOAD
        assert tier.contains([key(1), key(2), key(3)]) == 2 and set(tier.keys()) == {key(1), key(2)}
        assert (b"attention" in bytes(place.get(key(1)) or b"")) is (suite is Suite.SIGNED)
        assert tier.clear(tenant="a") == 1 and tier.delete(key(2))
        assert (tier.stats.corrupt, tier.stats.expired, tier.stats.errors) == (0, 0, 0)


@SUITES
def test_a_forged_chunk_is_a_miss_counted_and_dropped(key: Key, suite: Suite) -> None:
    place = MemoryTier(1 << 20)
    tier = SealedTier(place, KeyRing(NEW), SealOptions(suite))
    tier.put(key(1), PAYLOAD)
    sealed = bytearray(place.get(key(1)) or b"")
    sealed[100] ^= 1
    forgeries = [sealed, PAYLOAD * 4, b"", bytes(place.get(key(1)) or b"")]
    for number, forgery in enumerate(forgeries, start=10):
        place.put(key(number), bytes(forgery))  # with a checksum that is right, as any writer can make
        for read in (tier.get, tier.lease, lambda chunk: tier.read_into(chunk, bytearray(10_000))):
            assert read(key(number)) is None
            place.put(key(number), bytes(forgery))
    assert tier.stats.corrupt == 12 and tier.quarantine.counts["corrupt"] == 12
    assert tier.get(key(1)) == PAYLOAD
    tier.get(key(10))
    assert key(10) not in place
    assert tier.stats.hits == 3, "one, and two of the place itself: a refused chunk is no hit"


@SUITES
def test_keys_are_rotated_without_a_miss(key: Key, suite: Suite) -> None:
    place = MemoryTier(1 << 20)
    options = SealOptions(suite)
    before, both, after = (
        SealedTier(place, ring, options) for ring in (KeyRing(OLD), KeyRing(NEW, (OLD,)), KeyRing(NEW))
    )
    before.put(key(1), PAYLOAD)
    both.put(key(2), PAYLOAD)
    assert both.get(key(1)) == both.get(key(2)) == after.get(key(2)) == PAYLOAD
    assert before.get(key(2)) is None and after.get(key(1)) is None
    assert before.quarantine.counts["foreign"] == after.quarantine.counts["foreign"] == 1
    assert key(1) in place and key(2) in place, "others may have the key"


@SUITES
def test_a_life_ends_on_time_even_if_the_place_says_otherwise(key: Key, suite: Suite) -> None:
    now = [1_000_000.0]
    place = MemoryTier(1 << 20)
    tier = SealedTier(place, KeyRing(NEW), SealOptions(suite, ttl_s=60, wall_s=lambda: now[0]))
    tier.put(key(1), PAYLOAD)
    sealed = bytes(place.get(key(1)) or b"")
    now[0] += 59.9
    assert tier.get(key(1)) == PAYLOAD
    now[0] += 0.2
    assert tier.get(key(1)) is None and key(1) not in place
    assert (tier.stats.expired, tier.stats.corrupt) == (1, 0)
    place.put(key(1), sealed)
    now[0] -= 60 + 299
    assert tier.get(key(1)) == PAYLOAD, "clocks differ by minutes"
    now[0] -= 10
    assert tier.get(key(1)) is None
