"""Opening a folder: the lock, the segments that are there, and the index rebuilt from their records' headers.

Payloads of the last segment, where writes were going on, and of chunks found twice are read and checked here; all
others when they are asked for. Parents are linked when all records are known.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from paceline_kvstore.disk.catalog import Catalog
from paceline_kvstore.disk.record import BLOCK, NO_PARENT
from paceline_kvstore.disk.scan import Found, payload_fault, scan
from paceline_kvstore.disk.segment import PATTERN, SPARE_NAME, Segment, number_of, path_of, sync_folder
from paceline_kvstore.errors import CorruptChunk, FolderUnusable, KVStoreError
from paceline_kvstore.quarantine import Quarantine

LOCK_NAME = "lock"
THREADS = 4
"""Segments that are read at a time: a device answers several reads of one block as fast as one."""
PROGRESS_S = 5.0
log = logging.getLogger(__name__)


class _Progress:
    """A line in the log every few seconds, and at the end if there was one before."""

    def __init__(self, folder: Path, segments: int) -> None:
        self._folder, self._segments, self._done = folder, segments, 0
        self._next = time.monotonic() + PROGRESS_S
        self._told = False

    def step(self, chunks: int) -> None:
        self._done += 1
        now = time.monotonic()
        if now >= self._next or (self._told and self._done == self._segments):
            self._next, self._told = now + PROGRESS_S, True
            log.info("%s: %d of %d segments read, %d chunks", self._folder, self._done, self._segments, chunks)


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
    segments: list[Segment] = []
    for number in numbers:
        path = path_of(folder, number)
        try:
            segments.append(Segment.open(path, number, direct=direct))
        except (OSError, KVStoreError) as error:
            _give_up(path, error, quarantine)
    progress = _Progress(folder, len(segments))
    for segment, found in _scans(segments, last=max(numbers, default=0)):
        end = _adopt(catalog, segment, found, quarantine, orphans)
        if segment.number == numbers[-1]:
            _cut(segment, end)
            catalog.active = segment
        catalog.add_segment(segment)
        progress.step(len(catalog.index))
    for slot, parent in orphans:
        above = catalog.index.find(parent)
        if above and above != slot and catalog.index.segment[slot] and not catalog.index.parent[slot]:
            catalog.index.link(slot, above)


def _scans(segments: Sequence[Segment], *, last: int) -> Iterator[tuple[Segment, list[Found]]]:
    """Each segment with its records, in order, a few read ahead. Payloads of segment number `last` are checked."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="kv-scan") as pool:
        waiting: deque[tuple[Segment, Future[list[Found]]]] = deque()
        for segment in segments:
            waiting.append((segment, pool.submit(scan, segment, check_payloads=segment.number == last)))
            if len(waiting) > THREADS:
                ahead, future = waiting.popleft()
                yield ahead, future.result()
        for ahead, future in waiting:
            yield ahead, future.result()


def _adopt(
    catalog: Catalog,
    segment: Segment,
    found: Sequence[Found],
    quarantine: Quarantine,
    orphans: list[tuple[int, bytes]],
) -> int:
    """Index a segment's records; where the last good one ends."""
    end = BLOCK
    # Published records of this segment need it in the catalog when a later one takes their place.
    catalog.segments[segment.number] = segment
    for one in found:
        offset, record, bad = one.offset, one.record, one.bad
        # A copy that a crash tore must not take the place of the good record that it was made from.
        if bad is None and not record.dead and catalog.index.find(record.key):
            bad = payload_fault(segment, offset, record)
        if bad is not None:
            quarantine.add(None, f"{segment.path}:{offset}", bad)
            with suppress(OSError):
                segment.kill(offset, record.payload_bytes)
            continue
        end = offset + record.size
        if record.dead:
            continue
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
