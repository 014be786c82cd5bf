"""The glue: observe, plan, execute, status, events, requeue. One call is about one key and is safe to repeat."""

from __future__ import annotations

import dataclasses
import logging

from paceline_operator.events import EventRecorder
from paceline_operator.execute import Executor
from paceline_operator.observe import Observer
from paceline_operator.planner.model import FleetObserved, Key, Observed, Plan, ServiceObserved, StoreObserved
from paceline_operator.planner.plan import plan
from paceline_operator.settings import Clock, Settings

log = logging.getLogger(__name__)


class ReconcileFailed(Exception):
    """Some of the plan could not be carried out; the message has one line for each failure."""


class Reconciler:
    """Safe for several threads as long as no two work on one key, which the workqueue promises."""

    def __init__(
        self, observer: Observer, executor: Executor, events: EventRecorder, settings: Settings, clock: Clock
    ) -> None:
        self._observer = observer
        self._executor = executor
        self._events = events
        self._settings = settings
        self._clock = clock
        self._status_written_s: dict[Key, float] = {}

    def reconcile(self, key: Key) -> float | None:
        """Seconds after which to look again, None if only a change calls for it. Raises ReconcileFailed, KubeError."""
        observed = self._observer.observe(key)
        if observed is None:
            self._status_written_s.pop(key, None)
            return None
        wanted = self._plan(observed)
        errors = self._executor.run(wanted.actions)
        if errors:
            # The conditions say what failed; the workqueue tries again.
            wanted = self._plan(_with_errors(observed, errors))
        requeue_after_s = self._write_status(key, observed, wanted)
        if errors:
            raise ReconcileFailed("; ".join(errors))
        return requeue_after_s

    def _plan(self, observed: Observed) -> Plan:
        return plan(observed, self._clock.wall(), self._settings.plan)

    def _write_status(self, key: Key, observed: Observed, wanted: Plan) -> float | None:
        if wanted.status is None:
            return wanted.requeue_after_s
        now = self._clock.monotonic()
        wait_s = self._status_written_s.get(key, float("-inf")) + self._settings.status_interval_s - now
        if not wanted.urgent and wait_s > 0:
            return min(wait_s, wanted.requeue_after_s or wait_s)
        self._executor.write_status(wanted.status)
        self._status_written_s[key] = now
        about = observed.router if isinstance(observed, FleetObserved) else observed.manifest
        for note in wanted.events if about is not None else ():
            assert about is not None
            self._events.record(about, note)
        return wanted.requeue_after_s


def _with_errors(observed: Observed, errors: tuple[str, ...]) -> Observed:
    if isinstance(observed, ServiceObserved | FleetObserved | StoreObserved):
        return dataclasses.replace(observed, errors=errors)
    return observed
