"""One segment file: records are appended, marked dead in place, and never overwritten; the whole file goes at once."""

from __future__ import annotations

import errno
import os
from array import array
from pathlib import Path
from threading import Lock

from paceline_kvstore.arena import Bytes
from paceline_kvstore.disk import blockio
from paceline_kvstore.disk.record import (
    BLOCK,
    Record,
    decode_record,
    decode_segment,
    encode_record,
    encode_segment,
)

PATTERN = "segment-*.kv"


def path_of(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:012d}.kv"


def number_of(path: Path) -> int | None:
    """The number in a segment's file name, or None for another name."""
    digits = path.name.removeprefix("segment-").removesuffix(".kv")
    return int(digits) if digits.isdecimal() and path_of(path.parent, int(digits)) == path else None


class Segment:
    """An open segment file. The file is closed when the last holder of this object lets go of it.

    turn: the smallest goes first. end: bytes of the file that are used or promised to a writer. live: bytes of records
    that can be found. writers: records promised and not yet written. slots: index slots of the records, in order of
    their being found; entries may be stale. Fields change under the tier's lock; reads and writes of records need none.
    """

    def __init__(self, path: Path, fd: int, number: int, nonce: int, end: int, *, direct: bool) -> None:
        self.path = path
        self.number = number
        self.nonce = nonce
        self.turn = number
        self.end = end
        self.live = 0
        self.writers = 0
        self.slots = array("I")
        self._fd = fd
        # What an earlier process wrote may not be on the device either.
        self._unsynced = True
        self._name_unsynced = True
        self._sync_failed = False
        self._syncing = Lock()
        self._direct = direct

    def __del__(self) -> None:
        os.close(self._fd)

    @classmethod
    def create(cls, folder: Path, number: int, nonce: int, *, direct: bool) -> Segment:
        """A new file. OSError."""
        path = path_of(folder, number)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        segment = cls(path, os.open(path, flags, 0o600), number, nonce, BLOCK, direct=direct)
        try:
            blockio.write_block(segment._fd, 0, encode_segment(number, nonce))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def open(cls, path: Path, number: int, *, direct: bool) -> Segment:
        """A file that is there, in a folder that was synced. OSError, CorruptChunk, UnsupportedVersion."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        segment = cls(path, fd, number, 0, os.fstat(fd).st_size, direct=direct)
        segment._name_unsynced = False
        segment.nonce = decode_segment(blockio.read_block(fd, 0), number)
        return segment

    def write(self, offset: int, record: Record, payload: Bytes) -> None:
        """Write a record where it was promised room. OSError."""
        header = encode_record(record, self.nonce, offset)
        blockio.write(self._fd, offset, header, payload, direct=self._direct)
        self._unsynced = True

    def kill(self, offset: int, payload_bytes: int) -> None:
        """Mark a record dead in place: a scan steps over it. OSError."""
        header = encode_record(Record(payload_bytes, dead=True), self.nonce, offset)
        blockio.write_block(self._fd, offset, header)
        self._unsynced = True

    def read(self, offset: int, target: Bytes) -> Record:
        """Fill `target` with a payload, unverified; the record's header, verified. OSError, CorruptChunk."""
        return decode_record(blockio.read(self._fd, offset, target, direct=self._direct), self.nonce, offset)

    def read_header(self, offset: int) -> Record:
        """OSError, CorruptChunk."""
        return decode_record(blockio.read_block(self._fd, offset), self.nonce, offset)

    def sync(self) -> None:
        """Return when all that was written before is on the device.

        OSError; after one every later call fails too, because the kernel reports lost pages only once.
        """
        with self._syncing:
            if self._sync_failed:
                raise OSError(errno.EIO, "an earlier sync of the segment failed")
            if self._unsynced:
                self._unsynced = False
                try:
                    os.fdatasync(self._fd)
                    if self._name_unsynced:
                        sync_folder(self.path.parent)
                        self._name_unsynced = False
                except OSError:
                    self._sync_failed = True
                    raise

    def truncate(self, end: int) -> None:
        """Cut off what lies behind the last record. OSError."""
        os.ftruncate(self._fd, end)

    def unlink(self) -> None:
        """Remove the file's name; its bytes go when the last reader is done. OSError unless it was gone already."""
        self.path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make names created or removed in a folder durable. OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
