"""Whether a call to a place that may be ill is made at all: a circuit breaker with a limit on calls under way.

Closed: calls are made. Open: none is, for a pause that doubles with each failed try. Half open: one call at a time is
made as a probe; enough good ones in a row close it, a bad one opens it again. So it closes by itself, within
`open_seconds_max` and a few calls of the end of a fault. A throttled call halves the limit on calls under way, good
ones raise it again (additive increase, multiplicative decrease; Chiu and Jain, 1989).

Pure: time is an argument. Not safe for threads: whoever owns one has a lock around it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a call ended. OK includes "not there": the place answered."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    THROTTLED = "throttled"
    DENIED = "denied"


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens and how it comes back. Times in seconds.

    It opens when, of the last `window` calls of the last `window_seconds` and at least `least` of them,
    `failed_share` failed or `slow_share` took `slow_seconds` or more; and at once when a call is denied.
    `concurrency` bounds calls under way, `probes` good ones in a row close it. A probe that is not reported within
    `open_seconds_max` counts as failed.
    """

    concurrency: int = 16
    window: int = 20
    window_seconds: float = 30.0
    least: int = 5
    failed_share: float = 0.5
    slow_seconds: float = 5.0
    slow_share: float = 0.8
    open_seconds: float = 1.0
    open_seconds_max: float = 20.0
    probes: int = 2

    def __post_init__(self) -> None:
        for name in ("concurrency", "window", "least", "probes"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"a breaker's {name} must be 1 or more, it is {value}")
        if not 0 < self.open_seconds <= self.open_seconds_max:
            raise ValueError(
                f"open_seconds must be more than 0 and at most open_seconds_max, it is {self.open_seconds}"
            )
        for name in ("failed_share", "slow_share"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(f"a breaker's {name} must be in (0, 1], it is {value}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to make one call; it must be given back through `record`. `term` counts the breaker's changes of state."""

    term: int
    is_probe: bool


@dataclass(frozen=True, slots=True)
class _Call:
    at: float
    failed: bool
    slow: bool


class Breaker:
    """One circuit. `admit` before a call, `record` after it, exactly once for each ticket."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.limits = limits or BreakerLimits()
        self.state = State.CLOSED
        self.in_flight = 0
        self.opened = 0
        self.refused = 0
        self._term = 0
        self._calls: deque[_Call] = deque(maxlen=self.limits.window)
        self._limit = float(self.limits.concurrency)
        self._limit_cut_at = float("-inf")
        self._pause = self.limits.open_seconds
        self._open_until = 0.0
        self._probe_since: float | None = None
        self._good_probes = 0

    @property
    def limit(self) -> int:
        """Calls that may be under way now."""
        return int(self._limit)

    def admit(self, now: float) -> Ticket | None:
        """Leave for one call, or None: answer without it."""
        self._give_up_on_lost_probe(now)
        if self.state is State.OPEN and now >= self._open_until:
            self._turn(State.HALF_OPEN)
        if self.state is State.OPEN or (self.state is State.HALF_OPEN and self._probe_since is not None):
            self.refused += 1
            return None
        if self.state is State.HALF_OPEN:
            self._probe_since = now
        elif self.in_flight >= self.limit:
            self.refused += 1
            return None
        self.in_flight += 1
        return Ticket(self._term, self.state is State.HALF_OPEN)

    def record(self, ticket: Ticket, outcome: Outcome, seconds: float, now: float) -> None:
        """The end of a call that took `seconds`. One that began before the last change of state decides nothing."""
        self.in_flight -= 1
        if ticket.term != self._term:
            return
        if ticket.is_probe:
            self._record_probe(outcome, now)
            return
        if outcome is Outcome.DENIED:
            self._open(now)
            return
        # Throttling is answered by fewer calls at a time; only when one is still too many is the place ill.
        throttled = outcome is Outcome.THROTTLED
        failed = outcome in (Outcome.ERROR, Outcome.TIMEOUT) or (throttled and self.limit == 1)
        slow = seconds >= self.limits.slow_seconds
        self._calls.append(_Call(now, failed, slow))
        if throttled:
            self._cut_limit(now)
        elif outcome is Outcome.OK:
            self._limit = min(self._limit + 1 / self._limit, self.limits.concurrency)
        if (failed or slow) and self._is_ill(now):
            self._open(now)

    def retry_in(self, now: float) -> float:
        """Seconds until `admit` is worth asking again; 0 if it may say yes now."""
        if self.state is State.OPEN:
            return max(self._open_until - now, 0.0)
        if self.state is State.HALF_OPEN and self._probe_since is not None:
            return max(self._probe_since + self.limits.open_seconds_max - now, 0.0)
        return 0.0

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts are possible ones."""
        assert self.in_flight >= 0, f"{self.in_flight} calls are under way"
        assert 1 <= self.limit <= self.limits.concurrency, f"the limit is {self._limit}"
        assert self.limits.open_seconds <= self._pause <= self.limits.open_seconds_max, f"the pause is {self._pause}"
        assert self._probe_since is None or self.state is State.HALF_OPEN, f"a probe while {self.state}"

    def _record_probe(self, outcome: Outcome, now: float) -> None:
        self._probe_since = None
        # A throttled probe was answered: the place lives and says how much it takes.
        if outcome is Outcome.THROTTLED:
            self._cut_limit(now)
        if outcome not in (Outcome.OK, Outcome.THROTTLED):
            self._pause = min(self._pause * 2, self.limits.open_seconds_max)
            self._open(now)
            return
        self._good_probes += 1
        if self._good_probes >= self.limits.probes:
            self._pause = self.limits.open_seconds
            self._turn(State.CLOSED)

    def _give_up_on_lost_probe(self, now: float) -> None:
        if self._probe_since is not None and now >= self._probe_since + self.limits.open_seconds_max:
            self._pause = self.limits.open_seconds_max
            self._open(now)

    def _is_ill(self, now: float) -> bool:
        recent = [call for call in self._calls if now - call.at <= self.limits.window_seconds]
        if len(recent) < self.limits.least:
            return False
        failed = sum(call.failed for call in recent)
        slow = sum(call.slow for call in recent)
        return failed >= self.limits.failed_share * len(recent) or slow >= self.limits.slow_share * len(recent)

    def _cut_limit(self, now: float) -> None:
        # One wave of calls under way is throttled together: it counts once.
        if now - self._limit_cut_at >= self.limits.open_seconds:
            self._limit = max(self._limit / 2, 1.0)
            self._limit_cut_at = now

    def _open(self, now: float) -> None:
        self.opened += 1
        self._open_until = now + self._pause
        self._turn(State.OPEN)

    def _turn(self, state: State) -> None:
        self.state = state
        self._term += 1
        self._calls.clear()
        self._probe_since = None
        self._good_probes = 0
