"""The level of a store that other engines reach too: chunks are put there for them, and kept by leases.

A lease has a holder's name, so that whoever knows the name can prolong or end it, from any process. Calls wait for I/O.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.drain import begin
from paceline_kvstore.tiered.level import Level
from paceline_kvstore.tiered.store import TieredStore
from paceline_kvstore.tiered.writes import Chunk
from paceline_kvstore.tiers.base import layer
from paceline_kvstore.waiting import left


@runtime_checkable
class Leases(Protocol):
    """A tier that keeps chunks for a holder, whoever that is, until a time."""

    def pin(self, holder: str, keys: Sequence[ChunkKey], seconds: float) -> int:
        """Keep the leading keys that are there; how many those are."""
        ...

    def extend(self, holder: str, seconds: float) -> bool:
        """Keep them for so long from now; False if the holder keeps nothing."""
        ...

    def unpin(self, holder: str) -> bool:
        """Let go; False if the holder kept nothing."""
        ...


class SharedLevel:
    """Safe to call from several threads. Where the level has no leases, its chunks stay for as long as it keeps any."""

    def __init__(self, store: TieredStore, level: Level) -> None:
        self._store = store
        self._level = level
        self._leases = layer(level.tier, Leases)

    @property
    def name(self) -> str:
        """The level's."""
        return self._level.name

    def is_known(self, key: ChunkKey) -> bool:
        """Whether the level should have the chunk, as far as is known without asking. Does not wait."""
        return self._level.has(key)

    def find_in_memory(self, key: ChunkKey) -> memoryview | None:
        """The payload, if this process has it in memory, on its way or for good. Does not wait, does not copy."""
        staged = self._store.writes.find(key)
        if staged is not None:
            return staged
        for level in self._store.levels:
            if level.options.is_immediate and level.has(key):
                return level.read(key, 0.0)
        return None

    def find(self, keys: Sequence[ChunkKey], until: float) -> int:
        """How many leading keys are there."""
        return self._level.probe(keys, left(until))

    def put(self, chunk: Chunk) -> bool:
        """Keep the chunk, where other engines find it once `settle` has returned True."""
        return self._level.write(chunk.key, chunk.payload, chunk.parent, chunk.tenant, durable=False)

    def delete(self, key: ChunkKey) -> None:
        """Forget a chunk there."""
        self._level.delete(key)

    def settle(self, until: float) -> bool:
        """Wait until others find what was put, by whomever in this process; False if they don't by then."""
        # A tier with leases answers a put when the chunk is there; others have queues of their own.
        return self._leases is not None or begin(self._level, self._level.flush)(until)

    def hold(self, holder: str, keys: Sequence[ChunkKey], seconds: float) -> int:
        """Keep the leading chunks that are there, and how many those are."""
        if self._leases is None:
            return self.find(keys, time.monotonic() + seconds)
        return self._leases.pin(holder, keys, seconds)

    def extend(self, holder: str, seconds: float) -> bool:
        """Prolong a lease that somebody else may have made; False if there is none."""
        return self._leases is None or self._leases.extend(holder, seconds)

    def release(self, holder: str) -> None:
        """End a lease, if it hasn't ended."""
        if self._leases is not None:
            self._leases.unpin(holder)


def shared_level(store: TieredStore) -> SharedLevel | None:
    """The first level that other engines reach, if there is one."""
    return next((SharedLevel(store, level) for level in store.levels if level.options.is_shared), None)
