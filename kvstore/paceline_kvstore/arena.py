"""One fixed piece of memory, cut into extents of whole pages that return by themselves when nobody reads them.

Best fit, neighbours merged when they are given back. Small extents grow from the top and large ones from the bottom,
so that the odd sizes of chain ends do not cut up the room for full chunks. The memory is mapped once and touched only
when used.
"""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from threading import Lock

import numpy as np
import numpy.typing as npt

from paceline_kvstore.codec import Buffer

Bytes = npt.NDArray[np.uint8]
PAGE = 4096
SMALL_SHARE = 64
"""Extents below 1/64 of the arena are small."""

Allocator = Callable[[int], Buffer]
"""Bytes -> that much writable memory, page-aligned; pinned memory comes from one that the caller brings."""


def map_memory(size: int) -> Buffer:
    """Anonymous memory in huge pages where the kernel has them: copies run 1.3-1.5x faster than with small pages."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def pages(num_bytes: int) -> int:
    """Bytes of the whole pages that hold `num_bytes`; at least one."""
    return max(PAGE, -(-num_bytes // PAGE) * PAGE)


class _Ending(weakref.ref[Bytes]):
    """Appended to the arena's list when the last view of an extent is gone."""

    __slots__ = ("start",)
    start: int


class Arena:
    """Extents of one mapping. Safe to call from several threads."""

    def __init__(self, size: int, allocate: Allocator = map_memory) -> None:
        self.size = size // PAGE * PAGE
        self._memory: Bytes = np.frombuffer(allocate(self.size) if self.size else bytearray(), dtype=np.uint8)
        self._extents = Extents(self.size)
        self._lock = Lock()
        # A view may end anywhere, also in a thread that holds the lock, so its end only appends here (atomic).
        self._ended: deque[weakref.ref[Bytes]] = deque()
        self._endings: dict[int, _Ending] = {}

    @property
    def bytes_used(self) -> int:
        """Bytes of the extents that somebody can still reach."""
        with self._lock:
            self._reclaim()
            return self._extents.bytes_used

    @property
    def num_taken(self) -> int:
        """Extents that somebody can still reach."""
        with self._lock:
            self._reclaim()
            return len(self._endings)

    def take(self, num_bytes: int) -> Bytes | None:
        """`num_bytes` of memory that begin on a page, or None if no free extent is long enough.

        The extent is free again when the array and all views of it are gone. Views of a view of it count; an array
        sliced from it does not, so hand out its `data`.
        """
        with self._lock:
            self._reclaim()
            start = self._extents.take(num_bytes)
            if start is None:
                return None
            extent = self._memory[start : start + num_bytes]
            ending = _Ending(extent, self._ended.append)
            ending.start = start
            self._endings[start] = ending
            return extent

    def check_integrity(self) -> None:
        """Raise ValueError unless the extents tile the arena and each taken one is still awaited."""
        with self._lock:
            self._reclaim()
            self._extents.check_integrity()
            if self._extents.taken.keys() != self._endings.keys():
                raise ValueError(f"{len(self._extents.taken)} extents are taken, {len(self._endings)} are awaited")

    def _reclaim(self) -> None:
        while self._ended:
            ending = self._ended.popleft()
            assert isinstance(ending, _Ending)
            del self._endings[ending.start]
            self._extents.give_back(ending.start)


class Extents:
    """Free and taken extents of `size` bytes, by number alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken: dict[int, int] = {}  # start -> size
        self._free: list[tuple[int, int]] = []  # (size, start), ascending
        self._size_at: dict[int, int] = {}  # start of a free extent -> its size
        self._start_of_end: dict[int, int] = {}
        self.bytes_used = 0
        if self.size:
            self._add_free(0, self.size)

    def take(self, num_bytes: int) -> int | None:
        """Start of a new extent of `pages(num_bytes)`, or None if no free one is long enough."""
        wanted = pages(num_bytes)
        index = bisect_left(self._free, (wanted, 0))
        if index == len(self._free):
            return None
        size, start = self._free[index]
        self._drop_free(start, size)
        if wanted * SMALL_SHARE < self.size:
            self._add_free(start, size - wanted)
            start += size - wanted
        else:
            self._add_free(start + wanted, size - wanted)
        self.taken[start] = wanted
        self.bytes_used += wanted
        return start

    def give_back(self, start: int) -> None:
        """Free the extent that begins at `start`."""
        size = self.taken.pop(start)
        self.bytes_used -= size
        after = self._size_at.get(start + size)
        if after is not None:
            self._drop_free(start + size, after)
            size += after
        before = self._start_of_end.get(start)
        if before is not None:
            self._drop_free(before, start - before)
            size += start - before
            start = before
        self._add_free(start, size)

    def check_integrity(self) -> None:
        """Raise ValueError unless free and taken extents tile the arena and no two free ones touch."""
        free = [(start, size, True) for size, start in self._free]
        extents = sorted(free + [(start, size, False) for start, size in self.taken.items()])
        position, was_free = 0, False
        for start, size, is_free in extents:
            if start != position or size <= 0 or (is_free and was_free):
                raise ValueError(f"{size} bytes at {start} do not follow the extent that ends at {position}")
            position, was_free = start + size, is_free
        if position != self.size or self.bytes_used != sum(self.taken.values()):
            raise ValueError(f"extents end at {position} of {self.size}, {self.bytes_used} bytes are counted")

    def _add_free(self, start: int, size: int) -> None:
        if size:
            insort(self._free, (size, start))
            self._size_at[start] = size
            self._start_of_end[start + size] = start

    def _drop_free(self, start: int, size: int) -> None:
        del self._free[bisect_left(self._free, (size, start))]
        del self._size_at[start], self._start_of_end[start + size]
