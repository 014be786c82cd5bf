"""One tier with what a store needs around it: pools, admission, quotas, live speed, counts."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from threading import Lock, Thread
from typing import TypeVar

from paceline_kvstore.codec import Buffer
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.admission import SecondOffer
from paceline_kvstore.policy.estimate import Prior, Quantiles, TransferTime
from paceline_kvstore.policy.eviction import nothing_spared
from paceline_kvstore.policy.ghost import GhostList
from paceline_kvstore.policy.quotas import Quotas
from paceline_kvstore.policy.reuse import Source
from paceline_kvstore.policy.tenants import TenantChunks
from paceline_kvstore.tiered.pool import PoolLimits, WorkPool
from paceline_kvstore.tiers.base import (
    FillableTier,
    Filling,
    Indexed,
    Lease,
    Listener,
    Observable,
    Origin,
    Promoting,
    Tier,
    Traceable,
    layer,
)
from paceline_kvstore.tiers.guarded import GuardedTier
from paceline_kvstore.waiting import left

MIB = 1 << 20
NAMES_REMEMBERED = 65_536
STUCK_S = 10.0
"""Nothing is asked of a place that has not answered a read for so long; no request waits longer."""
READ_SECONDS_BUCKETS = (
    0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0,
)  # fmt: skip

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelOptions:
    """How a store uses a tier. Sizes in bytes.

    is_immediate: reads cost no I/O, so that the caller makes them itself. is_indexed: `contains` answers from this
    process's memory; else the tier must be asked in the background. is_durable: chunks outlive the process. is_shared:
    other engines reach them. needs_second_offer: see `SecondOffer`. quotas: bytes by tenant, default_quota: for the
    others. prior: what reads are taken to cost at first. ttl_s: longest life, for a tier that tells of changes and has
    no bound of its own.
    """

    name: str
    is_immediate: bool = False
    is_indexed: bool = True
    is_durable: bool = False
    is_shared: bool = False
    needs_second_offer: bool = False
    readers: int = 4
    writers: int = 2
    read_jobs: int = 4096
    read_bytes: int = 512 * MIB
    write_bytes: int = 256 * MIB
    prior: Prior = field(default_factory=lambda: Prior(1e-5, 5e9))
    quotas: Mapping[str, int] = field(default_factory=dict[str, int])
    default_quota: int | None = None
    ttl_s: float | None = None


@dataclass(slots=True)
class LevelCounts:
    """Counts since the store was made.

    hits, misses: reads. late: reads that were of no use when they came: past the deadline, cancelled, or after a
    missing chunk. dropped: writes that found their queue full. refused: writes that the tier or a quota did not take.
    demoted, promoted: writes of chunks that were used. errors: calls that raised. expired:
    chunks older than `ttl_s`. probes: lookups in the background;
    probes_refused: those there was no room for.
    """

    hits: int = 0
    misses: int = 0
    late: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    writes: int = 0
    written_bytes: int = 0
    dropped: int = 0
    refused: int = 0
    promoted: int = 0
    demoted: int = 0
    errors: int = 0
    expired: int = 0
    probes: int = 0
    probes_refused: int = 0


class Level:
    """Never raises for what a tier does. `reads` and `writes` are apart, so that reads never wait behind writes."""

    def __init__(
        self,
        tier: Tier,
        options: LevelOptions,
        clock: Callable[[], float] = time.monotonic,
        spared: Callable[[ChunkKey], bool] = nothing_spared,
    ) -> None:
        """spared: chunks that a tenant's quota does not take, either."""
        self.tier = tier
        self.options = options
        self.name = options.name
        self.tenants: TenantChunks[ChunkKey] = TenantChunks(Quotas(options.default_quota, options.quotas), spared)
        name = f"kv-{options.name}"
        reads = PoolLimits(options.readers, options.read_jobs, 1 << 62, options.read_bytes)
        writes = PoolLimits(options.writers, options.read_jobs, options.write_bytes, options.write_bytes)
        self.reads = WorkPool(f"{name}-read", reads, clock)
        self.writes = WorkPool(f"{name}-write", writes, clock)
        self._observed = layer(tier, Observable)
        self._traced = layer(tier, Traceable)
        self._indexed = layer(tier, Indexed)
        # Not one inside a wrapper: what is received into its memory would not be sealed.
        self._fillable = tier if isinstance(tier, FillableTier) else None
        # Nor here: what is inside must not be read past the wrapper.
        self._promoting = tier if isinstance(tier, Promoting) else None
        self._listener: Listener | None = None
        self._clock = clock
        self._lock = Lock()
        self._time = TransferTime(options.prior)
        self._quantiles = Quantiles()
        self._buckets = [0] * (len(READ_SECONDS_BUCKETS) + 1)
        self._counts = LevelCounts()
        self._offered: SecondOffer[ChunkKey] = SecondOffer(NAMES_REMEMBERED)
        # In order of arrival.
        self._born: dict[ChunkKey, float] = {}
        self._known: GhostList[ChunkKey] = GhostList(0 if options.is_indexed else NAMES_REMEMBERED)

    def listen(self, listener: Listener | None) -> None:
        """Tell `listener` of changes: all of them where the tier tells, else those made through this store."""
        self._listener = listener
        if self._observed is not None:
            has_bounds = self.options.quotas or self.options.default_quota is not None or self.options.ttl_s
            wanted = listener is not None or has_bounds
            self._observed.listener = self._changed if wanted else None

    def expire(self) -> list[ChunkKey]:
        """Delete the chunks that came longer than `ttl_s` ago, and say which. Quick while there is none."""
        if self.options.ttl_s is None:
            return []
        oldest = self._clock() - self.options.ttl_s
        with self._lock:
            old = list(takewhile(lambda key: self._born[key] <= oldest, self._born))
        for key in old:
            self.count(expired=self.delete(key))
        return old

    @property
    def is_stuck(self) -> bool:
        """Whether a read hangs, as on a device that has gone; over as soon as it returns."""
        return self.reads.longest_s > STUCK_S

    def has(self, key: ChunkKey) -> bool:
        """Whether the chunk is there, as far as is known without asking. Does not wait."""
        if self.options.is_indexed:
            return self._call(lambda: self.tier.contains((key,)), 0) == 1
        with self._lock:
            return key in self._known

    def admits(self, key: ChunkKey) -> bool:
        """Count an offer of a chunk that is not there; whether to write it."""
        if not self.options.needs_second_offer:
            return True
        with self._lock:
            return self._offered.offer(key)

    def probe(self, keys: Sequence[ChunkKey], deadline_s: float) -> int:
        """How many leading keys are there. May take until the deadline where the tier takes one."""
        self.count(probes=1)
        found = self._call(lambda: self.tier.contains(keys, deadline=deadline_s), 0)
        if not self.options.is_indexed:
            with self._lock:
                for key in keys[:found]:
                    self._known.add(key)
                if found < len(keys):
                    self._known.discard(keys[found])
        return found

    def read(self, key: ChunkKey, deadline_s: float, origin: Origin | None = None) -> memoryview | None:
        """The payload, valid as long as it is referenced, or None. origin: the chunk's, where the caller knows it."""
        lease = self.lease(key, deadline_s, origin)
        return None if lease is None else lease.payload

    def lease(self, key: ChunkKey, deadline_s: float, origin: Origin | None = None) -> Lease | None:
        """A read, as the tier answers it."""
        begun = self._clock()
        tier = self._promoting
        if tier is None or origin is None:
            lease = self._call(lambda: self.tier.lease(key, deadline=deadline_s), None)
        else:
            lease = self._call(lambda: tier.lease_of(key, origin, deadline=deadline_s), None)
        now = self._clock()
        if lease is None:
            with self._lock:
                self._counts.misses += 1
                self._known.discard(key)
            return None
        self._read(lease.payload.nbytes, now - begun, now)
        self.tenants.touch(key)
        return lease

    def write(self, key: ChunkKey, payload: Buffer, parent: ChunkKey | None, tenant: str, *, durable: bool) -> bool:
        """Put the chunk within the tenant's quota; whether it was kept."""

        def put() -> bool:
            return self.tier.put(key, payload, parent=parent, tenant=tenant, durable=durable)

        return self._keep(key, memoryview(payload).nbytes, parent, tenant, put)

    def fill(self, key: ChunkKey, num_bytes: int, parent: ChunkKey | None, tenant: str) -> Filling | None:
        """The tier's own memory to receive a chunk into; None where it has none, or none to spare, or has the chunk."""
        tier = self._fillable
        if tier is None:
            return None
        filling = self._call(lambda: tier.fill(key, num_bytes, parent=parent, tenant=tenant), None)
        if filling is None:
            return None

        def keep(header: bytes) -> bool:
            return self._keep(key, num_bytes, parent, tenant, lambda: filling.keep(header))

        return Filling(filling.buffer, keep)

    def _keep(
        self, key: ChunkKey, num_bytes: int, parent: ChunkKey | None, tenant: str, put: Callable[[], bool]
    ) -> bool:
        """Have the tier take a chunk within its tenant's quota; whether it did."""
        fits, victims = self.tenants.reserve(tenant, key, num_bytes, parent)
        for victim in victims:
            self.delete(victim)
        if not (fits and self._call(put, False)):
            self.tenants.remove(key)
            self.count(refused=1)
            return False
        with self._lock:
            self._counts.writes += 1
            self._counts.written_bytes += num_bytes
            if not self.options.is_indexed:
                self._known.add(key)
        self._made(key, is_held=True)
        return True

    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            self._known.discard(key)
        self.tenants.remove(key)
        deleted = self._call(lambda: self.tier.delete(key), False)
        if deleted:
            self._made(key, is_held=False)
        return deleted

    def origin(self, key: ChunkKey) -> Origin | None:
        """The parent and the tenant that a chunk was put with, if the tier has it and remembers."""
        return None if self._traced is None else self._traced.origin(key)

    def payload_bytes(self, key: ChunkKey) -> int | None:
        """Size of a chunk that the tier has, where it knows without reading."""
        return None if self._indexed is None else self._indexed.payload_bytes(key)

    def parent(self, key: ChunkKey) -> ChunkKey | None:
        """What the chunk follows, where the tier knows."""
        return None if self._indexed is None else self._indexed.parent(key)

    @property
    def faults(self) -> int:
        """Counts calls of the tier that failed, or that its breaker refused."""
        guarded = layer(self.tier, GuardedTier)
        return self.tier.stats.errors + self.counts.errors + (0 if guarded is None else guarded.faults)

    def clear(self, namespace: bytes | None, tenant: str | None) -> int:
        with self._lock:
            self._known = GhostList(self._known.limit)
        return self._call(lambda: self.tier.clear(namespace=namespace, tenant=tenant), 0)

    def source(self) -> Source:
        """The speed and the queue of reads, as they are now."""
        with self._lock:
            line = self._time.line(self._clock())
        return Source(line.latency_s, line.bandwidth, self.options.readers, self.reads.num_jobs)

    def quantile_s(self, share: float) -> float | None:
        """Seconds that this share of the latest reads did not exceed."""
        with self._lock:
            return self._quantiles.at(share)

    @property
    def read_buckets(self) -> tuple[int, ...]:
        """Reads by their seconds: at most READ_SECONDS_BUCKETS, the last more than all of them. Not cumulative."""
        with self._lock:
            return tuple(self._buckets)

    @property
    def counts(self) -> LevelCounts:
        with self._lock:
            return replace(self._counts)

    def count(self, **more: int) -> None:
        """Add to counts by their names."""
        with self._lock:
            for name, number in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + number)

    def flush(self) -> bool:
        return self._call(self.tier.flush, False)

    def close(self, until: float) -> bool:
        """Stop the pools; close the tier unless a thread is still inside it. False if that takes longer."""
        stopped = [pool.close(until) for pool in (self.reads, self.writes)]
        if not all(stopped):
            return False
        # A daemon: a device that hangs must not keep the process from ending.
        closing = Thread(target=self._call, args=(self.tier.close, None), name=f"kv-{self.name}-close", daemon=True)
        closing.start()
        closing.join(left(until))
        return not closing.is_alive()

    def _read(self, num_bytes: int, seconds: float, now: float) -> None:
        with self._lock:
            # Where reads cost no I/O there is nothing to learn, and the caller's time is dear.
            if not self.options.is_immediate:
                self._time.observe(num_bytes, seconds, now)
                self._quantiles.add(seconds)
            self._buckets[bisect_left(READ_SECONDS_BUCKETS, seconds)] += 1
            self._counts.hits += 1
            self._counts.read_bytes += num_bytes
            self._counts.read_seconds += seconds

    def _changed(self, key: ChunkKey, is_held: bool) -> None:
        if not is_held:
            self.tenants.remove(key)
        if self.options.ttl_s is not None:
            with self._lock:
                self._born.pop(key, None)
                if is_held:
                    self._born[key] = self._clock()
        if self._listener is not None:
            self._listener(key, is_held)

    def _made(self, key: ChunkKey, *, is_held: bool) -> None:
        if self._observed is None and self._listener is not None:
            self._listener(key, is_held)

    def _call(self, call: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        """A tier must not raise for its faults; if it does, it is a fault all the same."""
        try:
            return call()
        except Exception as error:
            self.count(errors=1)
            errors = self.counts.errors
            # A broken place fails a thousand times a second: say so at the 1st, 2nd, 4th, 8th time.
            if errors & (errors - 1) == 0:
                # As text: an error has frames, which have payloads, which a handler that keeps records would hold.
                text = f"{type(error).__name__}: {error}"
                _log.warning("%s failed, %d times now: %s", self.name, errors, text)
            return otherwise
