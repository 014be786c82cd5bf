"""How long the GPU works on a step and idles between two, by CUDA events around one step in many.

Nothing waits for the GPU: a sample is read when the next one begins, and dropped if it isn't complete then. Steps that
aren't sampled cost a count. Off a GPU nothing is counted, and `stats` is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline_engine.telemetry import step_counters as names

# A prime, so that samples don't always meet the same phase of a workload that repeats.
STEPS_PER_SAMPLE = 61
# Collectives that are timed in one step; enough for two a layer in any model.
MAX_SPANS = 512
_UNTIMED = nullcontext()


class Event(Protocol):
    """A mark in the GPU's queue of work, as torch.cuda.Event is."""

    def record(self) -> None:
        """Queue it behind the work so far."""
        ...

    def query(self) -> bool:
        """Whether the GPU has passed it."""
        ...

    def elapsed_time(self, end_event: Event, /) -> float:
        """Milliseconds from this event to `end_event`; the GPU has passed both."""
        ...


class EventSource(Protocol):
    """Where events come from."""

    def new_event(self) -> Event:
        """An event that takes the time."""
        ...

    def is_capturing(self) -> bool:
        """Whether work goes into a CUDA graph now instead of to the GPU; an event there would never have a time."""
        ...


class CudaEvents:
    """Events on the current stream of the current GPU."""

    def new_event(self) -> Event:
        """A torch.cuda.Event."""
        return torch.cuda.Event(enable_timing=True)  # type: ignore[return-value]

    def is_capturing(self) -> bool:
        """As torch says."""
        return torch.cuda.is_current_stream_capturing()


@dataclass(slots=True)
class _Sample:
    """Events of one sampled step. last_end: the end of the step before, where requests waited since then."""

    begin: Event
    end: Event
    last_end: Event | None
    spans: list[tuple[str, Event, Event]] = field(default_factory=list)


class StepTimer:
    """Samples every `steps_per_sample`-th step. For one thread; `stats` may be read from others.

    groups: the process groups whose collectives are timed, by name. events: None where there is no GPU.
    """

    def __init__(
        self,
        events: EventSource | None,
        *,
        groups: Sequence[str] = (),
        steps_per_sample: int = STEPS_PER_SAMPLE,
    ) -> None:
        if steps_per_sample < 2:
            raise ValueError(f"steps_per_sample must be at least 2, not {steps_per_sample}: a gap needs a step before")
        self._events = events
        self._period = steps_per_sample
        self._num_steps = 0
        self._free: list[Event] = []
        self._last_end: Event | None = None
        self._current: _Sample | None = None
        self._complete: _Sample | None = None
        counters = [names.SAMPLED_STEPS, names.STEP_SECONDS, names.SAMPLED_GAPS, names.GAP_SECONDS]
        for group in groups:
            counters += [names.of_group(name, group) for name in (names.SAMPLED_COLLECTIVES, names.COLLECTIVE_SECONDS)]
        self.stats: dict[str, float] = dict.fromkeys(counters, 0.0) if events is not None else {}

    @property
    def is_sampling(self) -> bool:
        """Whether the step under way is sampled. In a replayed CUDA graph, collectives can't be told apart."""
        return self._current is not None

    @contextmanager
    def step(self, *, had_work: bool) -> Iterator[None]:
        """Around everything that one step queues on the GPU. had_work: requests waited for it since the last step.

        Time without requests is no gap.
        """
        if self._events is None:
            yield
            return
        self._num_steps += 1
        if self._num_steps % self._period == 0:
            self._begin_sample(had_work)
        try:
            yield
        except BaseException:
            self._drop(self._current)
            self._current = None
            raise
        if self._current is not None:
            self._current.end.record()
            self._current, self._complete = None, self._current
        elif (self._num_steps + 1) % self._period == 0:
            self._last_end = self._marked()

    def span(self, group: str) -> AbstractContextManager[None]:
        """Around one collective operation of a group. Raises ValueError for one that the timer wasn't made for."""
        sample = self._current
        if sample is None or self._events is None:
            return _UNTIMED
        if names.of_group(names.COLLECTIVE_SECONDS, group) not in self.stats:
            raise ValueError(f"group {group!r} is not one of the timer's: name it where the timer is made")
        if len(sample.spans) == MAX_SPANS or self._events.is_capturing():
            return _UNTIMED
        return self._timed(sample, group)

    @contextmanager
    def _timed(self, sample: _Sample, group: str) -> Iterator[None]:
        begin = self._marked()
        yield
        sample.spans.append((group, begin, self._marked()))

    def _begin_sample(self, had_work: bool) -> None:
        self._settle()
        last_end, self._last_end = self._last_end, None
        if last_end is not None and not had_work:
            self._free.append(last_end)
            last_end = None
        begin = self._marked()
        self._current = _Sample(begin=begin, end=self._event(), last_end=last_end)

    def _settle(self) -> None:
        """Count the last sample, if the GPU is through with it."""
        sample, self._complete = self._complete, None
        if sample is not None and sample.end.query():
            self._count(sample)
        self._drop(sample)

    def _count(self, sample: _Sample) -> None:
        stats = dict(self.stats)
        stats[names.SAMPLED_STEPS] += 1
        stats[names.STEP_SECONDS] += _seconds(sample.begin, sample.end)
        if sample.last_end is not None:
            stats[names.SAMPLED_GAPS] += 1
            stats[names.GAP_SECONDS] += _seconds(sample.last_end, sample.begin)
        for group, begin, end in sample.spans:
            stats[names.of_group(names.SAMPLED_COLLECTIVES, group)] += 1
            stats[names.of_group(names.COLLECTIVE_SECONDS, group)] += _seconds(begin, end)
        # Replaced, never changed, so that a reader sees one sample's counters or the next one's.
        self.stats = stats

    def _drop(self, sample: _Sample | None) -> None:
        """Its events may be recorded anew, complete or not."""
        if sample is None:
            return
        self._free += [sample.begin, sample.end]
        self._free += [sample.last_end] if sample.last_end is not None else []
        for _, begin, end in sample.spans:
            self._free += [begin, end]

    def _event(self) -> Event:
        assert self._events is not None
        return self._free.pop() if self._free else self._events.new_event()

    def _marked(self) -> Event:
        event = self._event()
        event.record()
        return event


def step_timer(device: torch.device, *, groups: Sequence[str] = ()) -> StepTimer:
    """A timer for steps on `device`, which must be current; one that does nothing off a GPU."""
    return StepTimer(CudaEvents() if device.type == "cuda" else None, groups=groups)


def _seconds(begin: Event, end: Event) -> float:
    return begin.elapsed_time(end) / 1000
