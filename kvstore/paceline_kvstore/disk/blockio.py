"""Whole blocks to and from a file, past the page cache where the file system allows it.

Direct I/O wants the file offset, the length and the memory's address on block boundaries. Memory that is not on one
goes through a bounce buffer of the thread's own. Nothing is written with two buffers into one block, so a record's
header and its payload's tail each have a block of the thread's own.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from paceline_kvstore.arena import Bytes
from paceline_kvstore.disk import aio
from paceline_kvstore.disk.record import BLOCK, blocks
from paceline_kvstore.errors import CorruptChunk

BOUNCE_BYTES = 2 << 20
PIECE_BYTES = 4 << 20
"""What is read before its checksum is begun; larger payloads are checked while the rest of them is read or written."""
PIECES_MAX = 4


class _Scratch(threading.local):
    """Aligned memory of one thread: a header block, a tail block, the bounce buffer."""

    def __init__(self) -> None:
        memory: Bytes = np.frombuffer(mmap.mmap(-1, 2 * BLOCK + BOUNCE_BYTES), dtype=np.uint8)
        self.header = memory[:BLOCK]
        self.tail = memory[BLOCK : 2 * BLOCK]
        self.bounce = memory[2 * BLOCK :]


_scratch = _Scratch()


def supports_direct(folder: Path) -> bool:
    """Whether a file in `folder` can be written and read past the page cache: tried, as only trying tells."""
    path = folder / f"probe-{os.getpid()}-{threading.get_ident()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError:
        path.unlink(missing_ok=True)
        return False
    try:
        _scratch.header[:] = 1
        written = os.pwritev(fd, [_scratch.header.data], 0)
        return written == BLOCK and os.preadv(fd, [_scratch.tail.data], 0) == BLOCK and bool((_scratch.tail == 1).all())
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def write(fd: int, offset: int, payload: Bytes, header: Callable[[], bytes], *, direct: bool) -> None:
    """A header block and the payload, each padded to blocks. OSError if not all of it was written.

    `header` is called once, while the device already has the payload if that is large: it may take as long.
    """
    whole = len(payload) // BLOCK * BLOCK
    tail: list[Bytes] = []
    if len(payload) > whole:
        _fill(_scratch.tail, payload[whole:])
        tail.append(_scratch.tail)
    if not direct or _is_aligned(payload):
        body = [payload[:whole]] if whole else []
        if direct and whole > PIECE_BYTES and _write_beside(fd, offset, [*body, *tail], header):
            return
        _fill(_scratch.header, header())
        _write_all(fd, [_scratch.header, *body, *tail], offset)
        return
    write_block(fd, offset, header())
    for start in range(0, whole, BOUNCE_BYTES):
        piece = payload[start : min(start + BOUNCE_BYTES, whole)]
        np.copyto(_scratch.bounce[: len(piece)], piece)
        _write_all(fd, [_scratch.bounce[: len(piece)]], offset + BLOCK + start)
    if tail:
        _write_all(fd, tail, offset + BLOCK + whole)


def _write_beside(fd: int, offset: int, parts: Sequence[Bytes], header: Callable[[], bytes]) -> bool:
    """`write` with the header made meanwhile; False, with nothing done, where that is not to be had."""
    flight = aio.flight()
    if not flight.available:
        return False
    starts = accumulate((len(part) for part in parts), initial=offset + BLOCK)
    transfers = [aio.Transfer(part, start) for part, start in zip(parts, starts, strict=False)]
    try:
        try:
            flight.begin(fd, aio.WRITE, transfers)
        except OSError:
            return False
        _fill(_scratch.header, header())
        flight.begin(fd, aio.WRITE, [aio.Transfer(_scratch.header, offset)])
        flight.wait(len(parts))
        for number, part in enumerate((*parts, _scratch.header)):
            written = flight.wait(number)
            if written != len(part):
                raise OSError(errno.ENOSPC, f"{written} of {len(part)} bytes were written")
    finally:
        flight.drain()
    return True


def read(fd: int, offset: int, target: Bytes, *, direct: bool) -> Generator[Bytes, None, None]:
    """Fill `target` with the payload of the record at `offset`: its header block, then parts of `target` once they are
    filled, in order. Close the iterator before `target` is used for something else.

    OSError, CorruptChunk at the file's end.
    """
    whole = len(target) // BLOCK * BLOCK
    tail = [_scratch.tail] if len(target) > whole else []
    is_aligned = _is_aligned(target)
    if not direct or (is_aligned and (whole <= PIECE_BYTES or not aio.flight().available)):
        body = [target[:whole]] if whole else []
        _read_all(fd, [_scratch.header, *body, *tail], offset)
        yield _scratch.header
        yield from body
    else:
        yield from (_read_ahead if is_aligned else _read_bounced)(fd, offset, target[:whole])
        if tail:
            _read_all(fd, tail, offset + BLOCK + whole)
    if tail:
        np.copyto(target[whole:], _scratch.tail[: len(target) - whole])
        yield target[whole:]


def _read_ahead(fd: int, offset: int, target: Bytes) -> Iterator[Bytes]:
    """The header and all pieces in flight at once; a few only, as each wakes the thread up."""
    size = max(PIECE_BYTES, BLOCK * -(-blocks(len(target)) // PIECES_MAX))
    pieces = [
        aio.Transfer(target[start : start + size], offset + BLOCK + start) for start in range(0, len(target), size)
    ]
    parts = [aio.Transfer(_scratch.header, offset), *pieces]
    flight = aio.flight()
    try:
        try:
            flight.begin(fd, aio.READ, parts)
        except OSError:
            # Not every file system takes such a read; this one fails only if the device does.
            _read_all(fd, [_scratch.header, target], offset)
            yield from (_scratch.header, target)
            return
        flight.wait(1)
        for number, part in enumerate(parts):
            got = flight.wait(number)
            if got != len(part.memory):
                raise _cut_off(got, len(part.memory), part.offset)
            yield part.memory
    finally:
        flight.drain()


def _read_bounced(fd: int, offset: int, target: Bytes) -> Iterator[Bytes]:
    _read_all(fd, [_scratch.header], offset)
    yield _scratch.header
    for start in range(0, len(target), BOUNCE_BYTES):
        piece = target[start : start + BOUNCE_BYTES]
        _read_all(fd, [_scratch.bounce[: len(piece)]], offset + BLOCK + start)
        np.copyto(piece, _scratch.bounce[: len(piece)])
        yield piece


def write_block(fd: int, offset: int, block: bytes) -> None:
    """One block alone."""
    _fill(_scratch.header, block)
    _write_all(fd, [_scratch.header], offset)


def read_block(fd: int, offset: int) -> bytes:
    """One block alone. CorruptChunk at the file's end."""
    _read_all(fd, [_scratch.header], offset)
    return _scratch.header.tobytes()


