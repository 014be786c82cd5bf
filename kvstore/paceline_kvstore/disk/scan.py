"""Reading a segment's records one after the other: where each lies, and what its header says.

Nothing that a crash can leave behind is trusted. A block that is no header is stepped over, one block at a time, so
that a hole or a torn record hides nothing behind it. Large records are skipped from header to header; small ones are
taken from a window of the file, as a read of one block costs a tenth of a read of two hundred.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline_kvstore import codec
from paceline_kvstore.arena import Bytes
from paceline_kvstore.disk.record import BLOCK, Record, decode_record
from paceline_kvstore.disk.segment import Segment
from paceline_kvstore.errors import CorruptChunk, KVStoreError
from paceline_kvstore.keys import ChunkKey

WINDOW_BYTES = 1 << 20
SMALL_BYTES = 128 << 10
"""Steps up to that length between two headers are small."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record whose blocks are all within the file, dead ones included. bad: what is wrong with it, if anything."""

    offset: int
    record: Record
    bad: KVStoreError | None = None


def scan(segment: Segment, *, check_payloads: bool) -> list[Found]:
    """The records of a segment, in order; with `check_payloads` their payloads are read, too."""
    window = _Window(segment)
    return [
        Found(offset, record, None if record.dead else _fault(window, offset, record, check_payload=check_payloads))
        for offset, record in _headers(window, segment)
    ]


def payload_fault(segment: Segment, offset: int, record: Record) -> KVStoreError | None:
    """What is wrong with a record's payload, if anything."""
    return _fault(_Window(segment), offset, record, check_payload=True)


class _Window:
    """A part of the file in memory of its own, moved when a record is asked for that is not in it."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._memory: Bytes = np.frombuffer(mmap.mmap(-1, WINDOW_BYTES), dtype=np.uint8)
        self._start = self._end = 0
        self._last = 0

    def header(self, offset: int) -> Record:
        """The record at an offset. OSError, CorruptChunk."""
        is_near, self._last = offset - self._last <= SMALL_BYTES, offset
        is_there = self._start <= offset < self._end
        if not (is_there or (is_near and self._move(offset))):
            return self._segment.read_header(offset)
        block = self._memory[offset - self._start : offset - self._start + BLOCK]
        return decode_record(block.data, self._segment.nonce, offset)

    def check(self, offset: int, record: Record, key: ChunkKey) -> None:
        """Read a record's payload and compare its checksum. OSError, KVStoreError."""
        start, size = offset + BLOCK - self._start, record.payload_bytes
        if self._start <= offset and offset + record.size <= self._end:
            codec.check(record.chunk, self._memory[start : start + size].data, key)
            return
        payload: Bytes = np.frombuffer(mmap.mmap(-1, max(1, size)), dtype=np.uint8)[:size]
        self._segment.read(offset, payload, key)

    def _move(self, offset: int) -> bool:
        """False if the file has no whole block there, or one within the window cannot be read."""
        try:
            size = self._segment.read_window(offset, self._memory)
        except OSError:
            size = 0
        self._start, self._end = offset, offset + size // BLOCK * BLOCK
        return offset < self._end


def _headers(window: _Window, segment: Segment) -> Iterator[tuple[int, Record]]:
    offset = BLOCK
    while offset + BLOCK <= segment.end:
        try:
            record = window.header(offset)
        except (OSError, CorruptChunk):
            offset = _next(segment, offset + BLOCK)
            continue
        if offset + record.size > segment.end:
            offset = _next(segment, offset + BLOCK)
            continue
        yield offset, record
        offset += record.size


def _next(segment: Segment, offset: int) -> int:
    try:
        return segment.find_record(offset)
    except OSError:
        return offset


def _fault(window: _Window, offset: int, record: Record, *, check_payload: bool) -> KVStoreError | None:
    try:
        key = ChunkKey.from_bytes(record.key)
        if check_payload:
            window.check(offset, record, key)
    except KVStoreError as error:
        return error
    except (OSError, ValueError) as error:
        return CorruptChunk(str(error))
    return None
