"""Reads of objects: ranges in parallel into one buffer, retried, hedged, and given up at a deadline.

The caller's thread plans and waits; requests run on the read pool. A range's second request (a hedge) has a buffer of
its own, for two requests must not write to the same memory; and no request ever writes to memory that its caller gave,
for one that is given up may still be writing.
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from paceline_kvstore.breaker import Outcome
from paceline_kvstore.errors import CorruptChunk, TierFault
from paceline_kvstore.policy.hedge import HedgePolicy
from paceline_kvstore.s3.client import Abandoned, Bucket, Missing, Sink
from paceline_kvstore.s3.counts import Counts
from paceline_kvstore.s3.pack import PEEK_BYTES, Span
from paceline_kvstore.s3.settings import S3Settings

_MOMENT = 0.01


@dataclass(frozen=True, slots=True)
class Peek:
    """The first bytes of an object, up to PEEK_BYTES, and its whole size."""

    head: bytes
    size: int


class Reader:
    """The read pool of one bucket. Safe to call from several threads; bounded by its workers."""

    def __init__(self, bucket: Bucket, settings: S3Settings, counts: Counts) -> None:
        self.bucket = bucket
        self.settings = settings
        self.counts = counts
        self.pool = ThreadPoolExecutor(settings.read_workers, thread_name_prefix="kv-s3-read")
        self._hedges = HedgePolicy(settings.hedge_share)
        self._reserved = 0
        self._lock = Lock()

    def read(self, name: str, span: Span | None, until: float) -> memoryview:
        """The bytes of an object's span, or of all of it. `until` is in time.monotonic().

        Raises Missing, TierFault, CorruptChunk if the object ends before the span.
        """
        try:
            data = _Transfer(self, name, span, until).run()
        except TierFault as fault:
            self.counts.add(abandoned=int(_ran_out(fault, until)))
            raise
        self.counts.add(bytes_read=len(data))
        return data

    def peek(self, names: Sequence[str], until: float) -> list[Peek | None]:
        """The beginnings of several objects at once, None for those that are not there. Raises TierFault."""
        futures = [self.pool.submit(self._peek, name, until) for name in names]
        try:
            return [future.result(max(until - time.monotonic(), 0)) for future in futures]
        except TierFault as fault:
            self.counts.add_fault(fault)
            self.counts.add(abandoned=int(_ran_out(fault, until)))
            raise
        except TimeoutError:
            self.counts.add(abandoned=1, errors=1)
            raise TierFault("the lookup's deadline passed", Outcome.TIMEOUT) from None
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.bucket.close()

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A range of that size came within that time."""
        with self._lock:
            self._hedges.observe(num_bytes, seconds)

    def hedge_delay(self, num_bytes: int) -> float | None:
        """As `HedgePolicy.begin`."""
        with self._lock:
            return self._hedges.begin(num_bytes)

    def may_hedge(self) -> bool:
        """As `HedgePolicy.spend`."""
        with self._lock:
            return self._hedges.spend()

    def reserve(self, num_bytes: int) -> bool:
        """Count bytes that a read is about to hold, or gives back if negative; False if they are too many."""
        with self._lock:
            if num_bytes > 0 and self._reserved + num_bytes > self.settings.read_bytes:
                return False
            self._reserved += num_bytes
            return True

    def _peek(self, name: str, until: float) -> Peek | None:
        size = 0
        head = bytearray()

        def place(whole: int) -> memoryview:
            nonlocal size, head
            size, head = whole, bytearray(min(whole, PEEK_BYTES))
            return memoryview(head)

        try:
            self.bucket.read(name, 0, PEEK_BYTES, Sink(place, until))
        except Missing:
            return None
        except CorruptChunk:
            return Peek(b"", 0)
        return Peek(bytes(head), size)


