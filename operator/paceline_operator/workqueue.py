"""The workqueue: each key waits at most once and is worked on by at most one worker at a time.

`Schedule` is the pure core (time and randomness are arguments), `WorkQueue` puts a lock and a clock around it. A key
added while a worker has it waits until `done` and then runs again, so no change is lost and none is handled twice at
once. Failures back off exponentially, with jitter and a cap. Bounded by the number of keys. Must not import a client.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay of the n-th failure in a row: base * 2^(n-1), at most `cap_s`, times a random factor of 0.5 to 1."""

    base_s: float = 0.2
    cap_s: float = 60.0

    def delay_s(self, failures: int, random: float) -> float:
        # The exponent is capped before the power is taken: a key may fail for weeks.
        return min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 32)) * (0.5 + 0.5 * random)


class Schedule(Generic[K]):
    """Which key is due next. Not thread-safe; `now` is seconds on one monotonic clock."""

    def __init__(self, random: Callable[[], float], backoff: Backoff | None = None, keys_max: int = 100_000) -> None:
        self._random = random
        self._backoff = backoff or Backoff()
        self._keys_max = keys_max
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()
        self._working: set[K] = set()
        self._again: set[K] = set()
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0
        self._failures: dict[K, int] = {}
        self.refused = 0

    def add(self, key: K) -> bool:
        """Due at once. False if the queue is full; the next resync offers the key again."""
        if key in self._working:
            self._again.add(key)
        elif key not in self._waiting:
            if len(self._waiting) >= self._keys_max:
                self.refused += 1
                return False
            self._waiting.add(key)
            self._ready.append(key)
        return True

    def add_after(self, key: K, delay_s: float, now: float) -> None:
        """Due in `delay_s`, or earlier if it was to be due earlier."""
        due = now + delay_s
        if self._due.get(key, float("inf")) <= due or len(self._due) >= self._keys_max:
            return
        self._due[key] = due
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, key))
        # Superseded entries stay in the heap until they surface; this bounds how many.
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def take(self, now: float) -> K | None:
        """The next due key, now being worked on until `done`; None if none is due."""
        self._promote(now)
        if not self._ready:
            return None
        key = self._ready.popleft()
        self._waiting.discard(key)
        self._working.add(key)
        return key

    def done(self, key: K) -> None:
        """The worker is through with it; it runs again if it was added meanwhile."""
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def retry(self, key: K, now: float) -> float:
        """One more failure: due again after its backoff, which is returned."""
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        delay = self._backoff.delay_s(failures, self._random())
        self.add_after(key, delay, now)
        return delay

    def forget(self, key: K) -> None:
        """Success: the next failure is the first again."""
        self._failures.pop(key, None)

    def next_due(self, now: float) -> float | None:
        """Seconds until a key is due (0 if one is), None while there is nothing to wait for."""
        self._promote(now)
        if self._ready:
            return 0.0
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    @property
    def depth(self) -> int:
        """Keys that wait for a worker now."""
        return len(self._ready)

    @property
    def idle(self) -> bool:
        """Nothing is due at once and nothing is being worked on."""
        return not self._ready and not self._working

    @property
    def retries(self) -> int:
        """Keys that failed last time and will be tried again."""
        return len(self._failures)

    def check_integrity(self) -> None:
        """Raises RuntimeError with the numbers if a key is in two places that exclude each other."""
        if set(self._ready) != self._waiting or len(self._ready) != len(self._waiting):
            raise RuntimeError(f"{len(self._ready)} keys are ready but {len(self._waiting)} are marked as waiting")
        if self._waiting & self._working:
            raise RuntimeError(f"{len(self._waiting & self._working)} keys wait while a worker has them")
        if not self._again <= self._working:
            raise RuntimeError(f"{len(self._again - self._working)} keys wait for a worker that has finished")

    def _promote(self, now: float) -> None:
        while self._heap:
            due, _, key = self._heap[0]
            current = self._due.get(key) == due
            if current and due > now:
                return
            heapq.heappop(self._heap)
            if current:
                del self._due[key]
                self.add(key)


class WorkQueue(Generic[K]):
    """A `Schedule` for several threads."""

    def __init__(self, schedule: Schedule[K], clock: Callable[[], float]) -> None:
        self._schedule = schedule
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = False

    def add(self, key: K) -> bool:
        with self._changed:
            added = self._schedule.add(key)
            self._changed.notify()
            return added

    def add_after(self, key: K, delay_s: float) -> None:
        with self._changed:
            self._schedule.add_after(key, delay_s, self._clock())
            self._changed.notify()

    def get(self, timeout_s: float) -> K | None:
        """The next due key, waiting up to `timeout_s`; None if none became due or the queue is closed."""
        with self._changed:
            end = self._clock() + timeout_s
            while not self._closed:
                now = self._clock()
                key = self._schedule.take(now)
                if key is not None:
                    return key
                due = self._schedule.next_due(now)
                left = end - now if due is None else min(end - now, due)
                if end <= now:
                    return None
                self._changed.wait(max(left, 0.001))
            return None

    def done(self, key: K) -> None:
        with self._changed:
            self._schedule.done(key)
            self._changed.notify()

    def retry(self, key: K) -> float:
        with self._changed:
            delay = self._schedule.retry(key, self._clock())
            self._changed.notify()
            return delay

    def forget(self, key: K) -> None:
        with self._changed:
            self._schedule.forget(key)

    def close(self) -> None:
        """Every `get` returns None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def depth(self) -> int:
        with self._changed:
            return self._schedule.depth

    @property
    def idle(self) -> bool:
        with self._changed:
            return self._schedule.idle

    @property
    def retries(self) -> int:
        with self._changed:
            return self._schedule.retries
