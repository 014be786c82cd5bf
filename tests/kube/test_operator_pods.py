"""The operator with a node: from the base manifests and the example to a chat completion, and broken engines."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane, wait_until
from operator_process import (
    OPERATOR_USER,
    ROOT,
    WAIT_S,
    Cluster,
    InProcess,
    condition,
    example,
    install,
    service,
)

from paceline_api.kube import DEPLOYMENT, ENDPOINT_SLICE, EVENT, INFERENCE_SERVICE, KV_STORE, LEASE, POD, TENANT
from paceline_kube import OfficialKubeClient

pytestmark = pytest.mark.kube
# Two operators, a router and an engine that converts its model start on two cores.
READY_S = 110.0
FLEET = "paceline-default-router"
KEY = "sk-test-key"


@pytest.fixture
def cluster(node: Any, control_plane: ControlPlane, kubectl: Callable[..., str], namespace: str) -> Cluster:
    install(control_plane, kubectl)
    return Cluster(kubectl, OfficialKubeClient.connect(control_plane.kubeconfig), namespace)


@pytest.fixture
def installed(cluster: Cluster, node: Any) -> Iterator[Cluster]:
    """The operator as its manifests install it, in Pods, for every namespace; gone again after the test."""
    base = str(ROOT / "manifests" / "base")
    cluster.kubectl_anywhere("apply", "--server-side", "--kustomize", base)
    yield cluster
    system = ("--namespace", "paceline-system")
    for item in cluster.client.list(POD, "paceline-system").items:
        name = item["metadata"]["name"]
        sys.stderr.write(f"{name}:\n{node.log('paceline-system', name, 'operator')[-4000:]}")
    cluster.kubectl_anywhere(*system, "delete", "deployment", "paceline-operator", "--cascade=foreground")


@pytest.fixture
def operator(cluster: Cluster, control_plane: ControlPlane) -> Iterator[InProcess]:
    token = cluster.kubectl_anywhere("--namespace", "paceline-system", "create", "token", "paceline-operator").strip()
    kubeconfig: Path = control_plane.write_kubeconfig(f"operator-{cluster.namespace}", token)
    running = InProcess(kubeconfig, cluster.namespace).start()
    yield running
    running.stop()


def address(cluster: Cluster, name: str, port_name: str = "http") -> str:
    """host:port of a ready endpoint of a Service."""
    selector = f"kubernetes.io/service-name={name}"
    for item in cluster.client.list(ENDPOINT_SLICE, cluster.namespace, label_selector=selector).items:
        port = next((port["port"] for port in item.get("ports") or [] if port["name"] == port_name), None)
        for endpoint in item.get("endpoints") or []:
            if port is not None and endpoint["conditions"].get("ready"):
                return f"{endpoint['addresses'][0]}:{port}"
    return ""


def operators_ready(cluster: Cluster) -> bool:
    found = cluster.client.get(DEPLOYMENT, "paceline-system", "paceline-operator")
    return found is not None and found.get("status", {}).get("readyReplicas") == found["spec"]["replicas"]


def settle(plane: ControlPlane, namespace: str) -> None:
    """Until nothing was written in the namespace for 3 s."""
    mark, counts = plane.audit.mark(), []

    def quiet() -> bool:
        counts.append(len(plane.audit.writes(mark, namespace)))
        return len(counts) > 10 and counts[-10] == counts[-1]

    wait_until("nothing is written any more", quiet, timeout=WAIT_S, interval=0.3)


def chat(where: str, key: str | None) -> tuple[int, dict[str, Any]]:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"http://{where}/v1/chat/completions", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"{}")


@pytest.mark.timeout(300)
def test_the_base_and_the_example_answer_a_chat_with_an_api_key(
    installed: Cluster, control_plane: ControlPlane, record_property: Callable[[str, object], None]
):
    cluster = installed
    wait_until("the operators are ready", lambda: operators_ready(cluster), timeout=READY_S)
    cluster.kubectl("create", "secret", "generic", "team-key", f"--from-literal=apiKey={KEY}")
    team = {"apiVersion": "paceline.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": "team"}}
    objects = [*example(), {**team, "spec": {"apiKeySecretRefs": [{"name": "team-key"}]}}]
    started = time.monotonic()
    cluster.apply(*objects)
    cluster.wait_reason(INFERENCE_SERVICE, "smollm2", "Serving", timeout=READY_S)
    record_property("apply_to_ready_s", round(time.monotonic() - started, 1))
    status = cluster.get(INFERENCE_SERVICE, "smollm2")["status"]
    assert (status["replicas"], status["readyReplicas"]) == (1, 1)
    assert condition(cluster.get(TENANT, "team"))["status"] == "True"
    row = cluster.kubectl("get", "pisvc", "--no-headers").split()
    assert row[:6] == ["smollm2", "True", "Serving", "1", "1", "smollm2"]
    where = wait_until("the router has an endpoint", lambda: address(cluster, FLEET), timeout=WAIT_S)
    assert chat(where, None)[0] == 401, "only the router's own loopback address may go without a key"
    code, answer = chat(where, KEY)
    assert code == 200
    assert "Paris" in answer["choices"][0]["message"]["content"]
    settle(control_plane, cluster.namespace)
    mark = control_plane.audit.mark()
    cluster.apply(*objects)
    assert chat(where, KEY)[0] == 200
    settle(control_plane, cluster.namespace)
    own = [write for write in control_plane.audit.writes(mark, cluster.namespace) if write.user == OPERATOR_USER]
    assert [str(write) for write in own] == [], "a settled namespace was written to"
    lease = cluster.client.get(LEASE, "paceline-system", "paceline-operator")
    assert lease["spec"]["holderIdentity"].startswith("paceline-operator-")
    pods = cluster.client.list(POD, "paceline-system", label_selector="paceline.dev/component=operator").items
    assert [pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods] == [0, 0]


@pytest.mark.timeout(180)
def test_an_engine_that_cannot_start_says_why_in_the_condition_and_one_event(operator: InProcess, cluster: Cluster):
    cluster.apply(service(model={"source": "file:///no/such/model.gguf"}))
    ready = cluster.wait_reason(INFERENCE_SERVICE, "chat", "EnginesFailing", timeout=READY_S)
    assert ready["status"] == "False"
    assert "exit code 2" in ready["message"]
    assert "/no/such/model.gguf" in ready["message"]
    found = cluster.get(INFERENCE_SERVICE, "chat")
    assert condition(found, "ModelReady")["status"] == "False"
    assert condition(found, "Reconciling")["status"] == "True"

    def warnings() -> list[str]:
        events = cluster.client.list(EVENT, cluster.namespace).items
        about = [e for e in events if e["type"] == "Warning" and e["involvedObject"]["kind"] == "InferenceService"]
        return [event["reason"] for event in about]

    # The event is written after the status that the test has waited for.
    wait_until("the event is there", lambda: "EnginesFailing" in warnings())
    assert warnings().count("EnginesFailing") == 1


@pytest.mark.timeout(180)
def test_a_stores_server_runs_on_each_node_until_the_store_is_deleted(operator: InProcess, cluster: Cluster):
    store = {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "KVStore",
        "metadata": {"name": "shared"},
        "spec": {"mode": "node", "memory": {"capacity": "64Mi"}, "disk": {"capacity": "64Mi"}},
    }
    cluster.apply(store)
    cluster.wait_reason(KV_STORE, "shared", "Serving", timeout=READY_S)
    status = cluster.get(KV_STORE, "shared")["status"]
    assert status["nodes"] == status["readyNodes"] >= 1
    assert address(cluster, "shared-kv", "kv").endswith(":7460")
    cluster.kubectl("delete", "kvstore", "shared", "--timeout=10s")
    pods = "paceline.dev/kv-store=shared"
    wait_until(
        "its pods are gone",
        lambda: cluster.client.list(POD, cluster.namespace, label_selector=pods).items == [],
        timeout=READY_S,
    )
    cluster.wait_empty()


@pytest.mark.timeout(240)
def test_a_rollout_of_simulated_engines_keeps_one_ready_and_ends_ready(operator: InProcess, cluster: Cluster):
    engine = {"extraArgs": ["--device=simulated"]}
    cluster.apply(service(engine=engine))
    cluster.wait_reason(INFERENCE_SERVICE, "chat", "Serving", timeout=READY_S)
    lowest = [1]

    def rolled_out() -> bool:
        deployment = cluster.get(DEPLOYMENT, "chat-engine")
        lowest[0] = min(lowest[0], (deployment.get("status") or {}).get("readyReplicas", 0))
        found = cluster.get(INFERENCE_SERVICE, "chat")
        return cluster.observed_generation("chat") == 2 and condition(found)["reason"] == "Serving"

    cluster.apply(service(engine={**engine, "blockSize": 32}))
    wait_until("the new template is Ready", rolled_out, timeout=READY_S)
    assert lowest[0] == 1
    pods = cluster.client.list(DEPLOYMENT, cluster.namespace, label_selector="paceline.dev/role=engine").items
    assert "--block-size=32" in pods[0]["spec"]["template"]["spec"]["containers"][0]["args"]