def read_window(fd: int, offset: int, memory: Bytes) -> int:
    """Fill page-aligned `memory` with what the file has from `offset` on; bytes read."""
    return os.preadv(fd, [memory.data], offset)


def read_bounce(fd: int, offset: int) -> Bytes:
    """What the file has from `offset` on, at most BOUNCE_BYTES, in memory that the thread's next call overwrites."""
    return _scratch.bounce[: read_window(fd, offset, _scratch.bounce)]


def _fill(block: Bytes, content: bytes | Bytes) -> None:
    block[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    block[len(content) :] = 0


def _is_aligned(memory: Bytes) -> bool:
    return memory.__array_interface__["data"][0] % BLOCK == 0


def _write_all(fd: int, parts: Sequence[Bytes], offset: int) -> None:
    size = sum(len(part) for part in parts)
    written = os.pwritev(fd, [part.data for part in parts], offset)
    if written != size:
        # A regular file takes less than it is given only at a limit.
        raise OSError(errno.ENOSPC, f"{written} of {size} bytes were written")


def _read_all(fd: int, parts: Sequence[Bytes], offset: int) -> None:
    size = sum(len(part) for part in parts)
    got = os.preadv(fd, [part.data for part in parts], offset)
    if got != size:
        raise _cut_off(got, size, offset)


def _cut_off(got: int, size: int, offset: int) -> CorruptChunk:
    return CorruptChunk(f"{got} of {size} bytes are there at {offset}: the file was cut")
