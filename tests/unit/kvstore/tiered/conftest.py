"""Stores on real tiers, and a place whose calls a test can hold up or let fail.

Puts this folder on the path, so that the tests can import what they share; test folders are no packages.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.holds import Holds
from paceline_kvstore.tiered.level import Level, LevelOptions
from paceline_kvstore.tiered.store import TieredStore
from paceline_kvstore.tiers import DiskOptions, DiskTier, MemoryTier
from paceline_kvstore.tiers.base import Lease

sys.path.insert(0, str(Path(__file__).parent))

CHUNK = 4096
SECONDS = 10.0
"""Longer than anything here takes; a test that waits as long has failed."""

MakeStore = Callable[..., TieredStore]


class Gate(threading.Event):
    """Calls pass while it is set. `entered` has one more for each that came to it."""

    def __init__(self) -> None:
        super().__init__()
        self.set()
        self.entered = threading.Semaphore(0)

    def shut(self) -> None:
        """Hold calls up from now on, and count those that come from zero."""
        self.clear()
        while self.entered.acquire(blocking=False):
            pass

    def wait_entered(self) -> None:
        """Until one more call is held up."""
        assert self.entered.acquire(timeout=SECONDS)

    def enter(self) -> None:
        self.entered.release()
        assert self.wait(SECONDS)


class Held(MemoryTier):
    """A place whose reads, writes and lookups wait while the test says so, and fail while it says so."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        super().__init__(capacity)
        self.reads, self.writes, self.lookups = Gate(), Gate(), Gate()
        self.is_broken = False

    def put(self, key: ChunkKey, payload: Any, **options: Any) -> bool:
        self._enter(self.writes)
        return super().put(key, payload, **options)

    def lease(self, key: ChunkKey, *, deadline: float | None = None) -> Lease | None:
        # Held up with the payload in hand: what happens meanwhile happens after it was read.
        lease = super().lease(key, deadline=deadline)
        self._enter(self.reads)
        return lease

    def contains(self, keys: Sequence[ChunkKey], *, deadline: float | None = None) -> int:
        self._enter(self.lookups)
        return super().contains(keys, deadline=deadline)

    def _enter(self, gate: Gate) -> None:
        gate.enter()
        if self.is_broken:
            raise OSError("the place is broken")


def key_of(number: int, namespace: int = 0) -> ChunkKey:
    return ChunkKey(bytes([namespace]) * 32, number.to_bytes(32, "big"), 16)


def payload_of(key: ChunkKey, size: int = CHUNK) -> bytes:
    return (key.namespace[:1] + key.chain[-4:]) * (size // 5 + 1)


@pytest.fixture
def key() -> Callable[..., ChunkKey]:
    return key_of


@pytest.fixture
def payload() -> Callable[..., bytes]:
    return payload_of


@pytest.fixture
def held() -> Iterator[Held]:
    place = Held()
    yield place
    for gate in (place.reads, place.writes, place.lookups):
        gate.set()


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    """A store over memory, and over disk and another tier where the test gives options for them."""
    stores: list[TieredStore] = []

    def make(
        *,
        memory_chunks: int = 64,
        memory: dict[str, Any] | None = None,
        disk: dict[str, Any] | None = None,
        other: tuple[MemoryTier, dict[str, Any]] | None = None,
        **options: Any,
    ) -> TieredStore:
        pins: Holds[ChunkKey] = Holds(1000)
        clock = {"clock": options["clock"]} if "clock" in options else {}
        now = options.get("clock", time.monotonic)
        first = LevelOptions(**{"name": "memory", "is_immediate": True} | (memory or {}))

        def is_pinned(key: ChunkKey) -> bool:
            return pins.is_held(key, now())

        levels = [Level(MemoryTier(memory_chunks * 8192, spared=is_pinned), first, **clock, spared=is_pinned)]
        if disk is not None:
            capacity = disk.pop("capacity", 2 << 20)
            tier = DiskTier(
                tmp_path / "kv",
                capacity,
                DiskOptions(segment_bytes=128 << 10, staging_bytes=1 << 20, spared=is_pinned),
            )
            defaults = {"name": "disk", "is_durable": True, "needs_second_offer": True}
            levels.append(Level(tier, LevelOptions(**defaults | disk), **clock))
        if other is not None:
            place, given = other
            levels.append(Level(place, LevelOptions(**{"name": "other"} | given), **clock))
        stores.append(TieredStore(levels, pins=pins, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close(SECONDS)
