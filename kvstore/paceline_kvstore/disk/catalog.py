"""Which chunk lies where: the index and the segments, with the bytes that both account for. Must not do I/O itself."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from paceline_kvstore.disk.index import NONE, Index
from paceline_kvstore.disk.record import BLOCK, NO_PARENT, NO_TENANT, Record, record_bytes
from paceline_kvstore.disk.segment import Segment
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.stats import TierStats

CLOCK_TOLERANCE_S = 300.0
"""How far ahead of this machine's clock a record may be dated and still count as new."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Wall clock (seconds since 1970) for what outlives the process, a steady one for all that does not."""

    wall: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Place:
    """A record's place. Equal places are the same record: room in a segment is given once."""

    segment: Segment
    offset: int
    payload_bytes: int

    def kill(self) -> None:
        """Mark the record dead, so that no later scan brings it back. OSError."""
        self.segment.kill(self.offset, self.payload_bytes)


class Catalog:
    """Not thread-safe: hold `lock` around every call and every look at a field."""

    def __init__(self, ttl_s: float | None, clocks: Clocks) -> None:
        self.lock = Lock()
        self.index = Index()
        self.segments: dict[int, Segment] = {}
        self.active: Segment | None = None
        self.spare: Segment | None = None
        self.stats = TierStats()
        self.bytes_used = 0
        self.listener: Callable[[ChunkKey, bool], None] | None = None
        self._tenants: dict[bytes, int] = {NO_TENANT: 0}
        self._ttl_s = ttl_s
        self._clocks = clocks
        self._started = clocks.steady()

    def add_segment(self, segment: Segment) -> None:
        self.segments[segment.number] = segment
        self.bytes_used += segment.size

    def remove_segment(self, segment: Segment) -> None:
        """Account for a file that is about to go; its records must be forgotten already."""
        del self.segments[segment.number]
        self.bytes_used -= segment.size
        if self.active is segment:
            self.active = None

    def keep_spare(self, segment: Segment) -> None:
        """A segment that was removed stays for its blocks, which count."""
        self.spare = segment
        self.bytes_used += segment.size

    def take_spare(self) -> Segment | None:
        """The spare, if there is one; the caller uses it or removes its file."""
        spare, self.spare = self.spare, None
        if spare is not None:
            self.bytes_used -= spare.size
        return spare

    def close(self) -> None:
        """Forget all, so that files close with their last reader."""
        self.index = Index()
        self.segments.clear()
        self.active = self.spare = None
        self.bytes_used = 0

    def promise(self, segment: Segment, size: int) -> int:
        """Room for one record; its offset. The writer takes one off `segment.writers` when it is done."""
        offset = segment.end
        segment.end += size
        segment.writers += 1
        growth = max(0, segment.end - segment.size)
        segment.size += growth
        self.bytes_used += growth
        return offset

    def find(self, key: bytes) -> int:
        """The slot of a key (wire form), or NONE. One that is too old is not found."""
        slot = self.index.find(key)
        return NONE if slot and self.is_expired(slot) else slot

    def place(self, slot: int) -> Place:
        index = self.index
        return Place(self.segments[index.segment[slot]], index.block[slot] * BLOCK, index.payload_bytes[slot])

    def publish(self, segment: Segment, offset: int, record: Record) -> tuple[int, Place | None]:
        """The record can be found from now on. Its slot, and a record that must be killed for it, if any.

        That is an older one of the same key, or the record itself if it is too old: then the slot is NONE. The age
        counts on the steady clock from here on. A date in the future says nothing about the age, so with a time to
        live such a record does not count.
        """
        age_s = self._clocks.wall() - record.stored_ms / 1000
        if self._ttl_s is not None and not -CLOCK_TOLERANCE_S <= age_s < self._ttl_s:
            return NONE, Place(segment, offset, record.payload_bytes)
        born = self._seconds() - min(max(0, int(age_s)), 2**30)
        held = self.index.find(record.key)
        older = self.place(held) if held else None
        if held and self.index.payload_bytes[held] == record.payload_bytes:
            self.move(held, segment, offset)
            self.index.born[held] = born
            return held, older
        if held:
            self.forget(held)
        slot = self.index.add(
            record.key,
            segment.number,
            offset // BLOCK,
            record.payload_bytes,
            born=born,
            tenant=self._tenants.setdefault(record.tenant, len(self._tenants)),
            parent=NONE if record.parent == NO_PARENT else self.index.find(record.parent),
        )
        segment.live += record.size
        segment.slots.append(slot)
        if self.listener is not None:
            self.listener(ChunkKey.from_bytes(record.key), True)
        return slot, older

    def move(self, slot: int, segment: Segment, offset: int) -> None:
        """The record of a slot was copied to another place."""
        size = record_bytes(self.index.payload_bytes[slot])
        self.segments[self.index.segment[slot]].live -= size
        self.index.move(slot, segment.number, offset // BLOCK)
        segment.live += size
        segment.slots.append(slot)

    def forget(self, slot: int) -> None:
        """The record of a slot is dead from now on."""
        self.segments[self.index.segment[slot]].live -= record_bytes(self.index.payload_bytes[slot])
        if self.listener is not None:
            self.listener(ChunkKey.from_bytes(self.index.key(slot)), False)
        self.index.remove(slot)

    def forget_subtree(self, slot: int) -> list[Place]:
        """Forget a chunk with all that follow it, which are no use without it; where they were."""
        doomed = list(self.index.subtree(slot))
        places = [self.place(follower) for follower in doomed]
        for follower in reversed(doomed):
            self.forget(follower)
        return places

    def slots_of(self, segment: Segment) -> list[int]:
        """Slots whose record lies in a segment, in order of their being found."""
        at = self.index.segment
        slots = [slot for slot in dict.fromkeys(segment.slots) if at[slot] == segment.number]
        segment.slots = array("I", slots)
        return slots

    def is_expired(self, slot: int) -> bool:
        return self._ttl_s is not None and self._seconds() - self.index.born[slot] >= self._ttl_s

    def tenant(self, digest: bytes) -> int | None:
        """The number of a tenant that has or had chunks."""
        return self._tenants.get(digest)

    def check_integrity(self) -> None:
        """Raise ValueError unless segments and index agree on every byte."""
        self.index.check_integrity()
        live = dict.fromkeys(self.segments, 0)
        for slot in self.index.select():
            live[self.index.segment[slot]] += record_bytes(self.index.payload_bytes[slot])
        for number, segment in self.segments.items():
            if segment.live != live[number] or segment.live > segment.end - BLOCK:
                raise ValueError(f"segment {number} counts {segment.live} live bytes, the index {live[number]}")
        sizes = sum(segment.size for segment in self.segments.values()) + (self.spare.size if self.spare else 0)
        if sizes != self.bytes_used:
            raise ValueError(f"{self.bytes_used} bytes are counted, the files have {sizes}")

    def _seconds(self) -> int:
        return int(self._clocks.steady() - self._started)
