"""What a store counts, as one snapshot that an engine or a node server turns into metrics. Must not do I/O itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paceline_kvstore.policy.reuse import Regret
from paceline_kvstore.tiered.level import READ_SECONDS_BUCKETS, Level
from paceline_kvstore.tiered.store import TieredStore
from paceline_kvstore.tiers.base import layer
from paceline_kvstore.tiers.guarded import GuardedTier


@dataclass(frozen=True, slots=True)
class LevelSnapshot:
    """One level. Counters are since the store was made; bytes are of payloads, except bytes_used and capacity.

    read_seconds_buckets: reads up to each of READ_SECONDS_BUCKETS, then all of them (cumulative). read_p95_s: of the
    latest reads; None before the first, and where reads cost no I/O. latency_s and bandwidth: as the choice between
    loading and computing takes them to be. breaker: state of a guarded tier's reads and writes, "" without one.
    """

    name: str
    bytes_used: int
    capacity: int
    hits: int
    misses: int
    late: int
    read_bytes: int
    read_seconds: float
    read_seconds_buckets: tuple[int, ...]
    read_p95_s: float | None
    latency_s: float
    bandwidth: float
    reads_queued: int
    writes: int
    written_bytes: int
    writes_queued: int
    write_queue_bytes: int
    dropped: int
    refused: int
    promoted: int
    demoted: int
    evictions: int
    expired: int
    corrupt: int
    errors: int
    probes: int
    probes_refused: int
    read_breaker: str
    write_breaker: str


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """All levels, first to last, with leases that are out and the regret of the choices that were recorded."""

    levels: tuple[LevelSnapshot, ...]
    leases: int
    lease_bytes: int
    staged: int
    regret: Regret

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


NOTHING = StoreSnapshot(levels=(), leases=0, lease_bytes=0, staged=0, regret=Regret())
"""Of a store that isn't there yet."""


def snapshot(store: TieredStore) -> StoreSnapshot:
    """The counts as they are now."""
    return StoreSnapshot(
        levels=tuple(map(snapshot_level, store.levels)),
        leases=store.leases.num,
        lease_bytes=store.leases.num_bytes,
        staged=len(store.writes),
        regret=store.regret,
    )


def snapshot_level(level: Level) -> LevelSnapshot:
    """One level's counts as they are now."""
    counts, stats, source = level.counts, level.tier.stats, level.source()
    guarded = layer(level.tier, GuardedTier)
    return LevelSnapshot(
        name=level.name,
        bytes_used=level.tier.bytes_used,
        capacity=level.tier.capacity,
        hits=counts.hits,
        misses=counts.misses,
        late=counts.late,
        read_bytes=counts.read_bytes,
        read_seconds=counts.read_seconds,
        read_seconds_buckets=_cumulative(level.read_buckets),
        read_p95_s=level.quantile_s(0.95),
        latency_s=source.latency_s,
        bandwidth=source.bandwidth,
        reads_queued=source.queued,
        writes=counts.writes,
        written_bytes=counts.written_bytes,
        writes_queued=level.writes.num_jobs,
        write_queue_bytes=level.writes.num_bytes,
        dropped=counts.dropped,
        refused=counts.refused,
        promoted=counts.promoted,
        demoted=counts.demoted,
        evictions=stats.evictions,
        expired=stats.expired + counts.expired,
        corrupt=stats.corrupt,
        errors=stats.errors + counts.errors,
        probes=counts.probes,
        probes_refused=counts.probes_refused,
        read_breaker=guarded.reads.state if guarded else "",
        write_breaker=guarded.writes.state if guarded else "",
    )


def _cumulative(buckets: tuple[int, ...]) -> tuple[int, ...]:
    sums: list[int] = []
    for count in buckets:
        sums.append(count + (sums[-1] if sums else 0))
    assert len(sums) == len(READ_SECONDS_BUCKETS) + 1
    return tuple(sums)
