"""The head of the log: room for records within the byte bound, writes, and what happens when the device says no.

A full disk and a failing one are normal: the tier writes less for a while, counts, and serves what it has.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock

from paceline_kvstore.arena import Bytes
from paceline_kvstore.disk.catalog import Catalog, Clocks, Place
from paceline_kvstore.disk.cleaning import Cleaner
from paceline_kvstore.disk.index import NONE
from paceline_kvstore.disk.record import BLOCK, NO_PARENT, Record
from paceline_kvstore.disk.segment import Segment, sync_folder
from paceline_kvstore.keys import ChunkKey

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PAUSE_S = 5.0
"""How long nothing is written after the device failed."""
TRIES = 4
"""Segments freed for one record without any gain, before it is refused: copies may eat what is freed."""
FULL_S = 60.0
"""How long the tier makes do with the bytes it has after the disk was full, before it tries to grow again."""


class Writer:
    """Appends records. Safe to call from several threads: their writes run side by side, cleaning is one at a time."""

    def __init__(
        self,
        catalog: Catalog,
        folder: Path,
        capacity: int,
        segment_bytes: int,
        *,
        direct: bool,
        clocks: Clocks,
        spared: Callable[[ChunkKey], bool],
        buffer: Callable[[int], Bytes],
    ) -> None:
        self._catalog = catalog
        self._folder = folder
        self._capacity = capacity
        self._segment_bytes = segment_bytes
        # Kept free within the capacity, so that cleaning can copy before it removes.
        self._headroom = segment_bytes // 2 + 2 * BLOCK
        self._direct = direct
        self._steady = clocks.steady
        self._cleaner = Cleaner(catalog, spared, self._head, buffer, spare_bytes=segment_bytes * 3 // 4)
        self._next_number = max(catalog.segments, default=0) + 1
        self._limit = capacity
        self._limited_until = self._paused_until = float("-inf")
        self.room = Lock()
        """Held while room is made. Whoever holds it knows that no record is being copied."""

    @property
    def is_paused(self) -> bool:
        """True for a while after the device failed: nothing is written."""
        return self._steady() < self._paused_until

    def append(self, record: Record, payload: Bytes, seal: Callable[[], bytes], *, durable: bool) -> bool:
        """Write a record and make it findable, on the device first if `durable`. False if that was not possible.

        `seal` makes the chunk header that `record` lacks.
        """
        with self.room:
            head = self._head(record.size) if self._make_room(record.size, record.parent) else None
        if head is None:
            return False
        segment, offset = head
        written, failure = False, None
        try:
            record = segment.write(offset, payload, lambda given=record: replace(given, chunk=seal()))
            if durable:
                segment.sync()
            written = True
        except OSError as error:
            failure = error
        slot, dead = NONE, None
        with self._catalog.lock:
            segment.writers -= 1
            # A tier that was closed meanwhile has no segments.
            if written and segment.number in self._catalog.segments:
                slot, dead = self._catalog.publish(segment, offset, record)
                self._catalog.stats.puts += bool(slot)
        if failure is not None:
            self._withdraw(segment, offset, record)
            self.failed(failure)
        elif dead is not None:
            self.kill(dead)
        return bool(slot)

    def kill(self, place: Place) -> None:
        """Mark a record dead; a device that does not take it is counted."""
        try:
            place.kill()
        except OSError as error:
            self.failed(error)

    def flush(self) -> bool:
        """All records, marks and names so far are on the device; False if that failed."""
        # With room held, no copy of a record that was just deleted is on its way.
        with self.room, self._catalog.lock:
            segments = list(self._catalog.segments.values())
        failed = [segment for segment in segments if not self.sync(segment)]
        return not failed and self._sync_names()

    def sync(self, segment: Segment) -> bool:
        """False, counted, if the device did not take it."""
        try:
            segment.sync()
        except OSError as error:
            self.failed(error)
            return False
        return True

    def close(self) -> None:
        """Let go of all files, and of the spare for good. The catalog is empty afterwards."""
        with self.room, self._catalog.lock:
            spare = self._catalog.take_spare()
            self._catalog.close()
        if spare is not None:
            with suppress(OSError):
                spare.unlink()

    def _sync_names(self) -> bool:
        # A file whose going is not on the device may come back with what was deleted from it since.
        try:
            sync_folder(self._folder)
        except OSError as error:
            self.failed(error)
            return False
        return True

    def shrink(self) -> None:
        """Evict until the bound holds, as after a restart with a smaller one."""
        with self.room:
            self._make_room(0, NO_PARENT)

    def _make_room(self, size: int, before: bytes) -> bool:
        """Evict until a record of `size` bytes and the headroom fit. Needs `room`."""
        least, vain = sys.maxsize, 0
        while vain <= TRIES:
            limit = self._limit if self._steady() < self._limited_until else self._capacity
            with self._catalog.lock:
                used, spare = self._catalog.bytes_used, self._catalog.spare
                growth = self._growth(size)
            if used + growth + self._headroom <= limit:
                return True
            if self._turn_to_spare():
                continue
            taken = used - (spare.size if spare is not None else 0)
            vain += taken >= least
            least = min(least, taken)
            # Beyond the limit there is no room for copies: a full disk said so.
            if not self._evict(max(0, min(self._segment_bytes // 2, limit - used - BLOCK)), before):
                return False
        return False

    def _turn_to_spare(self) -> bool:
        """End the head early if it would still grow and a file that need not grow is there."""
        with self._catalog.lock:
            head = self._catalog.active
            if self._catalog.spare is None or head is None or head.end < head.size:
                return False
            self._catalog.active = None
            return True

    def _growth(self, size: int) -> int:
        """Bytes that a record would add to what the files take. Needs the catalog's lock."""
        head, spare = self._catalog.active, self._catalog.spare
        if head is not None and self._fits(head, size):
            return max(0, head.end + size - head.size)
        return max(0, BLOCK + size - (spare.size if spare is not None else 0))

    def _fits(self, head: Segment, size: int) -> bool:
        # A record larger than a segment gets one of its own.
        return head.end + size <= self._segment_bytes or head.end == BLOCK

    def _evict(self, budget: int, before: bytes) -> bool:
        for share in dict.fromkeys((budget, 0)):
            try:
                lost = self._cleaner.free_one(share, before)
            except OSError as error:
                # Copies need room that a full disk does not have: then without.
                self.failed(error)
                continue
            if lost is not None:
                with self._catalog.lock:
                    self._catalog.stats.evictions += lost
                return True
        return False

    def _head(self, size: int) -> tuple[Segment, int] | None:
        """Room for a record at the head of the log, or None if there can be none. Needs `room`."""
        catalog = self._catalog
        with catalog.lock:
            head = catalog.active
            if head is not None and self._fits(head, size):
                return head, catalog.promise(head, size)
            if catalog.bytes_used + self._growth(size) > self._capacity:
                return None
            spare = catalog.take_spare()
        try:
            nonce = int.from_bytes(os.urandom(8), "little")
            if spare is None:
                head = Segment.create(self._folder, self._next_number, nonce, direct=self._direct)
            else:
                head = Segment.reuse(spare, self._next_number, nonce)
        except OSError as error:
            self.failed(error)
            return None
        self._next_number += 1
        with catalog.lock:
            catalog.add_segment(head)
            catalog.active = head
            return head, catalog.promise(head, size)

    def failed(self, error: OSError) -> None:
        """Count, and write to another file next time.

        A full disk bounds the tier to what it has for a while, anything else stops writing for a while; but a file that
        somebody removed says nothing of the device.
        """
        with self._catalog.lock:
            self._catalog.stats.errors += 1
            self._catalog.active = None
            if error.errno in FULL:
                self._limit = self._catalog.bytes_used
                self._limited_until = self._steady() + FULL_S
            elif error.errno != errno.ENOENT:
                self._paused_until = self._steady() + PAUSE_S

    def _withdraw(self, segment: Segment, offset: int, record: Record) -> None:
        """A record that was not written must not be found by the next scan, and should take no room."""
        catalog = self._catalog
        try:
            with catalog.lock:
                if segment.end == offset + record.size:
                    catalog.bytes_used -= segment.size - offset
                    segment.end = segment.size = offset
                    segment.truncate(offset)
                    return
            segment.kill(offset, record.payload_bytes)
        except OSError as error:
            self.failed(error)
