"""The memory tier: chunks in this process, bounded in bytes, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from threading import Lock

from paceline_kvstore import codec
from paceline_kvstore.codec import Buffer
from paceline_kvstore.errors import CorruptChunk, KVStoreError
from paceline_kvstore.keys import ChunkKey


@dataclass(slots=True)
class TierStats:
    """Counts since the tier was made. `corrupt` also counts chunks of a foreign key or version."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    corrupt: int = 0


class MemoryTier:
    """Chunks in process memory.

    The bound covers headers and payloads exactly, not Python's few hundred bytes per entry. A view that `get` gave out
    keeps its chunk's memory alive after eviction: whoever holds one holds that many bytes beyond the bound.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity must not be negative, it is {capacity_bytes} bytes")
        self._capacity = capacity_bytes
        self._used = 0
        self._stats = TierStats()
        self._lock = Lock()
        # Least recently used first. A stored buffer is never written to again, so readers need no lock to verify it.
        self._chunks: OrderedDict[ChunkKey, bytearray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._chunks

    @property
    def bytes_used(self) -> int:
        return self._used

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def stats(self) -> TierStats:
        """A copy of the counts."""
        with self._lock:
            return replace(self._stats)

    def put(self, key: ChunkKey, payload: Buffer) -> bool:
        """Keep a copy, evicting as needed; False if the chunk is larger than the whole tier."""
        if codec.encoded_size(memoryview(payload).nbytes) > self._capacity:
            return False
        chunk = codec.encode(key, payload)
        with self._lock:
            self._remove(key)
            while self._used + len(chunk) > self._capacity:
                _, evicted = self._chunks.popitem(last=False)
                self._used -= len(evicted)
                self._stats.evictions += 1
            self._chunks[key] = chunk
            self._used += len(chunk)
        return True

    def get(self, key: ChunkKey) -> memoryview | None:
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                self._stats.misses += 1
                return None
            self._chunks.move_to_end(key)
        try:
            payload = codec.decode(chunk, key)
        except KVStoreError:
            self._quarantine(key, chunk)
            return None
        with self._lock:
            self._stats.hits += 1
        return payload

    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            return self._remove(key)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._chunks.clear()
            self._used = 0

    def check_integrity(self) -> None:
        """Raise CorruptChunk unless the byte count balances, the bound holds and each chunk is its key's own."""
        with self._lock:
            chunks = list(self._chunks.items())
            used = self._used
        held = sum(len(chunk) for _, chunk in chunks)
        if held != used:
            raise CorruptChunk(f"the tier counts {used} bytes and holds {held}")
        if not 0 <= used <= self._capacity:
            raise CorruptChunk(f"the tier holds {used} bytes, its capacity is {self._capacity}")
        for key, chunk in chunks:
            codec.decode(chunk, key)

    def _remove(self, key: ChunkKey) -> bool:
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return False
        self._used -= len(chunk)
        return True

    def _quarantine(self, key: ChunkKey, chunk: bytearray) -> None:
        """Drop a bad chunk unless a writer put a good one in its place meanwhile."""
        with self._lock:
            self._stats.corrupt += 1
            self._stats.misses += 1
            if self._chunks.get(key) is chunk:
                self._remove(key)
