"""Engines of other software behind the router: what they are told, and that their own load counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_harness import TOKEN, Cluster, FakeEngine, RunningRouter, wait_until

from paceline_api.runtimes import RUNTIMES
from paceline_router.load import FRESH_S, ReportedLoad, total_of
from paceline_router.records import EndpointId, read_slice

ONE, TWO = EndpointId("a", "10.0.0.1", 8000), EndpointId("b", "10.0.0.2", 8000)
NAMES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def test_others_are_what_an_engine_reports_beyond_our_own() -> None:
    load = ReportedLoad()
    load.record(ONE, reported=7, own=5, now=10.0)
    load.record(TWO, reported=1, own=3, now=10.0)
    assert (load.others(ONE, 10.0), load.others(TWO, 10.0)) == (2, 0)
    assert load.others(ONE, 10.0 + FRESH_S + 0.1) == 0
    load.keep({TWO})
    assert load.others(ONE, 10.0) == 0


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ('vllm:num_requests_running{engine="0",model_name="a b"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0', 5),
        ('vllm:num_requests_running{m="x"} 3.0\nvllm:num_requests_running{m="y"} 4.0 1700000000', 7),
        ("# HELP vllm:num_requests_running Running\nvllm:num_requests_running 1", 1),
        ('vllm:num_requests_waiting_by_reason{r="x"} 9', None),
        ("vllm:num_requests_running NaN", None),
        ("vllm:num_requests_running\nvllm:num_requests_running{ broken", None),
        ("", None),
    ],
)
def test_the_load_is_read_from_prometheus_text(text: str, total: int | None) -> None:
    assert total_of(text.splitlines(), NAMES) == total


@given(st.text(max_size=200), st.text(alphabet='vllm:num_requests_running{}=" .0123456789-+eE\n', max_size=200))
def test_no_text_breaks_the_reader(free: str, near: str) -> None:
    for text in (free, near):
        total = total_of(text.splitlines(), NAMES)
        assert total is None or isinstance(total, int)


def test_every_load_source_names_gauges_that_the_mapping_has() -> None:
    for facts in RUNTIMES.values():
        if facts.load is not None:
            known = set(facts.metrics.values())
            assert set(facts.load.names) <= known | {name.removeprefix("vllm:") for name in known}


def test_a_slice_says_which_software_its_endpoints_run() -> None:
    labels = {"kubernetes.io/service-name": "chat-engine"}
    body = {"ports": [{"name": "http", "port": 8000}], "endpoints": [{"addresses": ["10.0.0.1"]}]}
    ours = read_slice({"metadata": {"labels": labels}, **body})
    theirs = read_slice({"metadata": {"labels": {**labels, "paceline.dev/runtime": "vllm"}}, **body})
    assert [one.endpoints[0].runtime for one in (ours, theirs)] == ["paceline", "vllm"]


def fleet(cluster: Cluster, start_router, runtime: str, *engines: FakeEngine) -> RunningRouter:
    cluster.service("chat")
    cluster.tenant("alice", "sk-alice")
    replicas = [engine.replica(f"engine-{index}", runtime=runtime) for index, engine in enumerate(engines)]
    cluster.endpoints("chat", *replicas)
    router = start_router()
    wait_until(lambda: len(router.process.discovery.snapshot.models["chat"].serving) == len(engines), "all known")
    return router


@pytest.mark.parametrize(("runtime", "token"), [("vllm", True), ("sglang", False), ("paceline", True)])
def test_private_headers_reach_our_own_engines_only(cluster, start_engine, start_router, runtime, token) -> None:
    engine = start_engine()
    router = fleet(cluster, start_router, runtime, engine)
    assert router.ask().status_code == 200
    headers = engine.seen[-1].headers
    assert headers.get("authorization") == (f"Bearer {TOKEN}" if token else None)
    assert any(name.startswith("x-paceline-") for name in headers) is (runtime == "paceline")
    assert "sk-alice" not in str(headers)


def test_the_least_loaded_engine_counts_what_other_routers_sent_there(cluster, start_engine, start_router) -> None:
    busy, idle = start_engine(), start_engine()
    busy.metrics = "vllm:num_requests_running 4\nvllm:num_requests_waiting 2\n"
    idle.metrics = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    router = fleet(cluster, start_router, "vllm", busy, idle)
    reported = router.process.proxy.reported
    known = wait_until(lambda: dict(reported._reports), "the engines were asked")
    assert {one.pod for one in known} <= {"engine-0", "engine-1"}
    wait_until(lambda: len(reported._reports) == 2, "both answered")
    for _ in range(6):
        assert router.ask().status_code == 200
    assert (len(busy.seen), len(idle.seen)) == (0, 6)


def test_engines_that_tell_nothing_are_shared_out_by_our_own_count(cluster, start_engine, start_router) -> None:
    engines = [start_engine(), start_engine()]
    router = fleet(cluster, start_router, "vllm", *engines)
    for _ in range(6):
        assert router.ask().status_code == 200
    assert [len(engine.seen) for engine in engines] == [3, 3]
