"""When a read that takes long is asked for a second time (Dean and Barroso, "The Tail at Scale", CACM 2013).

After the 95th percentile of the latest reads of that size; at most `share` of all reads, so that a slow server is not
made slower. Whether a duration is that of a whole read or of its first byte is the caller's choice. Pure: durations are
arguments. Not safe for threads.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

QUANTILE = 0.95
SAMPLES = 64
LEAST_SAMPLES = 20
BURST = 4.0


class _Latest:
    """The latest SAMPLES durations, by time and by length."""

    def __init__(self) -> None:
        self.by_time: deque[float] = deque()
        self.by_length: list[float] = []

    def add(self, seconds: float) -> None:
        if len(self.by_time) == SAMPLES:
            del self.by_length[bisect_left(self.by_length, self.by_time.popleft())]
        self.by_time.append(seconds)
        insort(self.by_length, seconds)


class HedgePolicy:
    """Live percentiles by size (powers of two) and a budget of second reads."""

    def __init__(self, share: float = 0.03) -> None:
        if not 0 <= share <= 0.5:
            raise ValueError(f"the share of hedged reads must be 0 to 0.5, it is {share}")
        self._share = share
        self._budget = 0.0
        self._seconds: dict[int, _Latest] = {}

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A read of that size ended well and took `seconds`."""
        latest = self._seconds.get(num_bytes.bit_length())
        if latest is None:
            latest = self._seconds[num_bytes.bit_length()] = _Latest()
        latest.add(seconds)

    def begin(self, num_bytes: int) -> float | None:
        """A read of that size begins: seconds until a second one is worth asking `spend` for, or None: never."""
        self._budget = min(self._budget + self._share, BURST)
        latest = self._seconds.get(num_bytes.bit_length())
        if latest is None or len(latest.by_length) < LEAST_SAMPLES:
            return None
        return latest.by_length[int(len(latest.by_length) * QUANTILE)]

    def spend(self) -> bool:
        """Take one second read from the budget; False if it is used up."""
        if self._budget < 1:
            return False
        self._budget -= 1
        return True
