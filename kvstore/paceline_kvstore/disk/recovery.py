"""Opening a folder: the lock, the segments that are there, and the index rebuilt from their records' headers.

Nothing that a crash can leave behind is trusted. A block that is no header is stepped over, one block at a time, so
that a hole or a torn record hides nothing behind it. Payloads of the last segment, where writes were going on, and of
chunks found twice are read and checked here; all others when they are asked for. Parents are linked when all records
are known.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from paceline_kvstore.arena import Bytes
from paceline_kvstore.disk.catalog import Catalog
from paceline_kvstore.disk.record import BLOCK, NO_PARENT, Record
from paceline_kvstore.disk.segment import PATTERN, SPARE_NAME, Segment, number_of, path_of, sync_folder
from paceline_kvstore.errors import CorruptChunk, FolderUnusable, KVStoreError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.quarantine import Quarantine

LOCK_NAME = "lock"


def lock_folder(folder: Path) -> int:
    """Make the folder if need be and take it for this process; the descriptor that holds it. Raises FolderUnusable."""
    fd = -1
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace") or "unknown"
        os.close(fd)
        raise FolderUnusable(
            f"the KV folder {folder} is in use by process {holder}: give each store a folder of its own"
        ) from None
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise FolderUnusable(f"the KV folder {folder} cannot be used: {error.strerror}") from None
    return fd


def recover(catalog: Catalog, folder: Path, quarantine: Quarantine, *, direct: bool) -> None:
    """Fill an empty catalog from a folder. Files that are no segments of ours are left alone; bad segments go.

    A spare goes, too: it was kept for its blocks only.

    Raises FolderUnusable.
    """
    numbers = sorted(number for path in folder.glob(PATTERN) if (number := number_of(path)) is not None)
    orphans: list[tuple[int, bytes]] = []
    try:
        (folder / SPARE_NAME).unlink(missing_ok=True)
        sync_folder(folder)
    except OSError as error:
        raise FolderUnusable(f"the KV folder {folder} cannot be synced: {error.strerror}") from None
    for number in numbers:
        path = path_of(folder, number)
        try:
            segment = Segment.open(path, number, direct=direct)
        except (OSError, KVStoreError) as error:
            _give_up(path, error, quarantine)
            continue
        end = _adopt(catalog, segment, quarantine, orphans, check_payloads=number == numbers[-1])
        if number == numbers[-1]:
            _cut(segment, end)
            catalog.active = segment
        catalog.add_segment(segment)
    for slot, parent in orphans:
        above = catalog.index.find(parent)
        if above and above != slot and catalog.index.segment[slot] and not catalog.index.parent[slot]:
            catalog.index.link(slot, above)


def records(segment: Segment) -> Iterator[tuple[int, Record]]:
    """Offset and header of each record, dead ones included, whose blocks are all within the file."""
    offset = BLOCK
    while offset + BLOCK <= segment.end:
        try:
            record = segment.read_header(offset)
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


def _adopt(
    catalog: Catalog,
    segment: Segment,
    quarantine: Quarantine,
    orphans: list[tuple[int, bytes]],
    *,
    check_payloads: bool,
) -> int:
    """Index a segment's records; where the last good one ends."""
    end = BLOCK
    # Published records of this segment need it in the catalog when a later one takes their place.
    catalog.segments[segment.number] = segment
    for offset, record in records(segment):
        if record.dead:
            end = offset + record.size
            continue
        try:
            key = ChunkKey.from_bytes(record.key)
            # A copy that a crash tore must not take the place of the good record that it was made from.
            if check_payloads or catalog.index.find(record.key):
                payload: Bytes = np.empty(record.payload_bytes, dtype=np.uint8)
                segment.read(offset, payload, key)
        except (OSError, ValueError, KVStoreError) as error:
            reason = error if isinstance(error, KVStoreError) else CorruptChunk(str(error))
            quarantine.add(None, f"{segment.path}:{offset}", reason)
            with suppress(OSError):
                segment.kill(offset, record.payload_bytes)
            continue
        end = offset + record.size
        slot, dead = catalog.publish(segment, offset, record)
        if dead is not None:
            with suppress(OSError):
                dead.kill()
        if slot and record.parent != NO_PARENT and not catalog.index.parent[slot]:
            orphans.append((slot, record.parent))
    return end


def _give_up(path: Path, error: OSError | KVStoreError, quarantine: Quarantine) -> None:
    """A segment that is bad or lies on bad blocks goes. FolderUnusable if this process merely cannot open it."""
    if isinstance(error, OSError) and error.errno != errno.EIO:
        raise FolderUnusable(f"the KV segment {path} cannot be opened: {error.strerror}") from None
    reason = CorruptChunk(f"the segment cannot be read: {error.strerror}") if isinstance(error, OSError) else error
    quarantine.add(None, str(path), reason)
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _cut(segment: Segment, end: int) -> None:
    # If that fails the rest stays, counted, until the segment goes.
    with suppress(OSError):
        segment.truncate(end)
        segment.end = segment.size = end
