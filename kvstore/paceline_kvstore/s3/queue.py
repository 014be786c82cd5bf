"""Write-behind: chunks that wait to be uploaded, bounded in bytes and age, written by threads of their own.

A full queue refuses the newest: what waits longest is nearest to being of use. A fault of the server holds the queue
back, by its breaker and by growing pauses, and loses nothing until a chunk is too old. What is in the queue is not
durable; `flush` and a waited-for entry say when it is.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline_kvstore.breaker import Breaker, Outcome, Ticket
from paceline_kvstore.errors import KVStoreError, TierFault
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.s3.counts import Counts
from paceline_kvstore.s3.pack import MAX_CHUNKS
from paceline_kvstore.s3.settings import S3Settings

_IDLE_SECONDS = 60.0
_BUSY_SECONDS = 0.05

Store = Callable[[Sequence["Entry"], float], None]
"""Makes a run of entries durable; the time.monotonic() to look things up until. Raises TierFault."""


@dataclass(slots=True, eq=False)
class Entry:
    """An encoded chunk on its way. Times in time.monotonic(). `is_durable` is None until that is decided.

    `tenant` is its owner's `tenant_digest`.
    """

    key: ChunkKey
    chunk: bytearray
    parent: ChunkKey | None = None
    tenant: str = ""
    offered_at: float = 0.0
    not_before: float = 0.0
    tries: int = 0
    is_durable: bool | None = None
    is_withdrawn: bool = False


class WriteQueue:
    """Entries in order of arrival and the threads that write them."""

    def __init__(self, store: Store, settings: S3Settings, breaker: Breaker, counts: Counts) -> None:
        self._store = store
        self._settings = settings
        self._breaker = breaker
        self._counts = counts
        self._changed = threading.Condition()
        self._waiting: OrderedDict[ChunkKey, Entry] = OrderedDict()
        self._running: dict[ChunkKey, Entry] = {}
        self._bytes = 0
        self._hurries = 0
        self._has_lost = False
        self._is_closed = False
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-s3-write-{number}", daemon=True)
            for number in range(settings.write_workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes that wait or are being written."""
        return self._bytes

    @property
    def state(self) -> str:
        """The breaker's state."""
        return self._breaker.state

    def offer(self, entry: Entry) -> Entry | None:
        """Take the entry, or say which one of its key is on its way; None if there is no room."""
        with self._changed:
            if self._is_closed:
                return None
            if (known := self._find(entry.key)) is not None:
                return known
            if self._bytes + len(entry.chunk) > self._settings.queue_bytes:
                self._counts.add(dropped=1)
                return None
            entry.offered_at = time.monotonic()
            self._waiting[entry.key] = entry
            self._bytes += len(entry.chunk)
            self._changed.notify_all()
            return entry

    def has_room(self, num_bytes: int) -> bool:
        """Whether that many bytes would be taken now."""
        return not self._is_closed and self._bytes + num_bytes <= self._settings.queue_bytes

    def find(self, key: ChunkKey) -> bytearray | None:
        """The chunk, if it is on its way."""
        with self._changed:
            entry = self._find(key)
            return None if entry is None else entry.chunk

    def withdraw(self, is_meant: Callable[[Entry], bool], until: float) -> int:
        """Take chunks back that wait, and wait for those that are being written; how many of the former."""
        with self._changed:
            meant = [entry for entry in self._waiting.values() if is_meant(entry)]
            for entry in meant:
                entry.is_withdrawn = True
                self._end(entry, is_durable=False)
            running = [entry for entry in self._running.values() if is_meant(entry)]
        self._hurry_until(lambda: all(entry.is_durable is not None for entry in running), until)
        return len(meant)

    def wait(self, entry: Entry, until: float) -> bool:
        """Hurry, and wait until the entry is durable; False if it was lost or time ran out."""
        self._hurry_until(lambda: entry.is_durable is not None, until)
        return entry.is_durable is True

    def flush(self, until: float) -> bool:
        """Hurry, and wait until all that was taken is durable; False if some is not, or was lost since last time.

        What was lost before is told once, to the first who asks.
        """
        with self._changed:
            entries = [*self._waiting.values(), *self._running.values()]
        is_done = self._hurry_until(lambda: all(entry.is_durable is not None for entry in entries), until)
        with self._changed:
            has_lost, self._has_lost = self._has_lost, False
        return is_done and not has_lost and all(entry.is_durable or entry.is_withdrawn for entry in entries)

    def close(self, until: float) -> bool:
        """Take no more, write what waits, and drop what is left at `until`; whether all became durable."""
        with self._changed:
            self._is_closed = True
        is_durable = self.flush(until)
        with self._changed:
            self._is_stopped = True
            for entry in list(self._waiting.values()):
                self._lose(entry)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.1))
        return is_durable

    def check_integrity(self) -> None:
        """Raise AssertionError unless the byte count balances and holds its bound."""
        with self._changed:
            held = sum(len(entry.chunk) for entry in (*self._waiting.values(), *self._running.values()))
            assert held == self._bytes <= self._settings.queue_bytes, f"{held} bytes are held, {self._bytes} counted"
            self._breaker.check_integrity()

    def _find(self, key: ChunkKey) -> Entry | None:
        return self._waiting.get(key) or self._running.get(key)

    def _hurry_until(self, is_done: Callable[[], bool], until: float) -> bool:
        with self._changed:
            self._hurries += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(is_done, max(until - time.monotonic(), 0))
            finally:
                self._hurries -= 1

    def _work(self) -> None:
        while (work := self._next()) is not None:
            run, ticket = work
            begun = time.monotonic()
            fault: TierFault | None = None
            try:
                self._store(run, begun + self._settings.write_timeout)
            except TierFault as caught:
                fault = caught
            except (KVStoreError, ValueError, OSError, RuntimeError) as caught:
                fault = TierFault(f"{type(caught).__name__}: {caught}")
            now = time.monotonic()
            with self._changed:
                outcome = Outcome.OK if fault is None or not _is_of_the_place(fault) else fault.outcome
                # A write may take long: only failures tell of an ill server.
                self._breaker.record(ticket, outcome, 0.0, now)
                if fault is not None:
                    self._counts.add_fault(fault)
                for entry in run:
                    del self._running[entry.key]
                    self._waiting[entry.key] = entry
                    self._settle(entry, fault, now)
                self._changed.notify_all()

    def _next(self) -> tuple[list[Entry], Ticket] | None:
        """The next run to write; None when the queue is closed and empty."""
        with self._changed:
            while True:
                now = time.monotonic()
                run, pause = self._ready(now)
                if run:
                    pause = self._breaker.retry_in(now)
                    ticket = self._breaker.admit(now) if not pause else None
                    if ticket is not None:
                        for entry in run:
                            del self._waiting[entry.key]
                            self._running[entry.key] = entry
                        return run, ticket
                    pause = pause or _BUSY_SECONDS
                elif self._is_stopped or (self._is_closed and not self._waiting and not self._running):
                    return None
                self._changed.wait(pause)

    def _ready(self, now: float) -> tuple[list[Entry], float]:
        """A run that may be written now, or the pause until there may be one."""
        pause = _IDLE_SECONDS
        for entry in list(self._waiting.values()):
            if now - entry.offered_at > self._settings.queue_seconds:
                self._lose(entry)
                continue
            if entry.not_before > now:
                pause = min(pause, entry.not_before - now)
                continue
            if not self._is_small(entry):
                return [entry], 0.0
            run, is_full = self._run_from(entry, now)
            left = run[-1].offered_at + self._settings.linger - now
            if is_full or left <= 0 or self._hurries or self._is_closed:
                return run, 0.0
            pause = min(pause, left)
        return [], pause

    def _run_from(self, first: Entry, now: float) -> tuple[list[Entry], bool]:
        """The small chunks that wait and follow one another from this one on, as many as fit; whether no more would."""
        run = [first]
        size = len(first.chunk)
        for entry in self._waiting.values():
            if entry.parent != run[-1].key or entry.tenant != first.tenant or entry.not_before > now:
                continue
            if not self._is_small(entry) or entry.key.namespace != first.key.namespace:
                continue
            if len(run) == MAX_CHUNKS or size + len(entry.chunk) > self._settings.pack_bytes:
                return run, True
            run.append(entry)
            size += len(entry.chunk)
        return run, len(run) == MAX_CHUNKS

    def _is_small(self, entry: Entry) -> bool:
        return len(entry.chunk) <= self._settings.pack_chunk_bytes

    def _settle(self, entry: Entry, fault: TierFault | None, now: float) -> None:
        """What becomes of an entry after a try."""
        if fault is None:
            self._end(entry, is_durable=True)
            return
        entry.tries += 1
        if self._is_stopped or not _is_of_the_place(fault):
            self._lose(entry)
            return
        longest = min(self._settings.retry_seconds * 2 ** min(entry.tries, 30), self._settings.retry_seconds_max)
        entry.not_before = now + max(fault.retry_after, random.uniform(0, longest))

    def _lose(self, entry: Entry) -> None:
        self._has_lost = True
        self._counts.add(lost=1)
        self._end(entry, is_durable=False)

    def _end(self, entry: Entry, *, is_durable: bool) -> None:
        del self._waiting[entry.key]
        self._bytes -= len(entry.chunk)
        entry.is_durable = is_durable
        self._changed.notify_all()


def _is_of_the_place(fault: TierFault) -> bool:
    """Whether the same write may succeed later; else this one never will."""
    return fault.retryable or fault.outcome is Outcome.DENIED
