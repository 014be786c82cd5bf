"""Chunks on their way to a request: they are handed over in order, up to the first that is missing or late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.leases import LeaseCount
from paceline_kvstore.tiers.base import Lease


class Fetch:
    """A running load. Whoever has it polls it until `is_done`, or cancels it; every lease handed over is theirs."""

    def __init__(
        self,
        keys: Sequence[ChunkKey],
        until: float,
        leases: LeaseCount,
        clock: Callable[[], float] = time.monotonic,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_news = on_news
        self.keys = tuple(keys)
        self.until = until
        self._clock = clock
        self._leases = leases
        self._changed = threading.Condition()
        self._arrived: list[Lease | None] = [None] * len(self.keys)
        # Which level each chunk came from.
        self._sources: list[str | None] = [None] * len(self.keys)
        self._leading = 0
        self._end = len(self.keys)
        self._handed = 0

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come. What came can still be polled."""
        with self._changed:
            self._look_at_clock()
            return self._leading >= self._end

    @property
    def num_leading(self) -> int:
        """Leading chunks that came in time so far, handed over or not."""
        with self._changed:
            return min(self._leading, self._end)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the levels that the leading chunks came from."""
        with self._changed:
            return tuple(name for name in self._sources[: min(self._leading, self._end)] if name is not None)

    def poll(self) -> Iterator[tuple[ChunkKey, Lease]]:
        """The chunks that came since the last poll, in order, each with a lease that the caller releases."""
        while (item := self._take()) is not None:
            yield item

    def wait(self, seconds: float) -> bool:
        """Wait until nothing more will come, for up to that long; whether that is so."""
        with self._changed:
            longest = max(min(seconds, self.until - self._clock()), 0.0)
            self._changed.wait_for(lambda: self._leading >= self._end, min(longest, threading.TIMEOUT_MAX))
        return self.is_done

    def cancel(self) -> None:
        """Take nothing more. What was handed over stays the caller's, the rest is released."""
        with self._changed:
            self._cut(self._handed)

    def wants(self, index: int) -> bool:
        """Whether that chunk is still of use."""
        with self._changed:
            self._look_at_clock()
            return index < self._end and self._sources[index] is None

    def deliver(self, index: int, payload: memoryview | None, source: str = "") -> bool:
        """A chunk came from that level, or None: it will not. Whether it was in time and of use."""
        with self._changed:
            self._look_at_clock()
            if index >= self._end or self._sources[index] is not None:
                return False
            if payload is None:
                self._cut(index)
            else:
                self._arrived[index] = self._leases.lend(payload)
                self._sources[index] = source
                while self._leading < self._end and self._sources[self._leading] is not None:
                    self._leading += 1
                self._changed.notify_all()
        self._on_news()
        return payload is not None

    def _take(self) -> tuple[ChunkKey, Lease] | None:
        with self._changed:
            self._look_at_clock()
            if self._handed >= min(self._leading, self._end):
                return None
            index, self._handed = self._handed, self._handed + 1
            lease, self._arrived[index] = self._arrived[index], None
            assert lease is not None
            return self.keys[index], lease

    def _look_at_clock(self) -> None:
        """At the deadline the tail is dropped: all from the first chunk that is not there."""
        if self._end > self._leading and self._clock() > self.until:
            self._cut(self._leading)

    def _cut(self, end: int) -> None:
        """Chunks from `end` on are of no use any more."""
        self._end = min(self._end, end)
        for index in range(self._end, len(self.keys)):
            lease, self._arrived[index] = self._arrived[index], None
            if lease is not None:
                lease.release()
        self._changed.notify_all()
