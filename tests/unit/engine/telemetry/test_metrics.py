"""/metrics of an engine on GPUs: families of the catalogue, bounded labels, and nothing where there is no GPU."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fake_nvml import FakeNvml
from prometheus_client import CollectorRegistry, Metric, disable_created_metrics
from prometheus_client.parser import text_string_to_metric_families

from paceline_api.metrics import BY_NAME, ENGINE, ENGINE_COMPAT, ENGINE_GPU
from paceline_engine.messages import CoreStats
from paceline_engine.metrics import EngineMetrics
from paceline_engine.native.build import find_compiler
from paceline_engine.server.admin import build_metrics_app
from paceline_engine.telemetry import watch as watch_module
from paceline_engine.telemetry.collector import GpuCollector
from paceline_engine.telemetry.nvml import open_gpus
from paceline_engine.telemetry.step_counters import BY_COUNTER, BY_GROUP_COUNTER, of_group
from paceline_engine.telemetry.watch import GpuWatch

GPU_LOST = 15


class Endpoint:
    """The metrics port of an engine, without the engine."""

    def __init__(self, gpus: tuple[int, ...]) -> None:
        disable_created_metrics()  # As the process does.
        registry = CollectorRegistry()
        self.metrics = EngineMetrics(registry, "m")
        watch = GpuWatch(open_gpus)
        registry.register(GpuCollector("m", lambda: watch.readings, self.metrics.device_counters))
        self._app = build_metrics_app(registry, watch.refresh)
        watch.start(gpus)

    def scrape(self) -> dict[str, Metric]:
        async def get() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://engine") as client:
                return await client.get("/metrics")

        response = asyncio.run(get())
        assert response.status_code == 200
        return {family.name: family for family in text_string_to_metric_families(response.text)}


def labels(family: Metric) -> list[dict[str, str]]:
    return [sample.labels for sample in family.samples]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scrape reads anew."""
    monkeypatch.setattr(watch_module, "MAX_AGE_SECONDS", 0.0)


def test_an_engine_without_a_gpu_has_no_gpu_series() -> None:
    endpoint = Endpoint(())
    endpoint.metrics.on_stats(CoreStats(device={"grammar_loaded": 1.0}))
    assert set(endpoint.scrape()) == {metric.name for metric in ENGINE + ENGINE_COMPAT}


def test_hand_offs_are_counted_by_outcome_and_open_leases_by_side() -> None:
    endpoint = Endpoint(())
    for count in (2, 5):
        endpoint.metrics.on_stats(CoreStats(handoffs={"decode lease": count}, kv_leases={"decode": count}))
    families = endpoint.scrape()
    (counted,) = [s for s in families["paceline_engine_kv_handoffs"].samples if s.name.endswith("_total")]
    (open_leases,) = families["paceline_engine_kv_leases"].samples
    assert (counted.labels["side"], counted.labels["outcome"], counted.value) == ("decode", "lease", 5.0)
    assert (open_leases.labels["side"], open_leases.value) == ("decode", 5.0)


@pytest.mark.native
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
@pytest.mark.usefixtures("eager")
def test_all_gpu_metrics_of_the_catalogue_are_exposed_with_its_types_and_labels(nvml: FakeNvml) -> None:
    nvml.has_cards(2)
    nvml.has_performance_monitoring(1)
    endpoint = Endpoint((0, 1))
    endpoint.scrape()
    nvml.xid(1, 48)
    counters = dict.fromkeys(BY_COUNTER, 2.0) | dict.fromkeys((of_group(name, "tp") for name in BY_GROUP_COUNTER), 3.0)
    endpoint.metrics.on_stats(CoreStats(device=counters))
    families = endpoint.scrape()
    assert set(families) == {metric.name for metric in ENGINE + ENGINE_COMPAT + ENGINE_GPU}
    for metric in ENGINE_GPU:
        family = families[metric.name]
        assert (family.type, family.documentation) == (metric.type.value, metric.help)
        assert all(set(sample) == set(metric.labels) for sample in labels(family)), metric.name
    assert [sample["gpu"] for sample in labels(families["paceline_engine_gpu_up"])] == ["0", "1"]
    info = labels(families["paceline_engine_gpu_info"])[1]
    assert (info["uuid"][:12], info["name"], info["gpu"]) == ("GPU-000000a1", "NVIDIA H200", "1")
    xid = families["paceline_engine_gpu_xid_errors"].samples
    assert [(sample.name, sample.labels["gpu"], sample.value) for sample in xid] == [
        ("paceline_engine_gpu_xid_errors_total", "0", 0), ("paceline_engine_gpu_xid_errors_total", "1", 1),
    ]  # fmt: skip
    collective = families["paceline_engine_gpu_collective_seconds"].samples[0]
    assert (collective.labels, collective.value) == ({"model_name": "m", "group": "tp"}, 3.0)
    assert families["paceline_engine_gpu_gap_seconds"].samples[0].value == 2.0


@pytest.mark.native
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
@pytest.mark.usefixtures("eager")
def test_series_stay_few_whatever_a_card_says(nvml: FakeNvml) -> None:
    endpoint = Endpoint((0,))
    endpoint.scrape()
    for code in range(200):
        nvml.xid(0, 10**9 + code)
    for _ in range(5):
        families = endpoint.scrape()
    of_gpus = [sample for name, family in families.items() if "_gpu_" in name for sample in family.samples]
    assert len(of_gpus) == 22
    assert {sample.labels["gpu"] for sample in of_gpus} == {"0"}


@pytest.mark.native
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
@pytest.mark.usefixtures("eager")
def test_a_lost_gpu_leaves_up_0_and_its_name(nvml: FakeNvml) -> None:
    endpoint = Endpoint((0,))
    assert endpoint.scrape()["paceline_engine_gpu_up"].samples[0].value == 1
    nvml.fail("*", GPU_LOST)
    families = endpoint.scrape()
    assert families["paceline_engine_gpu_up"].samples[0].value == 0
    assert {name for name in families if "_gpu_" in name} == {
        "paceline_engine_gpu_up", "paceline_engine_gpu_info", "paceline_engine_gpu_xid_errors",
    }  # fmt: skip


def test_every_counter_of_a_device_has_a_metric() -> None:
    for metric in (*BY_COUNTER.values(), *BY_GROUP_COUNTER.values()):
        assert BY_NAME[metric] in ENGINE_GPU
    assert all("group" in BY_NAME[metric].labels for metric in BY_GROUP_COUNTER.values())
