"""Leases that are counted, so that a leak shows and an abort storm can be seen to end at zero."""

from __future__ import annotations

from collections import deque
from threading import Lock

from paceline_kvstore.tiers.base import Lease


class LeaseCount:
    """How many leases are out, and their bytes. Safe to call from several threads."""

    def __init__(self) -> None:
        self._num = 0
        self._num_bytes = 0
        self._lock = Lock()
        # A lease that nobody released ends in the garbage collector, which may run while this thread has the lock.
        self._forgotten: deque[int] = deque()

    @property
    def num(self) -> int:
        self._settle()
        return self._num

    @property
    def num_bytes(self) -> int:
        self._settle()
        return self._num_bytes

    def lend(self, payload: memoryview) -> Lease:
        """A lease over a view of its own of that payload."""
        lease = _CountedLease(memoryview(payload).toreadonly(), self)
        self.add(1, lease.num_bytes)
        return lease

    def add(self, num: int, num_bytes: int) -> None:
        with self._lock:
            self._num += num
            self._num_bytes += num_bytes

    def forget(self, num_bytes: int) -> None:
        """A lease of that size ended without being released."""
        self._forgotten.append(num_bytes)

    def _settle(self) -> None:
        while True:
            try:
                num_bytes = self._forgotten.popleft()
            except IndexError:
                return
            self.add(-1, -num_bytes)


class _CountedLease(Lease):
    __slots__ = ("_count", "num_bytes")

    def __init__(self, payload: memoryview, count: LeaseCount) -> None:
        super().__init__(payload)
        self.num_bytes = payload.nbytes
        self._count: LeaseCount | None = count

    def release(self) -> None:
        super().release()
        count, self._count = self._count, None
        if count is not None:
            count.add(-1, -self.num_bytes)

    def __del__(self) -> None:
        if self._count is not None:
            self._count.forget(self.num_bytes)
