"""Work pools: bounds on what waits and what is under way; every job runs or is dropped, once."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from paceline_kvstore.tiered.pool import Job, PoolLimits, WorkPool

SECONDS = 10.0
LIMITS = PoolLimits(workers=2, jobs=100, bytes_waiting=1000, bytes_running=1000)


class _Work:
    """Jobs that wait for the test, and what became of them."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.lock = threading.Lock()
        self.ran = self.dropped = self.running = self.most = 0

    def job(self, num_bytes: int = 1) -> Job:
        return Job(self.run, self.drop, num_bytes)

    def run(self) -> None:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.begun.release()
        assert self.go.wait(SECONDS)
        with self.lock:
            self.running -= 1
            self.ran += 1

    def drop(self) -> None:
        self.dropped += 1


def test_a_pool_has_as_many_threads_as_it_may_and_runs_all_jobs() -> None:
    pool, work = WorkPool("p", LIMITS), _Work()
    assert all(pool.submit(work.job()) for _ in range(20))
    assert work.begun.acquire(timeout=SECONDS) and work.begun.acquire(timeout=SECONDS)
    pool.check_integrity()
    assert not pool.wait_idle(time.monotonic())
    work.go.set()
    assert pool.wait_idle(time.monotonic() + SECONDS)
    assert (work.ran, work.most, pool.num_jobs, pool.num_bytes) == (20, 2, 0, 0)
    assert pool.close(time.monotonic() + SECONDS)


def test_bounds_refuse_at_once() -> None:
    work = _Work()
    few = WorkPool("p", replace(LIMITS, jobs=3))
    assert [few.submit(work.job()) for _ in range(5)] == [True] * 3 + [False] * 2
    small = WorkPool("p", replace(LIMITS, bytes_waiting=10))
    assert [small.submit(work.job(4)) for _ in range(4)] == [True, True, False, False]
    work.go.set()
    for pool in (few, small):
        assert pool.wait_idle(time.monotonic() + SECONDS)
        assert pool.submit(work.job(4))
        pool.close(time.monotonic() + SECONDS)


def test_bytes_under_way_are_bounded_and_a_large_job_runs_alone() -> None:
    pool, work = WorkPool("p", replace(LIMITS, bytes_running=10)), _Work()
    for size in (6, 6, 50):
        assert pool.submit(work.job(size))
    assert work.begun.acquire(timeout=SECONDS)
    work.go.set()
    assert pool.wait_idle(time.monotonic() + SECONDS)
    assert (work.ran, work.most) == (3, 1)
    pool.close(time.monotonic() + SECONDS)


def test_closing_drops_what_waits_and_says_what_hangs() -> None:
    pool, work = WorkPool("p", replace(LIMITS, workers=1)), _Work()
    for _ in range(5):
        pool.submit(work.job())
    assert work.begun.acquire(timeout=SECONDS)
    assert not pool.close(time.monotonic())
    assert work.dropped == 4
    assert not pool.submit(work.job())
    work.go.set()
    assert pool.close(time.monotonic() + SECONDS)
    assert work.ran == 1


def test_a_job_that_raises_does_not_end_the_pool() -> None:
    def fail() -> None:
        raise RuntimeError("no")

    pool, work = WorkPool("p", replace(LIMITS, workers=1)), _Work()
    work.go.set()
    pool.submit(Job(fail, work.drop, 1))
    pool.submit(work.job())
    assert pool.wait_idle(time.monotonic() + SECONDS)
    assert (pool.failed, work.ran) == (1, 1)
    pool.close(time.monotonic() + SECONDS)


@pytest.mark.parametrize("field", ["workers", "jobs", "bytes_waiting", "bytes_running"])
def test_a_pool_without_room_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"a pool's {field} must be 1 or more"):
        replace(LIMITS, **{field: 0})
