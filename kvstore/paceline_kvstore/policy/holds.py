"""Chunks that must not be evicted for now: leases of requests that will read them, and pins. Must not do I/O.

Both are holds: a holder, its keys, and a time at which the hold ends by itself, so that a holder that died keeps
nothing. Times are seconds on any one clock that only goes forward.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Holds(Generic[K]):
    """Holds on at most `keys_max` keys in all, each key counted once a holder. Safe to call from several threads."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._keys_of: dict[str, tuple[frozenset[K], float]] = {}
        self._holders_of: Counter[K] = Counter()
        self._num_held = 0
        self._ends: list[tuple[float, str]] = []
        self._lock = Lock()

    def hold(self, holder: str, keys: Iterable[K], now: float, until: float) -> bool:
        """Hold `keys` until a time, instead of what the holder held; False, changing nothing, if they are too many."""
        wanted = frozenset(keys)
        with self._lock:
            self._expire(now)
            before = len(self._keys_of[holder][0]) if holder in self._keys_of else 0
            if self._num_held - before + len(wanted) > self._keys_max:
                return False
            self._drop(holder)
            if until > now:
                self._keys_of[holder] = wanted, until
                self._holders_of.update(wanted)
                self._num_held += len(wanted)
                self._schedule(until, holder)
            return True

    def extend(self, holder: str, now: float, until: float) -> bool:
        """Hold on until another time, sooner or later; False if the hold has ended."""
        with self._lock:
            self._expire(now)
            if holder not in self._keys_of:
                return False
            self._keys_of[holder] = self._keys_of[holder][0], until
            self._schedule(until, holder)
            return True

    def release(self, holder: str) -> bool:
        """End a hold; False if it had ended."""
        with self._lock:
            return self._drop(holder)

    def is_held(self, key: K, now: float) -> bool:
        with self._lock:
            self._expire(now)
            return key in self._holders_of

    def num_holders(self, now: float) -> int:
        with self._lock:
            self._expire(now)
            return len(self._keys_of)

    def num_keys(self, now: float) -> int:
        """Different keys that are held."""
        with self._lock:
            self._expire(now)
            return len(self._holders_of)

    def _schedule(self, until: float, holder: str) -> None:
        heapq.heappush(self._ends, (until, holder))
        # Ends of released and extended holds stay in the heap; their number is bounded here.
        if len(self._ends) > 2 * len(self._keys_of) + 16:
            self._ends = [(end, name) for name, (_, end) in self._keys_of.items()]
            heapq.heapify(self._ends)

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            end, holder = heapq.heappop(self._ends)
            if holder in self._keys_of and self._keys_of[holder][1] == end:
                self._drop(holder)

    def _drop(self, holder: str) -> bool:
        keys, _ = self._keys_of.pop(holder, (None, 0.0))
        if keys is None:
            return False
        self._num_held -= len(keys)
        for key in keys:
            self._holders_of[key] -= 1
            if not self._holders_of[key]:
                del self._holders_of[key]
        return True
