"""Pins: chunks that must not be evicted for now, because a request will read them or somebody said so. Must not do I/O.

A holder, its keys, and a time at which the hold ends by itself, so that a holder that died keeps nothing. Keys are held
by name: also those that are on their way, from the moment they come. Times are seconds on any one clock that only goes
forward.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
NO_BOUND = 2**63


@dataclass(frozen=True, slots=True)
class Held(Generic[K]):
    """What one holder holds, in the order in which it was named, and until when."""

    keys: tuple[K, ...]
    until: float


@dataclass(slots=True)
class _Key:
    holders: int
    num_bytes: int


class Holds(Generic[K]):
    """Safe to call from several threads.

    keys_max: over all holders, a key counted once for each. bytes_max: of the different keys held, as far as their
    sizes are known.
    """

    def __init__(self, keys_max: int, bytes_max: int = NO_BOUND) -> None:
        self._keys_max = keys_max
        self._bytes_max = bytes_max
        self._held: dict[str, Held[K]] = {}
        self._keys: dict[K, _Key] = {}
        self._num_held = 0
        self._num_bytes = 0
        self._ends: list[tuple[float, str]] = []
        self._lock = Lock()

    def hold(self, holder: str, sizes: Mapping[K, int], now: float, until: float) -> int:
        """Hold the leading keys that the bounds have room for, instead of what the holder held; how many.

        sizes: bytes of each, 0 while they are not known.
        """
        with self._lock:
            self._expire(now)
            self._drop(holder)
            if until <= now:
                return 0
            kept: list[K] = []
            for key, num_bytes in sizes.items():
                if not self._add(key, num_bytes):
                    break
                kept.append(key)
            if kept:
                self._held[holder] = Held(tuple(kept), until)
                self._schedule(until, holder)
            return len(kept)

    def extend(self, holder: str, now: float, until: float) -> bool:
        """Hold on until another time, sooner or later; False if the hold has ended."""
        with self._lock:
            self._expire(now)
            held = self._held.get(holder)
            if held is None:
                return False
            self._held[holder] = Held(held.keys, until)
            self._schedule(until, holder)
            return True

    def arrived(self, key: K, num_bytes: int) -> None:
        """A chunk has come and has that many bytes. It is held no longer if there is no room for them."""
        if not self._keys:  # Looking a key up costs more than this, and there are seldom any.
            return
        with self._lock:
            known = self._keys.get(key)
            if known is None:
                return
            more = num_bytes - known.num_bytes
            if self._num_bytes + more > self._bytes_max:
                self._discard({key})
            else:
                known.num_bytes += more
                self._num_bytes += more

    def release(self, holder: str) -> bool:
        """End a hold; False if it had ended."""
        with self._lock:
            return self._drop(holder)

    def discard(self, keys: Iterable[K]) -> None:
        """Nobody holds these any more: they are gone for good."""
        with self._lock:
            doomed = {key for key in keys if key in self._keys}
            if doomed:
                self._discard(doomed)

    def is_held(self, key: K, now: float) -> bool:
        if not self._keys:
            return False
        with self._lock:
            self._expire(now)
            return key in self._keys

    def of(self, holder: str, now: float) -> Held[K] | None:
        """What the holder holds, None once it ended."""
        with self._lock:
            self._expire(now)
            return self._held.get(holder)

    def keys(self, now: float) -> list[K]:
        """The different keys that are held."""
        with self._lock:
            self._expire(now)
            return list(self._keys)

    def num_holders(self, now: float) -> int:
        with self._lock:
            self._expire(now)
            return len(self._held)

    def num_keys(self, now: float) -> int:
        """Different keys that are held."""
        with self._lock:
            self._expire(now)
            return len(self._keys)

    def num_bytes(self, now: float) -> int:
        """Bytes of the different keys held, as far as their sizes are known."""
        with self._lock:
            self._expire(now)
            return self._num_bytes

    def _add(self, key: K, num_bytes: int) -> bool:
        known = self._keys.get(key)
        more = num_bytes if known is None else max(0, num_bytes - known.num_bytes)
        if self._num_held >= self._keys_max or self._num_bytes + more > self._bytes_max:
            return False
        if known is None:
            known = self._keys[key] = _Key(0, 0)
        known.holders += 1
        known.num_bytes += more
        self._num_held += 1
        self._num_bytes += more
        return True

    def _schedule(self, until: float, holder: str) -> None:
        heapq.heappush(self._ends, (until, holder))
        # Ends of holds that were released or replaced stay in the heap; their number is bounded here.
        if len(self._ends) > 2 * len(self._held) + 16:
            self._ends = [(held.until, name) for name, held in self._held.items()]
            heapq.heapify(self._ends)

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            end, holder = heapq.heappop(self._ends)
            if holder in self._held and self._held[holder].until == end:
                self._drop(holder)

    def _drop(self, holder: str) -> bool:
        held = self._held.pop(holder, None)
        if held is None:
            return False
        self._num_held -= len(held.keys)
        for key in held.keys:
            known = self._keys[key]
            known.holders -= 1
            if not known.holders:
                self._num_bytes -= known.num_bytes
                del self._keys[key]
        return True

    def _discard(self, doomed: set[K]) -> None:
        for holder, held in list(self._held.items()):
            if doomed.isdisjoint(held.keys):
                continue
            left = tuple(key for key in held.keys if key not in doomed)
            self._num_held -= len(held.keys) - len(left)
            if left:
                self._held[holder] = Held(left, held.until)
            else:
                del self._held[holder]
        for key in doomed:
            self._num_bytes -= self._keys.pop(key).num_bytes
