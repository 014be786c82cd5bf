"""A tier behind breakers: whatever is wrong with its place, the answer is a miss or "not kept", and it comes soon.

Reads and writes have a breaker each: a place that refuses writes may still be read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import TypeVar

from paceline_kvstore.breaker import Breaker, BreakerLimits, Outcome
from paceline_kvstore.codec import Buffer
from paceline_kvstore.errors import TierFault
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.stats import TierStats
from paceline_kvstore.tiers.base import Lease, Tier

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class GuardedTier:
    """Implements `Tier` and never raises for a fault.

    A tier tells of a fault by raising TierFault (or anything but ValueError); one that only counts its faults is
    judged by how long its calls take. `clock` gives seconds and never goes back.
    """

    def __init__(
        self, tier: Tier, limits: BreakerLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tier = tier
        self.reads = Breaker(limits)
        self.writes = Breaker(limits)
        self._clock = clock
        self._lock = Lock()
        self._failed = 0

    def put(
        self,
        key: ChunkKey,
        payload: Buffer,
        *,
        parent: ChunkKey | None = None,
        tenant: str = "",
        durable: bool = False,
    ) -> bool:
        def call() -> bool:
            return self.tier.put(key, payload, parent=parent, tenant=tenant, durable=durable)

        # One that waits until its chunk is durable may take long without being ill.
        return self._guard(self.writes, call, False, is_timed=not durable)

    def get(self, key: ChunkKey, *, deadline: float | None = None) -> memoryview | None:
        return self._guard(self.reads, lambda: self.tier.get(key, deadline=deadline), None)

    def read_into(self, key: ChunkKey, target: bytearray | memoryview, *, deadline: float | None = None) -> int | None:
        return self._guard(self.reads, lambda: self.tier.read_into(key, target, deadline=deadline), None)

    def lease(self, key: ChunkKey, *, deadline: float | None = None) -> Lease | None:
        return self._guard(self.reads, lambda: self.tier.lease(key, deadline=deadline), None)

    def contains(self, keys: Sequence[ChunkKey], *, deadline: float | None = None) -> int:
        return self._guard(self.reads, lambda: self.tier.contains(keys, deadline=deadline), 0)

    def delete(self, key: ChunkKey) -> bool:
        return self._guard(self.writes, lambda: self.tier.delete(key), False)

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> int:
        return self._guard(self.writes, lambda: self.tier.clear(namespace=namespace, tenant=tenant), 0, is_timed=False)

    def keys(self) -> Iterator[ChunkKey]:
        return iter(self._guard(self.reads, lambda: list(self.tier.keys()), [], is_timed=False))

    def flush(self) -> bool:
        # Never refused: what was acknowledged must be asked for, however ill the place is.
        return self._answer(self.tier.flush, False)[0]

    def close(self) -> None:
        self._answer(self.tier.close, None)

    @property
    def stats(self) -> TierStats:
        return self.tier.stats

    @property
    def bytes_used(self) -> int:
        return self.tier.bytes_used

    @property
    def capacity(self) -> int:
        return self.tier.capacity

    @property
    def faults(self) -> int:
        """Counts calls that failed or that a breaker refused: their answers say nothing of the place."""
        with self._lock:
            return self._failed + self.reads.refused + self.writes.refused

    def _guard(
        self, breaker: Breaker, call: Callable[[], _Answer], otherwise: _Answer, *, is_timed: bool = True
    ) -> _Answer:
        begun = self._clock()
        with self._lock:
            ticket = breaker.admit(begun)
        if ticket is None:
            return otherwise
        outcome = Outcome.ERROR
        try:
            answer, outcome = self._answer(call, otherwise)
            return answer
        except ValueError:
            outcome = Outcome.OK  # The caller's mistake says nothing of the place.
            raise
        finally:
            now = self._clock()
            with self._lock:
                self._failed += outcome is not Outcome.OK
                before = breaker.state
                breaker.record(ticket, outcome, now - begun if is_timed else 0.0, now)
                if breaker.state is not before:
                    _log.warning("%s: breaker was %s, is %s", type(self.tier).__name__, before, breaker.state)

    def _answer(self, call: Callable[[], _Answer], otherwise: _Answer) -> tuple[_Answer, Outcome]:
        try:
            return call(), Outcome.OK
        except TierFault as fault:
            _log.debug("%s: %s", type(self.tier).__name__, fault)
            return otherwise, fault.outcome
        except ValueError:
            raise
        except Exception:
            _log.exception("%s failed; the answer is a miss", type(self.tier).__name__)
            return otherwise, Outcome.ERROR


def copy_into(target: bytearray | memoryview, payload: memoryview) -> int:
    """Copy a payload to the front of a buffer; its bytes. ValueError if the buffer is too small."""
    view = memoryview(target).cast("B")
    if len(view) < len(payload):
        raise ValueError(f"the payload has {len(payload)} bytes, the buffer {len(view)}")
    view[: len(payload)] = payload
    return len(payload)
