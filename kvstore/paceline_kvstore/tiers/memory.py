"""The memory tier: chunks in this process, bounded in bytes, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Lock

from paceline_kvstore import codec
from paceline_kvstore.codec import Buffer
from paceline_kvstore.errors import CorruptChunk, KVStoreError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.quarantine import Quarantine
from paceline_kvstore.tiers.base import Lease, TierStats


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
        self.quarantine = Quarantine()
        self._lock = Lock()
        # Least recently used first. A stored buffer is never written to again, so readers need no lock to verify it.
        self._chunks: OrderedDict[ChunkKey, tuple[bytearray, str]] = OrderedDict()

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

    def put(
        self,
        key: ChunkKey,
        payload: Buffer,
        *,
        parent: ChunkKey | None = None,
        tenant: str = "",
        durable: bool = False,
    ) -> bool:
        """Keep a copy, evicting as needed; False if the chunk is larger than the whole tier, or must be durable."""
        if durable or codec.encoded_size(memoryview(payload).nbytes) > self._capacity:
            with self._lock:
                self._stats.refused += 1
            return False
        chunk = codec.encode(key, payload)
        with self._lock:
            self._remove(key)
            while self._used + len(chunk) > self._capacity:
                _, (evicted, _) = self._chunks.popitem(last=False)
                self._used -= len(evicted)
                self._stats.evictions += 1
            self._chunks[key] = chunk, tenant
            self._used += len(chunk)
            self._stats.puts += 1
        return True

    def get(self, key: ChunkKey) -> memoryview | None:
        with self._lock:
            chunk, _ = self._chunks.get(key, (None, ""))
            if chunk is None:
                self._stats.misses += 1
                return None
            self._chunks.move_to_end(key)
        try:
            payload = codec.decode(chunk, key)
        except KVStoreError as error:
            self._refuse(key, chunk, error)
            return None
        with self._lock:
            self._stats.hits += 1
        return payload

    def read_into(self, key: ChunkKey, target: bytearray | memoryview) -> int | None:
        payload = self.get(key)
        if payload is None:
            return None
        view = memoryview(target).cast("B")
        if len(view) < len(payload):
            raise ValueError(f"the payload has {len(payload)} bytes, the buffer {len(view)}")
        view[: len(payload)] = payload
        return len(payload)

    def lease(self, key: ChunkKey) -> Lease | None:
        payload = self.get(key)
        return None if payload is None else Lease(payload)

    def contains(self, keys: Sequence[ChunkKey]) -> int:
        with self._lock:
            return next((index for index, key in enumerate(keys) if key not in self._chunks), len(keys))

    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            return self._remove(key)

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> int:
        with self._lock:
            doomed = [
                key
                for key, (_, owner) in self._chunks.items()
                if namespace in (None, key.namespace) and tenant in (None, owner)
            ]
            for key in doomed:
                self._remove(key)
        return len(doomed)

    def keys(self) -> Iterator[ChunkKey]:
        with self._lock:
            return iter(list(self._chunks))

    def flush(self) -> bool:
        """False: nothing here survives the process."""
        return False

    def close(self) -> None:
        self.clear()

    def check_integrity(self) -> None:
        """Raise CorruptChunk unless the byte count balances, the bound holds and each chunk is its key's own."""
        with self._lock:
            chunks = [(key, chunk) for key, (chunk, _) in self._chunks.items()]
            used = self._used
        held = sum(len(chunk) for _, chunk in chunks)
        if held != used:
            raise CorruptChunk(f"the tier counts {used} bytes and holds {held}")
        if not 0 <= used <= self._capacity:
            raise CorruptChunk(f"the tier holds {used} bytes, its capacity is {self._capacity}")
        for key, chunk in chunks:
            codec.decode(chunk, key)

    def _remove(self, key: ChunkKey) -> bool:
        chunk, _ = self._chunks.pop(key, (None, ""))
        if chunk is None:
            return False
        self._used -= len(chunk)
        return True

    def _refuse(self, key: ChunkKey, chunk: bytearray, error: KVStoreError) -> None:
        """Drop a bad chunk unless a writer put a good one in its place meanwhile."""
        self.quarantine.add(key, "memory", error)
        with self._lock:
            self._stats.corrupt += 1
            self._stats.misses += 1
            if self._chunks.get(key, (None,))[0] is chunk:
                self._remove(key)
