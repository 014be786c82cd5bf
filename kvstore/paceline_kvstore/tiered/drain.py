"""The end of a store's work: what was taken becomes durable, within a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Event

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.level import Level
from paceline_kvstore.tiered.pool import Job
from paceline_kvstore.waiting import left


class Drain:
    """Times are those of time.monotonic()."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self._levels = levels
        self._durable = [level for level in levels if level.options.is_durable]

    def flush(self, until: float) -> bool:
        """Wait for the writers, then have every durable level flush, side by side; whether all did in time."""
        if not self._wait_idle(until):
            return False
        begun = [begin(level, level.flush) for level in self._durable]
        return sum(wait(until) for wait in begun) == len(begun)

    def run(self, until: float) -> bool:
        """Write what only passing levels have to the first durable one, chains from their start; then `flush`."""
        done = self._wait_idle(until)
        for level in self._levels if self._durable else ():
            if not level.options.is_durable:
                done &= begin(self._durable[0], partial(self._move, level, self._durable[0], until))(until)
        return self.flush(until) and done

    def _wait_idle(self, until: float) -> bool:
        return sum(level.writes.wait_idle(until) for level in self._levels) == len(self._levels)

    def _move(self, source: Level, target: Level, until: float) -> bool:
        done = True
        for key in list(source.tier.keys()):
            if any(level.has(key) for level in self._durable):
                continue
            if not left(until):
                return False
            done &= self._copy(source, target, key)
        return done

    def _copy(self, source: Level, target: Level, key: ChunkKey) -> bool:
        """True as well for a chunk that went meanwhile, or whose owner is not known."""
        origin = source.origin(key)
        lease = source.tier.lease(key)
        if origin is None or lease is None:
            return True
        parent, tenant = origin
        with lease as payload:
            # A tier with a queue of its own may be full: once it is empty there is room.
            return target.write(key, payload, parent, tenant, durable=False) or (
                target.flush() and target.write(key, payload, parent, tenant, durable=False)
            )


def begin(level: Level, work: Callable[[], bool]) -> Callable[[float], bool]:
    """Have a writer of the level do it, for the place may hang; what waits for its answer: False if there is none."""
    answers: list[bool] = []
    ended = Event()

    def run() -> None:
        try:
            answers.append(work())
        finally:
            ended.set()

    if not level.writes.submit(Job(run, ended.set, 0)):
        ended.set()
    return lambda until: ended.wait(left(until)) and bool(answers) and answers[0]
