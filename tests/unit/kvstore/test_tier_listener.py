"""What a tier tells of its changes: the sum of them is what it holds, at every moment."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiers import DiskOptions, DiskTier, MemoryTier
from paceline_kvstore.tiers.base import Observable

PAYLOAD = bytes(5000)
Held = dict[ChunkKey, None]


def _key(number: int) -> ChunkKey:
    return ChunkKey(bytes([number % 2]) * 32, number.to_bytes(32, "big"), 16)


@pytest.fixture(params=["memory", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryTier | DiskTier:
    if request.param == "memory":
        return MemoryTier(20 * 8192)
    return DiskTier(tmp_path / "kv", 1 << 20, DiskOptions(segment_bytes=64 << 10, staging_bytes=1 << 20))


def test_changes_add_up_to_what_is_held(tier: MemoryTier | DiskTier) -> None:
    held: Held = {}
    assert isinstance(tier, Observable)

    def listen(key: ChunkKey, is_held: bool) -> None:
        if is_held:
            assert key not in held
            held[key] = None
        else:
            del held[key]

    tier.listener = listen
    dice = random.Random(7)
    for step in range(400):
        number = dice.randrange(200)
        if dice.random() < 0.85:
            tier.put(_key(number), PAYLOAD, parent=_key(number - 1) if number % 3 else None, tenant=f"t{number % 3}")
        else:
            tier.delete(_key(number))
        if step == 300:
            tier.clear(tenant="t1")
        if step % 20 == 0:
            assert set(held) == set(tier.keys())
    assert tier.stats.evictions > 0
    assert set(held) == set(tier.keys())
    tier.clear()
    assert not held
    tier.close()


def test_a_chunk_of_the_memory_tier_says_whence_it_is() -> None:
    tier = MemoryTier(1 << 20)
    tier.put(_key(2), PAYLOAD, parent=_key(1), tenant="acme")
    assert tier.origin(_key(2)) == (_key(1), "acme")
    assert tier.origin(_key(3)) is None
