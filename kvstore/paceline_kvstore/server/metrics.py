"""The node server's instruments, made from the catalogue in an injected registry.

What the tier and the pins know themselves is read when somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline_api.metrics import KV_SERVER, Metric, MetricType
from paceline_kvstore.quarantine import Quarantine
from paceline_kvstore.server.buffers import BufferPool
from paceline_kvstore.server.store import NodeStore
from paceline_kvstore.wire.messages import Op, Reason

_LIVE = "paceline_kvserver_"
_STATS = ("hits", "misses", "puts", "refused", "evictions", "expired", "errors")
READ_AT_SCRAPE = (
    *(f"{_LIVE}tier_{name}" for name in _STATS), f"{_LIVE}corrupt_chunks", f"{_LIVE}tier_bytes",
    f"{_LIVE}tier_capacity_bytes", f"{_LIVE}pinned_chunks", f"{_LIVE}pinned_bytes", f"{_LIVE}receiving_bytes",
)  # fmt: skip


def _instrument(metric: Metric, registry: CollectorRegistry) -> Any:
    if metric.type is MetricType.COUNTER:
        return Counter(metric.name, metric.help, metric.labels, registry=registry)
    if metric.type is MetricType.GAUGE:
        return Gauge(metric.name, metric.help, metric.labels, registry=registry)
    return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


class ServerMetrics:
    """What connections count. Safe to call from several threads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        made = {metric.name: _instrument(metric, registry) for metric in KV_SERVER if metric.name not in READ_AT_SCRAPE}
        self._requests: Any = made[f"{_LIVE}requests"]
        # Looking children up by label takes longer than counting, and outcomes are few.
        self._outcomes: dict[tuple[Op, str], Any] = {}
        self._seconds: dict[Op, Any] = {
            op: made[f"{_LIVE}request_seconds"].labels(operation=op.name.lower()) for op in Op if op is not Op.HELLO
        }
        self._sent: Any = made[f"{_LIVE}payload_bytes"].labels(direction="sent")
        self._received: Any = made[f"{_LIVE}payload_bytes"].labels(direction="received")
        self._connections: Any = made[f"{_LIVE}connections"]
        self._closed: Any = made[f"{_LIVE}connections_closed"]

    def on_request(self, op: Op, outcome: str, seconds: float) -> None:
        """A request was answered, or its connection lost, that long after its first byte."""
        counter = self._outcomes.get((op, outcome))
        if counter is None:
            counter = self._requests.labels(operation=op.name.lower(), outcome=outcome)
            self._outcomes[op, outcome] = counter
        counter.inc()
        self._seconds[op].observe(seconds)

    def on_sent(self, num_bytes: int) -> None:
        """A chunk's payload went out."""
        self._sent.inc(num_bytes)

    def on_received(self, num_bytes: int) -> None:
        """A chunk's payload came in."""
        self._received.inc(num_bytes)

    def on_opened(self) -> None:
        """A client came."""
        self._connections.inc()

    def on_closed(self, reason: Reason | None) -> None:
        """A client left by itself (None), or was sent away."""
        self._connections.dec()
        self.on_refused(reason)

    def on_refused(self, reason: Reason | None) -> None:
        """A client left or wasn't let in."""
        self._closed.labels(reason="closed" if reason is None else reason.name.lower()).inc()


class StoreCollector(Collector):
    """The tier's counts, bytes and pins, as they are when somebody asks."""

    def __init__(self, store: NodeStore, buffers: BufferPool, quarantine: Quarantine) -> None:
        self._store = store
        self._buffers = buffers
        self._quarantine = quarantine
        self._about = {metric.name: metric for metric in KV_SERVER}

    def collect(self) -> Iterator[Any]:
        """One family for each name of READ_AT_SCRAPE."""
        store, stats, pinned = self._store, self._store.tier.stats, self._store.pinned
        corrupt = stats.corrupt + self._quarantine.total
        values = (
            *(getattr(stats, name) for name in _STATS), corrupt, store.tier.bytes_used, store.tier.capacity,
            pinned.count, pinned.num_bytes, self._buffers.bytes_used,
        )  # fmt: skip
        for name, value in zip(READ_AT_SCRAPE, values, strict=True):
            metric = self._about[name]
            family = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
            yield family(metric.name, metric.help, value=value)
