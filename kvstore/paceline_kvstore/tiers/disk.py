"""The disk tier: chunks in append-only segment files of one folder, bounded in physical bytes across restarts."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from paceline_kvstore import codec
from paceline_kvstore.arena import Arena, Bytes, pages
from paceline_kvstore.codec import Buffer
from paceline_kvstore.disk.blockio import supports_direct
from paceline_kvstore.disk.catalog import Catalog, Clocks, Place
from paceline_kvstore.disk.index import NONE
from paceline_kvstore.disk.record import NO_PARENT, PAYLOAD_MAX, Record, record_bytes, tenant_digest
from paceline_kvstore.disk.recovery import lock_folder, recover
from paceline_kvstore.disk.writer import Writer
from paceline_kvstore.errors import CorruptChunk, FolderUnusable, KVStoreError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.eviction import nothing_spared
from paceline_kvstore.quarantine import Quarantine
from paceline_kvstore.stats import TierStats
from paceline_kvstore.tiers.base import Lease, Listener

CAPACITY_MIN = 64 << 10
SEGMENTS = 32
SEGMENT_BYTES_MIN = 16 << 20
SEGMENT_BYTES_MAX = 1 << 30
STAGING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """segment_bytes: size of one file, what one eviction frees (None: capacity / 32, 16 MiB to 1 GiB);
    at most capacity / 8.

    ttl_s: a chunk's life from when it was stored, restarts included. direct: past the page cache (None: where it
    works). staging_bytes: memory for payloads that were asked for without a buffer. spared: chunks that must stay.
    """

    segment_bytes: int | None = None
    ttl_s: float | None = None
    direct: bool | None = None
    staging_bytes: int = STAGING_BYTES
    spared: Callable[[ChunkKey], bool] = nothing_spared
    clocks: Clocks = field(default_factory=Clocks)


class DiskTier:
    """Chunks in one folder of its own, which no other process may use meanwhile. Raises FolderUnusable.

    `capacity` bounds the bytes of all files: dead records and padding count, and room for copies while a segment is
    cleaned is kept free within it. Reads go to the caller's buffer; whatever is not exactly what was written is a miss.
    """

    def __init__(self, folder: Path, capacity_bytes: int, options: DiskOptions | None = None) -> None:
        if capacity_bytes < CAPACITY_MIN:
            raise ValueError(f"capacity must be at least {CAPACITY_MIN} bytes, it is {capacity_bytes}")
        options = options or DiskOptions()
        self.folder = folder
        self.quarantine = Quarantine()
        self._options = options
        self._capacity = capacity_bytes
        wanted = options.segment_bytes or max(SEGMENT_BYTES_MIN, capacity_bytes // SEGMENTS)
        self._staging = Arena(options.staging_bytes)
        self._catalog = Catalog(options.ttl_s, options.clocks)
        self._closed = False
        self._folder_fd = lock_folder(folder)
        self.direct = supports_direct(folder) if options.direct is None else options.direct
        try:
            recover(self._catalog, folder, self.quarantine, direct=self.direct)
        except FolderUnusable:
            os.close(self._folder_fd)
            raise
        self._catalog.stats.corrupt = self.quarantine.total
        self._writer = Writer(
            self._catalog,
            folder,
            capacity_bytes,
            min(wanted, SEGMENT_BYTES_MAX, capacity_bytes // 8),
            direct=self.direct,
            clocks=options.clocks,
            spared=options.spared,
            buffer=self._buffer,
        )
        self._writer.shrink()

    def __len__(self) -> int:
        return len(self._catalog.index)

    @property
    def listener(self) -> Listener | None:
        """What is told of each change from here on; chunks found at the start are not."""
        return self._catalog.listener

    @listener.setter
    def listener(self, listener: Listener | None) -> None:
        with self._catalog.lock:
            self._catalog.listener = listener

    @property
    def bytes_used(self) -> int:
        with self._catalog.lock:
            return self._catalog.bytes_used

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def index_bytes(self) -> int:
        """Memory that the index takes."""
        with self._catalog.lock:
            return self._catalog.index.memory_bytes

    @property
    def writable(self) -> bool:
        """False for a while after the device failed."""
        return not (self._closed or self._writer.is_paused)

    @property
    def stats(self) -> TierStats:
        with self._catalog.lock:
            return replace(self._catalog.stats)

    def put(
        self,
        key: ChunkKey,
        payload: Buffer,
        *,
        parent: ChunkKey | None = None,
        tenant: str = "",
        durable: bool = False,
    ) -> bool:
        """Keep a copy. With `durable`, True only after the device has it. Blocks while segments are cleaned."""
        source: Bytes = np.frombuffer(codec.as_bytes(payload), dtype=np.uint8)
        with self._catalog.lock:
            slot = self._catalog.find(key.to_bytes())
            held = self._catalog.place(slot).segment if slot else None
            if slot:
                self._catalog.index.touch(slot)
        # Of a record from before a crash only the header was looked at.
        if held is not None and (not durable or self._load(key, self._buffer) is not None):
            return not durable or self._writer.sync(held)
        if len(source) > PAYLOAD_MAX or record_bytes(len(source)) > self._capacity // 4 or not self.writable:
            return self._refused()
        record = Record(
            payload_bytes=len(source),
            stored_ms=max(0, int(self._options.clocks.wall() * 1000)),
            tenant=tenant_digest(tenant),
            parent=NO_PARENT if parent is None else parent.to_bytes(),
        )
        return (
            self._writer.append(record, source, lambda: codec.encode_header(key, source.data), durable=durable)
            or self._refused()
        )

    def get(self, key: ChunkKey, *, deadline: float | None = None) -> memoryview | None:
        target = self._read(key, self._buffer)
        return None if target is None else target.data.toreadonly()

    def read_into(self, key: ChunkKey, target: bytearray | memoryview, *, deadline: float | None = None) -> int | None:
        """Aligned to 4 KiB, `target` is filled by the device itself; otherwise by a copy."""
        view: Bytes = np.frombuffer(codec.as_bytes(target), dtype=np.uint8)

        def part(size: int) -> Bytes:
            if len(view) < size:
                raise ValueError(f"the payload has {size} bytes, the buffer {len(view)}")
            return view[:size]

        payload = self._read(key, part)
        return None if payload is None else len(payload)

    def lease(self, key: ChunkKey, *, deadline: float | None = None) -> Lease | None:
        payload = self.get(key)
        return None if payload is None else Lease(payload)

    def contains(self, keys: Sequence[ChunkKey], *, deadline: float | None = None) -> int:
        for index, key in enumerate(keys):
            wire = key.to_bytes()
            with self._catalog.lock:
                if not self._catalog.find(wire):
                    return index
        return len(keys)

    def delete(self, key: ChunkKey) -> bool:
        with self._catalog.lock:
            slot = self._catalog.index.find(key.to_bytes())
            if not slot:
                return False
            place = self._catalog.place(slot)
            self._catalog.forget(slot)
        self._writer.kill(place)
        return True

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> int:
        catalog = self._catalog
        with catalog.lock:
            owner = None if tenant is None else catalog.tenant(tenant_digest(tenant))
            if tenant is not None and owner is None:
                return 0
            slots = catalog.index.select(namespace=namespace, tenant=owner)
            places = [catalog.place(slot) for slot in slots]
            for slot in slots:
                catalog.forget(slot)
        for place in places:
            self._writer.kill(place)
        return len(places)

    def keys(self) -> Iterator[ChunkKey]:
        index, lock = self._catalog.index, self._catalog.lock
        slot = 0
        while slot < index.num_slots:
            slot += 1
            with lock:
                wire = index.key(slot) if index.segment[slot] else None
            if wire is not None:
                yield ChunkKey.from_bytes(wire)

    def payload_bytes(self, key: ChunkKey) -> int | None:
        """Size of a chunk's payload, None if it is not held."""
        with self._catalog.lock:
            slot = self._catalog.find(key.to_bytes())
            return self._catalog.index.payload_bytes[slot] if slot else None

    def parent(self, key: ChunkKey) -> ChunkKey | None:
        """The chunk before this one in its chain, where both are held."""
        index = self._catalog.index
        with self._catalog.lock:
            slot = self._catalog.find(key.to_bytes())
            above = index.parent[slot] if slot else NONE
            return ChunkKey.from_bytes(index.key(above)) if above else None

    def flush(self) -> bool:
        return not self._closed and self._writer.flush()

    def close(self) -> None:
        """Flush, then let go of the folder. Files close with their last reader."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        self._writer.close()
        os.close(self._folder_fd)

    def check_integrity(self) -> None:
        """Raise CorruptChunk unless index, segments and the byte bound agree. Payloads are checked by `get`."""
        with self._catalog.lock:
            try:
                self._catalog.check_integrity()
            except ValueError as error:
                raise CorruptChunk(str(error)) from None
            if self._catalog.bytes_used > self._capacity:
                raise CorruptChunk(f"{self._catalog.bytes_used} bytes are used, the capacity is {self._capacity}")

    def _read(self, key: ChunkKey, buffer: Callable[[int], Bytes]) -> Bytes | None:
        """The payload in a buffer that the caller makes for its size, or None; counted."""
        payload = self._load(key, buffer)
        with self._catalog.lock:
            self._catalog.stats.hits += payload is not None
            self._catalog.stats.misses += payload is None
        return payload

    def _load(self, key: ChunkKey, buffer: Callable[[int], Bytes]) -> Bytes | None:
        wire = key.to_bytes()
        tried: Place | None = None
        while (place := self._look(wire)) is not None and place != tried:
            target = buffer(place.payload_bytes)
            try:
                place.segment.read(place.offset, target, key)
            except (OSError, KVStoreError) as error:
                # If the record was moved while it was read, its new place is tried, too.
                self._drop_bad(wire, place, key, error)
                tried = place
                continue
            return target
        return None

    def _look(self, wire: bytes) -> Place | None:
        catalog = self._catalog
        with catalog.lock:
            slot = catalog.index.find(wire)
            if slot and catalog.is_expired(slot):
                place = catalog.place(slot)
                catalog.forget(slot)
                self._catalog.stats.expired += 1
            elif slot:
                catalog.index.touch(slot)
                return catalog.place(slot)
            else:
                return None
        self._writer.kill(place)
        return None

    def _drop_bad(self, wire: bytes, place: Place, key: ChunkKey, error: OSError | KVStoreError) -> None:
        """Never ask for this record again, unless it is no longer the one that counts."""
        catalog = self._catalog
        with catalog.lock:
            slot = catalog.index.find(wire)
            if not slot or catalog.place(slot) != place:
                return
            catalog.forget(slot)
            if isinstance(error, OSError):
                self._catalog.stats.errors += 1
            else:
                self._catalog.stats.corrupt += 1
        if isinstance(error, KVStoreError):
            self.quarantine.add(key, f"{place.segment.path}:{place.offset}", error)
        self._writer.kill(place)

    def _buffer(self, size: int) -> Bytes:
        """Memory on page boundaries: staging, and beyond it pages of its own."""
        extent = self._staging.take(size)
        return np.frombuffer(mmap.mmap(-1, pages(size)), dtype=np.uint8)[:size] if extent is None else extent

    def _refused(self) -> bool:
        with self._catalog.lock:
            self._catalog.stats.refused += 1
        return False
