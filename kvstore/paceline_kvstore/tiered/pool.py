"""A few threads that do one tier's reads, or its writes, with bounds on what waits and on what is under way."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from paceline_kvstore.waiting import left

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """Work of about `num_bytes`. Exactly one of `run` and `drop` is called, `drop` if the pool closes first."""

    run: Callable[[], None]
    drop: Callable[[], None]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """`workers` threads. A job is refused when `jobs` are there or `bytes_waiting` would be passed.

    `bytes_running` bounds the bytes under way; a larger job runs alone.
    """

    workers: int
    jobs: int
    bytes_waiting: int
    bytes_running: int

    def __post_init__(self) -> None:
        for name in ("workers", "jobs", "bytes_waiting", "bytes_running"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"a pool's {name} must be 1 or more, it is {value}")


class WorkPool:
    """First come, first served. Threads start when there is work for them and end with `close`."""

    def __init__(self, name: str, limits: PoolLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.limits = limits
        self._clock = clock
        self.failed = 0
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._waiting_bytes = 0
        self._running = 0
        self._running_bytes = 0
        self._idle = 0
        self._begun: dict[int, float] = {}  # By thread.
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    @property
    def num_jobs(self) -> int:
        """Jobs waiting or under way."""
        with self._changed:
            return len(self._waiting) + self._running

    @property
    def num_bytes(self) -> int:
        """Bytes of those jobs."""
        with self._changed:
            return self._waiting_bytes + self._running_bytes

    @property
    def longest_s(self) -> float:
        """Seconds since the oldest job under way began; 0 if there is none."""
        with self._changed:
            return self._clock() - min(self._begun.values()) if self._begun else 0.0

    def submit(self, job: Job) -> bool:
        """Do it soon; False, and nothing was called, if there is no room. Never waits for a job."""
        with self._changed:
            if self._is_closed or not self._has_room(job.num_bytes):
                return False
            self._waiting.append(job)
            self._waiting_bytes += job.num_bytes
            if self._idle < len(self._waiting) and len(self._threads) < self.limits.workers:
                self._start()
            self._changed.notify_all()
            return True

    def has_room(self, num_bytes: int, promised: int = 0) -> bool:
        """Whether a job of that size would be taken now, and after jobs of `promised` bytes."""
        with self._changed:
            return self._has_room(num_bytes, promised)

    def wait_room(self, num_bytes: int, until: float) -> bool:
        """Wait, up to that time.monotonic(), for `has_room`; whether there is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed or self._has_room(num_bytes), left(until))

    def wait_idle(self, until: float) -> bool:
        """Wait for all jobs, up to that time.monotonic(); whether none is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._running, left(until))

    def close(self, until: float) -> bool:
        """Take no more, drop what waits, and wait for what is under way; whether nothing is."""
        with self._changed:
            self._is_closed = True
            dropped = list(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()
        for job in dropped:
            job.drop()
        for thread in self._threads:
            thread.join(left(until))
        return not any(thread.is_alive() for thread in self._threads)

    def check_integrity(self) -> None:
        """Raise ValueError unless counts add up within their bounds."""
        with self._changed:
            waiting = sum(job.num_bytes for job in self._waiting)
            if waiting != self._waiting_bytes or min(self._running, self._running_bytes) < 0:
                raise ValueError(f"{self.name}: {waiting} bytes wait, {self._waiting_bytes} are counted")
            if self._running > self.limits.workers or (not self._running and self._running_bytes):
                raise ValueError(f"{self.name}: {self._running} jobs of {self._running_bytes} bytes are under way")

    def _start(self) -> None:
        # Daemons: a read that hangs in the kernel must not keep the process from ending.
        thread = threading.Thread(target=self._work, name=f"{self.name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        self._idle += 1
        thread.start()

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        # A function of its own: a thread that waits must not hold on to its last job, which holds a payload.
        job = self._next()
        if job is None:
            return False
        try:
            job.run()
        except Exception:
            self.failed += 1
            _log.exception("%s: a job failed; the pool goes on", self.name)
        num_bytes = job.num_bytes
        del job
        with self._changed:
            self._running -= 1
            self._running_bytes -= num_bytes
            self._idle += 1
            del self._begun[threading.get_ident()]
            self._changed.notify_all()
        return True

    def _has_room(self, num_bytes: int, promised: int = 0) -> bool:
        num_jobs, before = len(self._waiting) + self._running, self._waiting_bytes + self._running_bytes + promised
        if not num_jobs and not promised:
            return True
        return num_jobs < self.limits.jobs and before + num_bytes <= self.limits.bytes_waiting

    def _next(self) -> Job | None:
        with self._changed:
            while True:
                if self._waiting and self._may_run(self._waiting[0]):
                    job = self._waiting.popleft()
                    self._waiting_bytes -= job.num_bytes
                    self._running_bytes += job.num_bytes
                    self._running += 1
                    self._idle -= 1
                    self._begun[threading.get_ident()] = self._clock()
                    return job
                if self._is_closed:
                    return None
                self._changed.wait()

    def _may_run(self, job: Job) -> bool:
        return not self._running or self._running_bytes + job.num_bytes <= self.limits.bytes_running
