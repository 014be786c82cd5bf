"""Instruments made from the catalogue, and bounded label values."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline_api.metrics import Metric, MetricType

OVERFLOW = "other"
NONE = ""


class Instruments:
    """prometheus_client instruments of catalogue entries, by catalogue name. KeyError for a name that is not in it."""

    def __init__(self, registry: CollectorRegistry, metrics: Iterable[Metric]) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in metrics:
            match metric.type:
                case MetricType.COUNTER:
                    self._counters[metric.name] = Counter(metric.name, metric.help, metric.labels, registry=registry)
                case MetricType.GAUGE:
                    self._gauges[metric.name] = Gauge(metric.name, metric.help, metric.labels, registry=registry)
                case MetricType.HISTOGRAM:
                    self._histograms[metric.name] = Histogram(
                        metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets
                    )

    def counter(self, name: str) -> Counter:
        return self._counters[name]

    def gauge(self, name: str) -> Gauge:
        return self._gauges[name]

    def histogram(self, name: str) -> Histogram:
        return self._histograms[name]


class LabelCap:
    """Passes the first `limit` distinct values and calls the rest "other", so that a label cannot grow for ever."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def value(self, text: str) -> str:
        if text in self._known:
            return text
        if len(self._known) >= self._limit:
            return OVERFLOW
        self._known.add(text)
        return text
