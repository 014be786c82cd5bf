"""A store's snapshot as Prometheus families, made anew for each scrape. Needs prometheus-client, as its callers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from paceline_api.metrics import BY_NAME, KV_STORE, Metric, MetricType
from paceline_kvstore.breaker import State
from paceline_kvstore.metrics import LevelSnapshot, StoreSnapshot
from paceline_kvstore.tiered.level import READ_SECONDS_BUCKETS

Family = CounterMetricFamily | GaugeMetricFamily
_PREFIX = "paceline_kvstore_"
_OPEN = {State.CLOSED: 0.0, State.HALF_OPEN: 0.5, State.OPEN: 1.0}


class StoreCollector(Collector):
    """Metrics of KV_STORE, from what `snapshot` returns. Families without a sample are left out."""

    def __init__(self, snapshot: Callable[[], StoreSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family | HistogramMetricFamily]:
        taken = self._snapshot()
        yield _read_seconds(taken)
        families = {
            metric.name.removeprefix(_PREFIX): _family(metric)
            for metric in KV_STORE
            if metric.type is not MetricType.HISTOGRAM
        }
        for level in taken.levels:
            for name, value in _of_level(level).items():
                families[name].add_metric([level.name], value)
            for direction, state in (("read", level.read_breaker), ("write", level.write_breaker)):
                if state:
                    families["breaker_open"].add_metric([level.name, direction], _OPEN[State(state)])
        families["leases"].add_metric([], taken.leases)
        families["leased_bytes"].add_metric([], taken.lease_bytes)
        regret = taken.regret
        for choice, count, lost, won in (
            ("load", regret.loaded, regret.loaded_lost_s, regret.loaded_won_s),
            ("compute", regret.computed, regret.computed_lost_s, regret.computed_won_s),
        ):
            families["decisions"].add_metric([choice], count)
            families["regret_seconds"].add_metric([choice], lost)
            families["saved_seconds"].add_metric([choice], won)
        yield from (family for family in families.values() if family.samples)


def _of_level(level: LevelSnapshot) -> dict[str, float]:
    return {
        "used_bytes": level.bytes_used,
        "capacity_bytes": level.capacity,
        "hits": level.hits,
        "misses": level.misses,
        "late_reads": level.late,
        "read_bytes": level.read_bytes,
        "reads_queued": level.reads_queued,
        "writes": level.writes,
        "written_bytes": level.written_bytes,
        "write_queue_bytes": level.write_queue_bytes,
        "dropped_writes": level.dropped,
        "refused_writes": level.refused,
        "promotions": level.promoted,
        "demotions": level.demoted,
        "evictions": level.evictions,
        "expired": level.expired,
        "corrupt_chunks": level.corrupt,
        "errors": level.errors,
        "lookups": level.probes,
        "refused_lookups": level.probes_refused,
        "latency_seconds": level.latency_s,
        "bandwidth_bytes_per_second": level.bandwidth,
    }


def _read_seconds(taken: StoreSnapshot) -> HistogramMetricFamily:
    metric = BY_NAME[f"{_PREFIX}read_seconds"]
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [*map(str, READ_SECONDS_BUCKETS), "+Inf"]
    for level in taken.levels:
        pairs = list(zip(bounds, level.read_seconds_buckets, strict=True))
        family.add_metric([level.name], pairs, level.read_seconds)
    return family


def _family(metric: Metric) -> Family:
    make = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
    return make(metric.name, metric.help, labels=metric.labels)
