"""GPU readings and the device's sampled times as Prometheus families, made anew for each scrape.

A family without a sample is left out whole, so an engine without a GPU says nothing of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline_api.metrics import ENGINE_GPU, Metric, MetricType
from paceline_engine.telemetry.reading import Reading, Sample
from paceline_engine.telemetry.step_counters import BY_COUNTER, BY_GROUP_COUNTER, GROUP_SEPARATOR

Family = GaugeMetricFamily | CounterMetricFamily


class GpuCollector(Collector):
    """Metrics of ENGINE_GPU. counters: what the core's device counts, by name, as in `CoreStats.device`."""

    def __init__(
        self,
        model_name: str,
        readings: Callable[[], Sequence[Reading]],
        counters: Callable[[], Mapping[str, float]],
    ) -> None:
        self._model_name = model_name
        self._readings = readings
        self._counters = counters

    def collect(self) -> Iterator[Family]:
        """Families that have a sample, in the catalogue's order."""
        families = {metric.name: _family(metric) for metric in ENGINE_GPU}
        for reading in self._readings():
            gpu = (self._model_name, reading.gpu)
            families["paceline_engine_gpu_info"].add_metric([*gpu, reading.uuid, reading.name], 1)
            families["paceline_engine_gpu_up"].add_metric(gpu, float(reading.up))
            for sample in (*reading.values, *reading.counts):
                families[sample.name].add_metric([*gpu, *_own_label(sample)], sample.value)
        for name, value in self._counters().items():
            counter, _, group = name.partition(GROUP_SEPARATOR)
            metric = BY_GROUP_COUNTER.get(counter) if group else BY_COUNTER.get(counter)
            if metric is not None:
                families[metric].add_metric([self._model_name, group] if group else [self._model_name], value)
        return (family for family in families.values() if family.samples)


def _own_label(sample: Sample) -> tuple[str, ...]:
    return (sample.label,) if sample.label else ()


def _family(metric: Metric) -> Family:
    make = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
    return make(metric.name, metric.help, labels=metric.labels)
