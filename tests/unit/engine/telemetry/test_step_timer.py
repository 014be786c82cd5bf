"""Sampled times of steps, gaps and collectives, over a queue of work with a clock of the test's."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline_engine.backends.triton.timing import MAX_SPANS, StepTimer, step_timer


@dataclass
class Gpu:
    """A queue that is worked off at once, or when `catch_up` is called. Times are milliseconds."""

    now: float = 0.0
    lags: bool = False
    capturing: bool = False
    num_events: int = 0
    num_records: int = 0
    waiting: list[Mark] = field(default_factory=list)

    def new_event(self) -> Mark:
        self.num_events += 1
        return Mark(self)

    def is_capturing(self) -> bool:
        return self.capturing

    def work(self, milliseconds: float) -> None:
        self.now += milliseconds

    def catch_up(self) -> None:
        for mark in self.waiting:
            mark.passed = True
        self.waiting.clear()


class Mark:
    """As a CUDA event: its time can be asked for once the GPU has passed it."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._time: float | None = None
        self.passed = False

    def record(self) -> None:
        assert not self._gpu.capturing, "an event that a graph captures never has a time"
        self._gpu.num_records += 1
        self._time = self._gpu.now
        self.passed = not self._gpu.lags
        if self._gpu.lags:
            self._gpu.waiting.append(self)

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end_event: Mark) -> float:
        assert self._time is not None and end_event._time is not None, "never recorded"
        assert self.passed and end_event.passed, "the GPU has not come so far"
        return end_event._time - self._time


def run(timer: StepTimer, gpu: Gpu, num_steps: int, *, had_work: bool = True, gap: float = 1.0) -> None:
    """Steps of 10 ms, two collectives of 2 ms in each, behind gaps."""
    for _ in range(num_steps):
        gpu.work(gap)
        with timer.step(had_work=had_work):
            gpu.work(4)
            for _ in range(2):
                with timer.span("tp"):
                    gpu.work(2)
            gpu.work(2)


def test_every_nth_step_is_measured_and_the_others_cost_no_event() -> None:
    gpu = Gpu()
    timer = StepTimer(gpu, groups=("tp", "pp"), steps_per_sample=8)
    run(timer, gpu, 6)
    assert (gpu.num_records, timer.stats["sampled_steps"]) == (0, 0)
    run(timer, gpu, 8 * 5 + 2)  # The sixth sample begins, and the first five are counted.
    assert timer.stats == pytest.approx(
        {
            "sampled_steps": 5,
            "device_seconds": 0.050,
            "sampled_gaps": 5,
            "gap_seconds": 0.005,
            "sampled_collectives:tp": 10,
            "collective_seconds:tp": 0.020,
            "sampled_collectives:pp": 0,
            "collective_seconds:pp": 0,
        }
    )
    assert gpu.num_records == 6 * 7  # The end of the step before, begin and end, and two spans.


def test_events_are_used_again() -> None:
    gpu = Gpu()
    timer = StepTimer(gpu, groups=("tp",), steps_per_sample=2)
    run(timer, gpu, 20)
    few = gpu.num_events
    run(timer, gpu, 200)
    assert gpu.num_events == few


def test_time_without_requests_is_no_gap() -> None:
    gpu = Gpu()
    timer = StepTimer(gpu, groups=("tp",), steps_per_sample=4)
    run(timer, gpu, 8, had_work=False, gap=60_000)
    assert timer.stats["sampled_steps"] == 1
    assert (timer.stats["sampled_gaps"], timer.stats["gap_seconds"]) == (0, 0)


def test_a_sample_that_the_gpu_has_not_finished_is_dropped_not_waited_for() -> None:
    gpu = Gpu(lags=True)
    timer = StepTimer(gpu, groups=("tp",), steps_per_sample=4)
    run(timer, gpu, 12)
    assert timer.stats["sampled_steps"] == 0
    gpu.catch_up()
    gpu.lags = False
    run(timer, gpu, 4)
    assert timer.stats["sampled_steps"] == 1
    run(timer, gpu, 4)
    assert timer.stats["device_seconds"] == pytest.approx(0.020)


def test_a_step_that_fails_is_no_sample() -> None:
    gpu = Gpu()
    timer = StepTimer(gpu, groups=("tp",), steps_per_sample=2)
    run(timer, gpu, 1)
    with pytest.raises(RuntimeError, match="out of memory"), timer.step(had_work=True), timer.span("tp"):
        raise RuntimeError("out of memory")
    assert not timer.is_sampling
    run(timer, gpu, 2)
    assert timer.stats["sampled_steps"] == 0
    run(timer, gpu, 2)
    assert timer.stats["sampled_steps"] == 1


def test_collectives_in_a_graph_under_capture_are_left_alone() -> None:
    gpu = Gpu()
    timer = StepTimer(gpu, groups=("tp",), steps_per_sample=2)
    for _ in range(4):
        with timer.step(had_work=True):
            gpu.capturing = True
            with timer.span("tp"):
                gpu.work(5)
            gpu.capturing = False
    assert (timer.stats["sampled_steps"], timer.stats["sampled_collectives:tp"]) == (1, 0)


def test_spans_of_one_step_have_a_bound_and_a_group_must_be_known() -> None:
    gpu = Gpu()
    timer = StepTimer(gpu, groups=("tp",), steps_per_sample=2)
    for _ in range(4):
        with timer.step(had_work=True):
            for _ in range(MAX_SPANS + 100):
                with timer.span("tp"):
                    gpu.work(1)
    assert timer.stats["sampled_collectives:tp"] == MAX_SPANS
    run(timer, gpu, 1)
    with pytest.raises(ValueError, match="group 'ep' is not one of the timer's"), timer.step(had_work=True):
        timer.span("ep")


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=60), st.integers(2, 5))
def test_counters_only_grow_and_are_consistent(steps: list[tuple[bool, bool, bool]], period: int) -> None:
    gpu = Gpu()
    timer = StepTimer(gpu, groups=("tp",), steps_per_sample=period)
    for had_work, lags, fails in steps:
        gpu.lags = lags
        if not lags:
            gpu.catch_up()
        before = timer.stats
        gpu.work(1)
        try:
            with timer.step(had_work=had_work):
                with timer.span("tp"):
                    gpu.work(2)
                if fails:
                    raise RuntimeError
        except RuntimeError:
            assert not timer.is_sampling
        after = timer.stats
        assert all(after[name] >= before[name] for name in before)
        assert after["device_seconds"] == pytest.approx(0.002 * after["sampled_steps"])
        assert after["gap_seconds"] == pytest.approx(0.001 * after["sampled_gaps"])
        assert after["sampled_gaps"] <= after["sampled_steps"] == after["sampled_collectives:tp"]


def test_off_a_gpu_nothing_is_counted() -> None:
    timer = step_timer(torch.device("cpu"), groups=("tp",))
    for _ in range(200):
        with timer.step(had_work=True), timer.span("tp"):
            assert not timer.is_sampling
    assert timer.stats == {}


def test_a_gap_needs_a_step_before() -> None:
    with pytest.raises(ValueError, match="steps_per_sample must be at least 2, not 1"):
        StepTimer(None, steps_per_sample=1)
