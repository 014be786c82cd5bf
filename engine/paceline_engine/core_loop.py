"""How steps are made: one after the other, or the next one planned while the device makes the last.

The plain way is the default and the oracle of the other. Overlapped, one thread executes plans strictly in order, and
messages, planning, bookkeeping and sending happen beside it. Where the scheduler needs results first, they are waited
for: only the rest then overlaps. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from paceline_engine.backends.base import Backend, Launched, LaunchesAhead
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.step_log import StepLog
from paceline_engine.messages import RequestOutput


@dataclass(frozen=True, slots=True)
class Executed:
    """What the device made of a plan, and how long it took."""

    results: tuple[StepResult, ...]
    seconds: float


class Steps:
    """One after the other. step_seconds: the device's time, of num_steps steps."""

    def __init__(self, scheduler: Scheduler, backend: Backend, log: StepLog, clock: Callable[[], float]) -> None:
        self.num_steps = 0
        self.step_seconds = 0.0
        self._scheduler = scheduler
        self._backend = backend
        self._log = log
        self._clock = clock

    def step(self) -> list[RequestOutput]:
        """Make a step; what it, or an earlier one that was still in flight, has for clients."""
        plan = self._plan()
        return self._book(plan, self._execute(plan))

    def settle(self) -> list[RequestOutput]:
        """Wait until nothing is in flight; what clients hear of it. Nobody else may use scheduler or device before."""
        return []

    def close(self) -> None:
        """No step follows."""

    def _plan(self, after: StepPlan | None = None) -> StepPlan:
        now = self._clock()
        plan = self._scheduler.schedule(now, after)
        self._log.planned(now, plan, after is not None)
        return plan

    def _execute(self, plan: StepPlan) -> Executed:
        begin = self._clock()
        results = tuple(self._backend.execute(plan))
        return Executed(results, self._clock() - begin)

    def _book(self, plan: StepPlan, executed: Executed, later: StepPlan | None = None) -> list[RequestOutput]:
        now = self._clock()
        self.num_steps += 1
        self.step_seconds += executed.seconds
        self._log.updated(executed.results, now, executed.seconds)
        return self._scheduler.update(plan, executed.results, now, executed.seconds, later)


class OverlappedSteps(Steps):
    """The next step is planned, and handed to the device, before the last one's results are known.

    A device that launches ahead queues it behind the last one itself; for any other a thread does.
    """

    def __init__(self, scheduler: Scheduler, backend: Backend, log: StepLog, clock: Callable[[], float]) -> None:
        super().__init__(scheduler, backend, log, clock)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._in_flight: tuple[StepPlan, Callable[[], Executed]] | None = None
        self._last_end = clock()

    def step(self) -> list[RequestOutput]:
        """Hand the device one step more, then book the one before."""
        outputs = [] if self._scheduler.can_plan_ahead() else self.settle()
        last = self._in_flight
        plan = self._plan(last[0] if last is not None else None)
        self._in_flight = plan, self._start(plan)
        if last is not None:
            outputs += self._book(last[0], last[1](), plan)
        return outputs

    def settle(self) -> list[RequestOutput]:
        """Wait for the plan in flight, if there is one."""
        last, self._in_flight = self._in_flight, None
        return [] if last is None else self._book(last[0], last[1]())

    def close(self) -> None:
        """End the device's thread."""
        self._thread.shutdown()

    def _start(self, plan: StepPlan) -> Callable[[], Executed]:
        """Have the device begin; the answer waits for it."""
        if isinstance(self._backend, LaunchesAhead):
            begin = self._clock()
            return partial(self._wait, self._backend.launch(plan), begin)
        return self._thread.submit(self._execute, plan).result

    def _wait(self, launched: Launched, begin: float) -> Executed:
        """The step's time is what it adds to the one that it stands behind."""
        results = tuple(launched.results())
        begin, self._last_end = max(begin, self._last_end), self._clock()
        return Executed(results, self._last_end - begin)
