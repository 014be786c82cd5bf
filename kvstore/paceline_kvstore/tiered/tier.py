"""A tiered store as one tier, for callers with threads of their own, such as the node server: calls wait for I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock

from paceline_kvstore import codec
from paceline_kvstore.codec import Buffer
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.stats import TierStats
from paceline_kvstore.tiered.level import Level
from paceline_kvstore.tiered.store import FETCH_SECONDS, PROBE_SECONDS, TieredStore
from paceline_kvstore.tiered.writes import Chunk
from paceline_kvstore.tiers.base import Filling, Lease, Origin


class StoreTier:
    """Implements `Tier`. Promotion and demotion go on behind the caller's back, as in the store itself.

    A chunk in a first level that is memory is received and handed out without a copy.
    """

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self._lock = Lock()
        self._own = TierStats()

    def put(
        self,
        key: ChunkKey,
        payload: Buffer,
        *,
        parent: ChunkKey | None = None,
        tenant: str = "",
        durable: bool = False,
    ) -> bool:
        """Keep a copy in the first level, or with `durable` in the first durable one; below, by second offer."""
        self.store.expire()
        levels = [level for level in self.store.levels if level.options.is_durable or not durable]
        view = codec.as_bytes(payload)
        self.store.pins.arrived(key, len(view))
        kept = bool(levels) and levels[0].write(key, view, parent, tenant, durable=durable)
        self._count_put(kept)
        if kept and not durable:
            self._spread_down(key, parent, tenant)
        return kept

    def fill(
        self, key: ChunkKey, num_bytes: int, *, parent: ChunkKey | None = None, tenant: str = ""
    ) -> Filling | None:
        """Implements `FillableTier`: room in the first level, if that is memory."""
        self.store.expire()
        filling = self.store.levels[0].fill(key, num_bytes, parent, tenant)
        if filling is None:
            return None
        inner = filling.keep

        def keep(header: bytes) -> bool:
            self.store.pins.arrived(key, num_bytes)
            kept = inner(header)
            self._count_put(kept)
            if kept:
                self._spread_down(key, parent, tenant)
            return kept

        return Filling(filling.buffer, keep)

    def get(self, key: ChunkKey, *, deadline: float | None = None) -> memoryview | None:
        lease = self.lease(key, deadline=deadline)
        return None if lease is None else lease.payload

    def read_into(self, key: ChunkKey, target: bytearray | memoryview, *, deadline: float | None = None) -> int | None:
        payload = self.get(key, deadline=deadline)
        if payload is None:
            return None
        view = codec.as_bytes(target)
        if len(view) < len(payload):
            raise ValueError(f"the payload has {len(payload)} bytes, the buffer {len(view)}")
        view[: len(payload)] = payload
        return len(payload)

    def lease(self, key: ChunkKey, *, deadline: float | None = None) -> Lease | None:
        return self._lease(key, None, deadline)

    def lease_of(self, key: ChunkKey, origin: Origin, *, deadline: float | None = None) -> Lease | None:
        """Implements `Promoting`: the chunk goes up also from a level that doesn't remember whose it is."""
        return self._lease(key, origin, deadline)

    def _lease(self, key: ChunkKey, origin: Origin | None, deadline: float | None) -> Lease | None:
        lease = self._find(key, origin, deadline)
        with self._lock:
            self._own.hits += lease is not None
            self._own.misses += lease is None
        return lease

    def contains(self, keys: Sequence[ChunkKey], *, deadline: float | None = None) -> int:
        self.store.expire()
        known = 0
        while known < len(keys) and self._has(keys[known]):
            known += 1
        rest = keys[known:]
        seconds = PROBE_SECONDS if deadline is None else min(deadline, PROBE_SECONDS)
        asked = (level for level in self.store.levels if rest and not level.options.is_indexed)
        return known + max((level.probe(rest, seconds) for level in asked), default=0)

    def delete(self, key: ChunkKey) -> bool:
        return self.store.delete(key)

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> int:
        """As `Tier.clear`; a chunk counts once for each level that had it."""
        return self.store.clear(namespace=namespace, tenant=tenant)

    def keys(self) -> Iterator[ChunkKey]:
        return self.store.keys()

    def flush(self) -> bool:
        """False as well where no level outlives the process."""
        return any(level.options.is_durable for level in self.store.levels) and self.store.flush()

    def close(self) -> None:
        self.store.close()

    @property
    def stats(self) -> TierStats:
        """Calls of this tier; evictions and faults are the sum over its levels."""
        with self._lock:
            own = self._own
            total = TierStats(hits=own.hits, misses=own.misses, puts=own.puts, refused=own.refused)
        for level in self.store.levels:
            stats, counts = level.tier.stats, level.counts
            total.evictions += stats.evictions
            total.expired += stats.expired + counts.expired
            total.corrupt += stats.corrupt
            total.errors += stats.errors + counts.errors
        return total

    @property
    def bytes_used(self) -> int:
        return sum(level.tier.bytes_used for level in self.store.levels)

    @property
    def capacity(self) -> int:
        return sum(level.tier.capacity for level in self.store.levels)

    def _has(self, key: ChunkKey) -> bool:
        if self.store.writes.find(key) is not None:
            return True
        return any(level.options.is_indexed and level.has(key) for level in self.store.levels)

    def _find(self, key: ChunkKey, origin: Origin | None, deadline: float | None) -> Lease | None:
        """From the first level that has it, in the time that there is for it."""
        self.store.expire()
        staged = self.store.writes.find(key)
        if staged is not None:
            return Lease(memoryview(staged))
        epoch = self.store.writes.epoch
        seconds = FETCH_SECONDS if deadline is None else min(deadline, FETCH_SECONDS)
        until = self.store.clock() + seconds
        for level in self.store.levels:
            options = level.options
            # To look into memory is to read it; elsewhere a look spares a read.
            if options.is_indexed and not options.is_immediate and not level.has(key):
                continue
            lease = level.lease(key, max(0.0, until - self.store.clock()), origin)
            if lease is not None:
                self._spread(level, key, lease.payload, origin, epoch)
                return lease
        return None

    def _spread_down(self, key: ChunkKey, parent: ChunkKey | None, tenant: str) -> None:
        """What was put into memory goes on from there: the caller's buffer may change."""
        first, *others = self.store.levels
        lease = first.tier.lease(key) if others and first.options.is_immediate else None
        if lease is not None:
            self.store.spread(first, Chunk(key, lease.payload, parent, tenant))

    def _spread(self, level: Level, key: ChunkKey, payload: memoryview, origin: Origin | None, epoch: int) -> None:
        """Only where the owner is known: a copy without it would outlive the tenant's purge."""
        if len(self.store.levels) == 1:
            return
        origin = level.origin(key) or origin
        if origin is not None:
            self.store.spread(level, Chunk(key, payload, *origin), epoch)

    def _count_put(self, kept: bool) -> None:
        with self._lock:
            self._own.puts += kept
            self._own.refused += not kept
