"""The metric catalogue keeps to its own naming rules."""

from __future__ import annotations

from paceline_api.metrics import BY_NAME, CATALOGUE, MetricType


def test_names_are_unique_and_prefixed() -> None:
    assert len(BY_NAME) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.startswith(
            (
                "paceline_engine_",
                "paceline_router_",
                "paceline_operator_",
                "paceline_kvstore_",
                "paceline_kvserver_",
                "vllm:",
            )
        )


def test_total_is_left_to_the_exposition_and_units_are_spelled_out() -> None:
    for metric in CATALOGUE:
        assert not metric.name.endswith("_total"), metric.name
        if metric.unit and metric.name.startswith("paceline_"):
            assert metric.name.endswith(f"_{metric.unit}"), metric.name


def test_only_histograms_have_buckets_and_they_ascend() -> None:
    for metric in CATALOGUE:
        assert bool(metric.buckets) == (metric.type is MetricType.HISTOGRAM), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_tenant_is_a_label_of_the_router_only() -> None:
    histograms = [m for m in CATALOGUE if "tenant" in m.labels and m.type is MetricType.HISTOGRAM]
    assert len(histograms) == 2
    assert all(m.name.startswith("paceline_router_") for m in CATALOGUE if "tenant" in m.labels)
