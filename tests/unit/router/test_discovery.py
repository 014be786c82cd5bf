"""The router follows its namespace: keys, tenants, endpoints and models change under running traffic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from router_harness import DEADLINE_S, NAMESPACE, Cluster, FakeEngine, RunningRouter, wait_until

from paceline_api.kube import INFERENCE_SERVICE, SECRET, TENANT, Kind, KubeError
from paceline_router.discovery import Discovery

StartRouter = Callable[..., RunningRouter]


def becomes(router: RunningRouter, key: str | None, status: int, **body: object) -> None:
    wait_until(lambda: router.ask(key, **body).status_code == status, f"{key} gets {status}")


def test_a_revoked_key_is_refused_and_its_running_stream_goes_on(router, cluster: Cluster, engine: FakeEngine):
    engine.mode = "held"
    with router.streaming("sk-alice") as response:
        lines = response.iter_lines()
        next(lines)
        cluster.secret("alice-key", apiKey="sk-alice-2")
        wait_until(lambda: router.ask("sk-alice", model="none").status_code == 401, "the old key is refused")
        assert router.ask("sk-alice-2", model="none").status_code == 404
        engine.release()
        assert any("two" in line for line in lines)
    assert router.metric("paceline_router_auth_refusals_total", reason="unknown_key") >= 1


@pytest.mark.parametrize(("kind", "name"), [(TENANT, "alice"), (SECRET, "alice-key")])
def test_deleting_the_tenant_or_the_secret_revokes(router, cluster: Cluster, kind: Kind, name: str):
    cluster.delete(kind, name)
    becomes(router, "sk-alice", 401)


def test_a_new_tenant_and_a_second_key_work_within_seconds(router, cluster: Cluster):
    cluster.tenant("bob", "sk-bob")
    becomes(router, "sk-bob", 200)
    cluster.secret("bob-new", apiKey="sk-bob-new\n", other="sk-other")
    cluster.tenant("bob", apiKeySecretRefs=[{"name": "bob-key"}, {"name": "bob-new", "key": "other"}])
    becomes(router, "sk-other", 200)
    assert router.ask("sk-bob").status_code == 200
    assert router.ask("sk-bob-new").status_code == 401


def test_a_secret_that_comes_after_its_tenant_is_picked_up(router, cluster: Cluster, caplog):
    cluster.tenant("bob", apiKeySecretRefs=[{"name": "late"}])
    wait_until(lambda: "Secret late has no usable key apiKey" in caplog.text, "the gap is reported")
    cluster.secret("late", apiKey="sk-late")
    becomes(router, "sk-late", 200)


def test_a_key_of_two_tenants_is_refused_to_both(router, cluster: Cluster, caplog):
    cluster.tenant("bob", "sk-alice")
    becomes(router, "sk-alice", 401)
    assert "tenants alice, bob share an API key" in caplog.text
    assert "sk-alice" not in caplog.text
    cluster.delete(TENANT, "bob")
    becomes(router, "sk-alice", 200)


def test_a_tenant_sees_and_reaches_only_its_services(router, cluster: Cluster, engine: FakeEngine):
    cluster.service("other")
    cluster.endpoints("other", engine.replica("other-0"))
    cluster.tenant("bob", "sk-bob", services=["other"])
    becomes(router, "sk-bob", 200, model="other")
    refused = router.ask("sk-bob", model="chat")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert refused.json()["error"]["message"].endswith("there is: other")
    listed = router.client.get("/v1/models", headers={"authorization": "Bearer sk-bob"}).json()
    assert [model["id"] for model in listed["data"]] == ["other"]
    one = router.client.get("/v1/models/chat", headers={"authorization": "Bearer sk-bob"})
    assert one.status_code == 404
    assert router.client.get("/v1/models").status_code == 401


def test_a_model_is_asked_for_by_its_served_name(router, cluster: Cluster, engine: FakeEngine):
    cluster.service("chat", "org/llama:1")
    becomes(router, "sk-alice", 200, model="org/llama:1")
    assert router.ask(model="chat").status_code == 404
    found = router.client.get("/v1/models/org/llama:1", headers={"authorization": "Bearer sk-alice"})
    assert (found.json()["id"], found.json()["created"]) == ("org/llama:1", 1767225600)


def test_a_deleted_service_is_gone(router, cluster: Cluster):
    cluster.delete(INFERENCE_SERVICE, "chat")
    becomes(router, "sk-alice", 404)


def test_the_anonymous_tenant_comes_and_goes_with_the_router_object(router, cluster: Cluster):
    assert router.ask(None).status_code == 401
    cluster.tenant("guest")
    cluster.router(anonymousTenant="guest")
    becomes(router, None, 200)
    assert router.client.post("/v1/completions", headers={"x-forwarded-for": "1.2.3.4"}).status_code == 401
    assert router.metric(
        "paceline_router_requests_total", tenant="guest", model_name="chat", code="200"
    ) == 1  # fmt: skip
    cluster.router()
    becomes(router, None, 401)


def test_a_running_request_at_a_vanished_replica_stays_visible(router, cluster: Cluster, engine: FakeEngine):
    engine.mode = "held"
    with router.streaming() as response:
        lines = response.iter_lines()
        next(lines)
        cluster.endpoints("chat")
        wait_until(lambda: not router.process.discovery.snapshot.models["chat"].endpoints, "it is gone")
        (row,) = router.admin("/admin/endpoints").json()["endpoints"]
        assert (row["pod"], row["draining"], row["in_flight"]) == ("engine-0", True, 1)
        engine.release()
        assert any("two" in line for line in lines)


def test_the_admin_port_wants_the_internal_token(router):
    for path in ("/admin/endpoints", "/slo"):
        assert router.admin(path, None).status_code == 403
        assert router.admin(path, "guess").status_code == 403
        assert router.admin(path).json()["v"] == 1
    assert router.client.get("/admin/endpoints").status_code == 404, "never on the public port"


def test_slo_and_metrics_tell_of_the_requests(router):
    router.ask()
    router.ask("sk-wrong")
    summary = router.admin("/slo").json()["tenants"]["alice"]
    assert (summary["valid"], summary["good"], summary["attainment"]) == (1, 1, 1.0)
    page = httpx.get(router.metrics_url + "/metrics").text
    for line in (
        'paceline_router_requests_total{code="200",model_name="chat",tenant="alice"} 1.0',
        'paceline_router_slo_requests_total{model_name="chat",outcome="good",tenant="alice"} 1.0',
        'paceline_router_endpoints{model_name="chat",state="ready"} 1.0',
        'paceline_router_requests_in_flight{model_name="chat"} 0.0',
        'paceline_router_auth_refusals_total{reason="unknown_key"} 1.0',
    ):
        assert line in page
    assert "process_resident_memory_bytes" in page


def test_live_fails_when_a_watch_thread_is_dead(router, monkeypatch: pytest.MonkeyPatch):
    assert router.client.get("/health/live").status_code == 200
    monkeypatch.setattr(Discovery, "alive", False)
    assert router.client.get("/health/live").status_code == 503


class Flaky:
    """A cluster that answers nothing until told to."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.away = True

    def __getattr__(self, name: str) -> object:
        if self.away:
            raise KubeError(0, "ClusterUnreachable", "away")
        return getattr(self._inner, name)


def test_not_ready_until_the_lists_are_in_and_no_crash_without_a_cluster(cluster: Cluster, token_file: Path):
    cluster.tenant("alice", "sk-alice")
    flaky = Flaky(cluster.store)
    discovery = Discovery(flaky, NAMESPACE, "default", key_prefix=b"x").start()  # type: ignore[arg-type]
    try:
        assert not discovery.snapshot.complete
        assert discovery.alive
        flaky.away = False
        wait_until(lambda: discovery.snapshot.complete, "the lists are in", DEADLINE_S)
        assert len(discovery.snapshot.keys) == 1, "complete means the keys are in, too"
    finally:
        discovery.stop()