def _ran_out(fault: TierFault, until: float) -> bool:
    """Whether a read failed for its deadline; a socket's timeout may end a moment before it."""
    return fault.outcome is Outcome.TIMEOUT and time.monotonic() >= until - _MOMENT


@dataclass(slots=True, eq=False)
class _Part:
    """One range, in bytes of the object; times in time.monotonic(), None for never.

    `hedge_after` is in seconds from `begun`, when a thread took the first request up: a wait for a thread of our own
    says nothing of the server.
    """

    offset: int
    length: int
    tries: int = 0
    is_done: bool = False
    running: int = 0
    begun: float | None = None
    retry_at: float | None = None
    hedge_after: float | None = None
    scratch: bytearray | None = None


@dataclass(frozen=True, slots=True)
class _Event:
    """The object's size is known (`part` None), or a request ended, with its own buffer if it was a hedge."""

    part: _Part | None
    error: BaseException | None = None
    scratch: bytearray | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class _State:
    """What requests and the waiting caller share."""

    lock: Lock = field(default_factory=Lock)
    buffer: memoryview | None = None
    reserved: int = 0
    is_over: bool = False


class _Transfer:
    """One read, driven by the thread that waits for it."""

    def __init__(self, reader: Reader, name: str, span: Span | None, until: float) -> None:
        self._reader = reader
        self._name = name
        self._span = span
        self._begin = 0 if span is None else span.offset
        self._until = until
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._shared = _State()
        self._parts: list[_Part] = []
        self._is_planned = span is not None

    def run(self) -> memoryview:
        try:
            if self._span is None:
                # What one request of a known size would bring, so that a chunk a little larger than a range is one too.
                self._begin_part(0, self._reader.settings.range_bytes * 3 // 2)
            else:
                self._plan(self._begin, self._span.length)
            while not self._is_planned or not all(part.is_done for part in self._parts):
                now = time.monotonic()
                if now >= self._until:
                    self._reader.counts.add(errors=1)
                    raise TierFault("the read's deadline passed", Outcome.TIMEOUT)
                self._act_on_time(now)
                try:
                    self._take(self._events.get(timeout=max(self._next_time() - now, 0)))
                except queue.Empty:
                    continue
            return self._assembled()
        finally:
            with self._shared.lock:
                self._shared.is_over = True
                self._reader.reserve(-self._shared.reserved)

    def _plan(self, begin: int, length: int) -> None:
        """Ask for equal parts of about a range each."""
        step = -(-length // max(round(length / self._reader.settings.range_bytes), 1))
        for offset in range(begin, begin + length, step):
            self._begin_part(offset, min(step, begin + length - offset))

    def _begin_part(self, offset: int, length: int) -> None:
        part = _Part(offset, length)
        self._parts.append(part)
        part.hedge_after = self._reader.hedge_delay(part.length)
        self._ask(part, is_hedge=False)

    def _ask(self, part: _Part, *, is_hedge: bool) -> None:
        part.running += 1
        part.tries += 1
        try:
            self._reader.pool.submit(self._request, part, is_hedge)
        except RuntimeError:
            raise TierFault("the tier is closed", retryable=False) from None

    def _request(self, part: _Part, is_hedge: bool) -> None:
        """On a thread of the pool."""
        scratch: bytearray | None = None
        begun = time.monotonic()
        part.begun = part.begun or begun

        def place(size: int) -> memoryview:
            nonlocal scratch
            target = self._place(part, size)
            if is_hedge:
                scratch = bytearray(len(target))
                return memoryview(scratch)
            return target

        error: BaseException | None = None
        try:
            if self._shared.is_over:
                raise Abandoned
            sink = Sink(place, self._until, lambda: not (self._shared.is_over or part.is_done))
            self._reader.bucket.read(self._name, part.offset, part.length, sink)
        except BaseException as caught:
            error = caught
        self._events.put(_Event(part, error, scratch, time.monotonic() - begun))

    def _place(self, part: _Part, size: int) -> memoryview:
        """The part's place in the buffer, which is made as soon as its size is known."""
        end = size if self._span is None else self._span.offset + self._span.length
        if end > size:
            raise CorruptChunk(f"the object has {size} bytes, expected {end} or more")
        with self._shared.lock:
            if self._shared.is_over:
                raise Abandoned
            if self._shared.buffer is None:
                self._reserve(end - self._begin)
                self._shared.buffer = np.empty(end - self._begin, np.uint8).data
                if self._span is None:
                    self._events.put(_Event(None))
            buffer = self._shared.buffer
        if len(buffer) != end - self._begin:
            raise CorruptChunk("the object changed its size while it was read")
        at = part.offset - self._begin
        return buffer[at : at + part.length]

    def _reserve(self, num_bytes: int) -> None:
        if not self._reader.reserve(num_bytes):
            # Not the server's fault, and waiting for memory would cost the deadline: compute.
            raise TierFault("reads under way hold as many bytes as they may", Outcome.OK, retryable=False)
        self._shared.reserved = num_bytes

    def _take(self, event: _Event) -> None:
        part = event.part
        if part is None:
            self._plan_rest()
            return
        part.running -= 1
        if part.is_done:
            return
        if event.error is None:
            part.is_done = True
            part.scratch = event.scratch
            self._reader.observe(part.length, event.seconds)
            self._reader.counts.add(hedges_won=int(event.scratch is not None))
            return
        if not isinstance(event.error, TierFault):
            raise event.error
        self._reader.counts.add_fault(event.error)
        self._retry_or_raise(part, event.error)

    def _plan_rest(self) -> None:
        assert self._shared.buffer is not None
        self._is_planned = True
        first = self._parts[0]
        size = len(self._shared.buffer)
        if size > first.length:
            self._plan(first.length, size - first.length)
        first.length = min(first.length, size)

    def _retry_or_raise(self, part: _Part, fault: TierFault) -> None:
        """More requests to a server that throttles or denies are no answer to it: the tokens are computed instead."""
        settings = self._reader.settings
        if not fault.retryable or fault.outcome in (Outcome.THROTTLED, Outcome.DENIED):
            raise fault
        if part.running:
            return
        if part.tries >= settings.read_attempts:
            raise fault
        pause = random.uniform(0, settings.retry_seconds * 2 ** (part.tries - 1))
        if time.monotonic() + pause >= self._until:
            raise fault
        part.retry_at = time.monotonic() + pause

    def _act_on_time(self, now: float) -> None:
        """Send the retries and hedges that are due."""
        for part in self._parts:
            if part.is_done:
                continue
            if part.retry_at is not None and now >= part.retry_at:
                part.retry_at = None
                self._reader.counts.add(retries=1)
                self._ask(part, is_hedge=False)
            elif part.running and now >= self._hedge_at(part, now):
                part.hedge_after = None
                if self._reader.may_hedge():
                    self._reader.counts.add(hedges=1)
                    self._ask(part, is_hedge=True)

    def _next_time(self) -> float:
        times = [self._until]
        for part in self._parts:
            if not part.is_done:
                times.append(part.retry_at or self._until)
                times.append(self._hedge_at(part, time.monotonic()) if part.running else self._until)
        return min(times)

    def _hedge_at(self, part: _Part, now: float) -> float:
        """When to think of a second request; for one that waits for a thread, after its delay from now."""
        if part.hedge_after is None:
            return float("inf")
        return (part.begun or now) + part.hedge_after

    def _assembled(self) -> memoryview:
        buffer = self._shared.buffer
        assert buffer is not None
        if all(part.scratch is None for part in self._parts):
            return buffer
        # The first requests of hedged parts may still be writing to the buffer.
        whole = bytearray(buffer)
        for part in self._parts:
            if part.scratch is not None:
                at = part.offset - self._begin
                whole[at : at + part.length] = part.scratch
        return memoryview(whole)
