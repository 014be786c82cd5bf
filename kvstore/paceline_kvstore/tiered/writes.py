"""Write-behind: chunks on their way to one or more levels, found by readers meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.level import Level
from paceline_kvstore.tiered.pool import Job
from paceline_kvstore.waiting import left


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk as it is offered. `payload` must not change while it is on its way."""

    key: ChunkKey
    payload: memoryview
    parent: ChunkKey | None = None
    tenant: str = ""


@dataclass(slots=True, eq=False)
class _Staged:
    """A chunk that `jobs` levels still have to take, of which `running` do right now."""

    chunk: Chunk
    jobs: int = 0
    running: int = 0
    is_withdrawn: bool = False


class WriteBehind:
    """Bounded by the write pools of the levels: a level whose pool is full drops the newest, and counts it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._staged: dict[ChunkKey, _Staged] = {}
        self._running: set[_Staged] = set()
        self._epoch = 0

    def __len__(self) -> int:
        """Chunks that some level still has to take."""
        return len(self._staged)

    @property
    def epoch(self) -> int:
        """Counts the withdrawals: what was read before one must not be written after it."""
        return self._epoch

    def find(self, key: ChunkKey) -> memoryview | None:
        """The payload of a chunk that is on its way."""
        staged = self._staged.get(key) if self._staged else None
        return None if staged is None else staged.chunk.payload

    def submit(self, level: Level, chunk: Chunk, epoch: int | None = None) -> bool:
        """Write the chunk to a level soon; False if its queue is full, or if there was a withdrawal since `epoch`."""
        with self._changed:
            if epoch is not None and epoch != self._epoch:
                return False
            staged = self._staged.setdefault(chunk.key, _Staged(chunk))
            staged.jobs += 1
        job = Job(lambda: self._run(level, staged), lambda: self._done(staged), chunk.payload.nbytes)
        if level.writes.submit(job):
            return True
        self._done(staged)
        level.count(dropped=1)
        return False

    def withdraw(self, is_meant: Callable[[Chunk], bool], until: float) -> int:
        """Take back what is on its way, and wait for what a level is taking right now; how many chunks."""
        with self._changed:
            self._epoch += 1
            meant = [staged for staged in self._staged.values() if is_meant(staged.chunk)]
            for staged in meant:
                staged.is_withdrawn = True
                del self._staged[staged.chunk.key]
            running = [staged for staged in self._running if is_meant(staged.chunk)]
            self._changed.wait_for(lambda: not any(staged.running for staged in running), left(until))
        return len(meant)

    def _run(self, level: Level, staged: _Staged) -> None:
        with self._changed:
            if staged.is_withdrawn:
                return self._settle(staged)
            staged.running += 1
            self._running.add(staged)
        chunk = staged.chunk
        try:
            level.write(chunk.key, chunk.payload, chunk.parent, chunk.tenant, durable=False)
        finally:
            with self._changed:
                staged.running -= 1
                if not staged.running:
                    self._running.discard(staged)
                self._settle(staged)
        return None

    def _done(self, staged: _Staged) -> None:
        with self._changed:
            self._settle(staged)

    def _settle(self, staged: _Staged) -> None:
        staged.jobs -= 1
        if not staged.jobs and self._staged.get(staged.chunk.key) is staged:
            del self._staged[staged.chunk.key]
        self._changed.notify_all()

    def check_integrity(self) -> None:
        """Raise ValueError unless each chunk on its way has a level that will take it."""
        with self._changed:
            bad = [staged for staged in self._staged.values() if staged.jobs < 1 or staged.running > staged.jobs]
            if bad:
                raise ValueError(f"{len(bad)} chunks are on their way to no level")
