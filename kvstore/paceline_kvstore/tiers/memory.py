"""The memory tier: chunks in one fixed arena of this process, handed out without a copy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np

from paceline_kvstore import codec
from paceline_kvstore.arena import Allocator, Arena, Bytes, map_memory, pages
from paceline_kvstore.codec import Buffer
from paceline_kvstore.errors import CorruptChunk, KVStoreError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.eviction import AdaptiveLru, Eviction, nothing_spared
from paceline_kvstore.quarantine import Quarantine
from paceline_kvstore.stats import TierStats
from paceline_kvstore.tiers.base import Filling, Lease, Listener

UNSHARED = 2
"""What `sys.getrefcount(chunk.payload)` says while only the tier holds it: its own reference and the argument."""


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk held. Every view that was handed out keeps `payload` alive; its end gives the extent back."""

    header: bytes
    payload: Bytes
    tenant: str
    parent: ChunkKey | None


class MemoryTier:
    """Chunks in process memory: payloads on pages of the arena, headers beside them.

    `capacity` bounds the payloads' pages, also of chunks that are gone while somebody still reads them; Python's
    bookkeeping (about 1 KiB a chunk) comes on top. The checksum is made when a chunk comes in, and `get` checks it;
    `lease` and `read_into` trust this process's memory. `allocate` makes the arena's memory: pinned, where a device
    reads it. `eviction` decides what goes; `AdaptiveLru` by default. `spared`: chunks that must stay.
    """

    def __init__(
        self,
        capacity_bytes: int,
        allocate: Allocator = map_memory,
        eviction: Eviction[ChunkKey] | None = None,
        *,
        spared: Callable[[ChunkKey], bool] = nothing_spared,
    ) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity must not be negative, it is {capacity_bytes} bytes")
        self.quarantine = Quarantine()
        self.listener: Listener | None = None
        self._capacity = capacity_bytes
        self._arena = Arena(capacity_bytes, allocate)
        self._eviction: Eviction[ChunkKey] = AdaptiveLru() if eviction is None else eviction
        self._spared = spared
        self._stats = TierStats()
        self._lock = Lock()
        self._chunks: dict[ChunkKey, _Chunk] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._chunks

    @staticmethod
    def footprint(payload_bytes: int) -> int:
        """Bytes of the capacity that a payload takes: whole pages."""
        return pages(payload_bytes)

    @property
    def bytes_used(self) -> int:
        return self._arena.bytes_used

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def num_leased(self) -> int:
        """Chunks that somebody outside the tier can still read, dropped ones included."""
        with self._lock:
            busy = sum(sys.getrefcount(chunk.payload) > UNSHARED for chunk in self._chunks.values())
            return busy + self._arena.num_taken - len(self._chunks)

    @property
    def stats(self) -> TierStats:
        """A copy of the counts."""
        with self._lock:
            return replace(self._stats)

    def put(
        self,
        key: ChunkKey,
        payload: Buffer,
        *,
        parent: ChunkKey | None = None,
        tenant: str = "",
        durable: bool = False,
    ) -> bool:
        """Keep a copy, evicting as needed.

        False if nothing more can go (the rest is leased, or comes before this chunk in its chain), if the chunk is
        larger than the tier, or must be durable.
        """
        source = np.frombuffer(codec.as_bytes(payload), dtype=np.uint8)
        with self._lock:
            if key in self._chunks and not durable:
                self._eviction.touch(key)
                return True
            target = None if durable else self._take(len(source), parent)
            if target is None:
                self._stats.refused += 1
                return False
        # Outside the lock: leases must not wait for a copy. The extent is nobody else's until it is published.
        np.copyto(target, source)
        return self._publish(key, _Chunk(codec.encode_header(key, source.data), target, tenant, parent), parent)

    def fill(
        self, key: ChunkKey, num_bytes: int, *, parent: ChunkKey | None = None, tenant: str = ""
    ) -> Filling | None:
        with self._lock:
            target = None if key in self._chunks else self._take(num_bytes, parent)
            if target is None:
                self._stats.refused += 1
                return None
        return Filling(target.data, lambda header: self._publish(key, _Chunk(header, target, tenant, parent), parent))

    def get(self, key: ChunkKey, *, deadline: float | None = None) -> memoryview | None:
        """The payload in place, after its checksum was compared. The view keeps the memory after eviction."""
        chunk = self._find(key)
        if chunk is None:
            return None
        try:
            codec.check(chunk.header, chunk.payload.data, key)
        except KVStoreError as error:
            self._refuse(key, chunk, error)
            return None
        return chunk.payload.data.toreadonly()

    def read_into(self, key: ChunkKey, target: bytearray | memoryview, *, deadline: float | None = None) -> int | None:
        chunk = self._find(key)
        if chunk is None:
            return None
        view = np.frombuffer(codec.as_bytes(target), dtype=np.uint8)
        size = len(chunk.payload)
        if len(view) < size:
            raise ValueError(f"the payload has {size} bytes, the buffer {len(view)}")
        np.copyto(view[:size], chunk.payload)
        return size

    def lease(self, key: ChunkKey, *, deadline: float | None = None) -> Lease | None:
        chunk = self._find(key)
        return None if chunk is None else Lease(chunk.payload.data.toreadonly(), chunk.header)

    def contains(self, keys: Sequence[ChunkKey], *, deadline: float | None = None) -> int:
        with self._lock:
            return next((index for index, key in enumerate(keys) if key not in self._chunks), len(keys))

    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            return self._remove(key)

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> int:
        with self._lock:
            doomed = [
                key
                for key, chunk in self._chunks.items()
                if namespace in (None, key.namespace) and tenant in (None, chunk.tenant)
            ]
            for key in doomed:
                self._remove(key)
        return len(doomed)

    def keys(self) -> Iterator[ChunkKey]:
        with self._lock:
            return iter(list(self._chunks))

    def origin(self, key: ChunkKey) -> tuple[ChunkKey | None, str] | None:
        """The parent and the tenant that a chunk was put with, or None if it is not held."""
        with self._lock:
            chunk = self._chunks.get(key)
            return None if chunk is None else (chunk.parent, chunk.tenant)

    def payload_bytes(self, key: ChunkKey) -> int | None:
        """Size of a chunk's payload, None if it is not held."""
        with self._lock:
            chunk = self._chunks.get(key)
            return None if chunk is None else len(chunk.payload)

    def parent(self, key: ChunkKey) -> ChunkKey | None:
        """The chunk before this one in its chain, where both are known."""
        origin = self.origin(key)
        return None if origin is None else origin[0]

    def flush(self) -> bool:
        """False: nothing here survives the process."""
        return False

    def close(self) -> None:
        self.clear()

    def check_integrity(self) -> None:
        """Raise CorruptChunk unless extents add up, the bound holds and each chunk is its key's own."""
        with self._lock:
            chunks = list(self._chunks.items())
            try:
                self._arena.check_integrity()
            except ValueError as error:
                raise CorruptChunk(str(error)) from None
            if not len(self._eviction) == len(chunks) <= self._arena.num_taken:
                raise CorruptChunk(
                    f"{len(chunks)} chunks, {len(self._eviction)} can be evicted, {self._arena.num_taken} extents"
                )
            if self._arena.bytes_used > self._capacity:
                raise CorruptChunk(f"the tier holds {self._arena.bytes_used} bytes, its capacity is {self._capacity}")
        for key, chunk in chunks:
            codec.check(chunk.header, chunk.payload.data, key)

    def _find(self, key: ChunkKey) -> _Chunk | None:
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                self._stats.misses += 1
                return None
            self._stats.hits += 1
            self._eviction.touch(key)
            return chunk

    def _publish(self, key: ChunkKey, chunk: _Chunk, parent: ChunkKey | None) -> bool:
        with self._lock:
            if key not in self._chunks:
                self._chunks[key] = chunk
                self._eviction.add(key, pages(len(chunk.payload)), parent)
                self._stats.puts += 1
                self._tell(key, is_held=True)
        return True

    def _take(self, num_bytes: int, parent: ChunkKey | None) -> Bytes | None:
        """Memory for a new chunk; evicts until there is an extent that is long enough."""
        if pages(num_bytes) > self._arena.size:
            return None
        while (extent := self._arena.take(num_bytes)) is None:
            key = self._eviction.evict(self._stays, parent)
            if key is None:
                return None
            del self._chunks[key]
            self._stats.evictions += 1
            self._tell(key, is_held=False)
        return extent

    def _stays(self, key: ChunkKey) -> bool:
        # Evicting a chunk that is leased would lose it and free nothing.
        return sys.getrefcount(self._chunks[key].payload) > UNSHARED or self._spared(key)

    def _remove(self, key: ChunkKey) -> bool:
        if self._chunks.pop(key, None) is None:
            return False
        self._eviction.remove(key)
        self._tell(key, is_held=False)
        return True

    def _tell(self, key: ChunkKey, *, is_held: bool) -> None:
        if self.listener is not None:
            self.listener(key, is_held)

    def _refuse(self, key: ChunkKey, chunk: _Chunk, error: KVStoreError) -> None:
        """Drop a bad chunk unless a writer put a good one in its place meanwhile."""
        self.quarantine.add(key, "memory", error)
        with self._lock:
            self._stats.hits -= 1
            self._stats.misses += 1
            self._stats.corrupt += 1
            if self._chunks.get(key) is chunk:
                self._remove(key)
