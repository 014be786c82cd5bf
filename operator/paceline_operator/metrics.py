"""The operator's instruments, created from the catalogue on a registry that is passed in."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline_api.metrics import BY_NAME


class OperatorMetrics:
    """One set of instruments a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str) -> Counter:
            metric = BY_NAME[name]
            return Counter(metric.name, metric.help, metric.labels, registry=registry)

        def gauge(name: str) -> Gauge:
            metric = BY_NAME[name]
            return Gauge(metric.name, metric.help, metric.labels, registry=registry)

        seconds = BY_NAME["paceline_operator_reconcile_seconds"]
        self._reconciles = counter("paceline_operator_reconciles")
        self._seconds = Histogram(
            seconds.name, seconds.help, seconds.labels, buckets=seconds.buckets, registry=registry
        )
        self._depth = gauge("paceline_operator_queue_depth")
        self._writes = counter("paceline_operator_writes")
        self._leader = gauge("paceline_operator_leader")
        self._ghosts = counter("paceline_operator_ghosts")

    def reconciled(self, kind: str, result: str, seconds: float) -> None:
        """`result` is ok or error."""
        self._reconciles.labels(kind, result).inc()
        self._seconds.labels(kind).observe(seconds)

    def wrote(self, verb: str, kind: str) -> None:
        self._writes.labels(verb, kind).inc()

    def ghosts(self, kind: str, count: int) -> None:
        self._ghosts.labels(kind).inc(count)

    def leads(self, leading: bool) -> None:
        self._leader.set(int(leading))

    def watch_depth(self, depth: Callable[[], float]) -> None:
        """`depth` is asked at every scrape."""
        self._depth.set_function(depth)
