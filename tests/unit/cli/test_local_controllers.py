"""The local controllers do what kube-controller-manager does: rollout order, bounds, status, EndpointSlices."""

import itertools
import time
from typing import Any

import pytest

from paceline_api.kube import DAEMON_SET, DEPLOYMENT, ENDPOINT_SLICE, POD, SERVICE
from paceline_cli.local.controllers.daemon_set import DaemonSetController
from paceline_cli.local.controllers.deployment import DeploymentController
from paceline_cli.local.controllers.endpoint_slice import EndpointSliceController
from paceline_cli.local.controllers.pods import condition, deletion_rank, is_active, is_ready
from paceline_cli.local.controllers.rollout import Bounds, bounds
from paceline_cli.local.controllers.scheduler import Scheduler
from paceline_cli.local.store import ObjectStore


class World:
    """A store, the controllers and a clock; pods become ready when a test says so."""

    def __init__(self) -> None:
        ids = itertools.count(1)
        self.seconds = 0
        self.store = ObjectStore(now=self.now, new_uid=lambda: f"uid-{next(ids)}", monotonic=time.monotonic)
        self.deployments = DeploymentController(self.store, now=self.now, new_suffix=lambda: f"{next(ids):05d}")
        self.daemon_sets = DaemonSetController(self.store, new_suffix=lambda: f"{next(ids):05d}")
        self.scheduler = Scheduler(self.store, "laptop", now=self.now)
        self.slices = EndpointSliceController(self.store)

    def now(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1_700_000_000 + self.seconds))

    def deploy(self, image: str = "v1", **spec: Any) -> dict[str, Any]:
        container = {"name": "c", "image": image, "ports": [{"name": "http", "containerPort": 8000}]}
        template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [container]}}
        manifest = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web", "namespace": "ns"},
            "spec": {"selector": {"matchLabels": {"app": "web"}}, "template": template, **spec},
        }
        return self.store.apply(manifest, field_manager="test")

    def settle(self) -> None:
        """Runs the controllers until they write nothing."""
        for _ in range(50):
            before = self.store.writes.total()
            for controller in (self.deployments, self.daemon_sets, self.scheduler, self.slices):
                controller.reconcile()
            if self.store.writes.total() == before:
                return
        raise AssertionError("the controllers do not come to rest")

    def pods(self, image: str = "") -> list[dict[str, Any]]:
        found = self.store.list(POD, "ns").items
        return [p for p in found if is_active(p) and image in ("", p["spec"]["containers"][0]["image"])]

    def set_ready(self, pod: dict[str, Any], ready: bool = True) -> None:
        name, status = pod["metadata"]["name"], "True" if ready else "False"
        current = self.store.get(POD, "ns", name)
        assert current is not None
        conditions = [{"type": "Ready", "status": status, "lastTransitionTime": self.now()}]
        self.store.replace_status(
            current | {"status": {"phase": "Running", "podIP": "127.0.0.1", "conditions": conditions}}
        )

    def end_deleted(self) -> None:
        """What the node does once a deleted pod's processes are gone."""
        for pod in self.store.list(POD, "ns").items:
            if pod["metadata"].get("deletionTimestamp"):
                self.store.delete(POD, "ns", pod["metadata"]["name"], grace_s=0)

    def deployment(self) -> dict[str, Any]:
        found = self.store.get(DEPLOYMENT, "ns", "web")
        assert found is not None
        return found


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(
    ("spec", "result"),
    [
        ({}, Bounds(1, 1, 0, False)),
        ({"replicas": 10}, Bounds(10, 3, 2, False)),
        (
            {"replicas": 3, "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}},
            Bounds(3, 0, 1, False),
        ),
        (
            {"replicas": 4, "strategy": {"rollingUpdate": {"maxSurge": 2, "maxUnavailable": "100%"}}},
            Bounds(4, 2, 4, False),
        ),
        ({"replicas": 2, "strategy": {"type": "Recreate"}}, Bounds(2, 0, 0, True)),
    ],
)
def test_bounds_round_as_kubernetes_does(spec: dict[str, Any], result: Bounds) -> None:
    assert bounds(spec) == result


def test_pods_are_created_bound_counted_and_the_status_is_that_of_a_real_controller(world: World) -> None:
    world.deploy(replicas=2)
    world.settle()
    pods = world.pods()
    assert [p["spec"]["nodeName"] for p in pods] == ["laptop", "laptop"]
    assert all(p["metadata"]["labels"]["pod-template-hash"] in p["metadata"]["name"] for p in pods)
    status = world.deployment()["status"]
    assert (status["replicas"], status["updatedReplicas"], status["unavailableReplicas"]) == (2, 2, 2)
    assert "readyReplicas" not in status
    assert condition(world.deployment(), "Available")["reason"] == "MinimumReplicasUnavailable"
    assert condition(world.deployment(), "Progressing")["reason"] == "ReplicaSetUpdated"
    for pod in pods:
        world.set_ready(pod)
    world.settle()
    status = world.deployment()["status"]
    assert (status["readyReplicas"], status["availableReplicas"], status["observedGeneration"]) == (2, 2, 1)
    assert condition(world.deployment(), "Available")["status"] == "True"
    assert condition(world.deployment(), "Progressing")["reason"] == "NewReplicaSetAvailable"


def test_a_rolling_update_never_leaves_its_bounds_and_finishes(world: World) -> None:
    strategy = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    world.deploy("v1", replicas=3, strategy=strategy)
    world.settle()
    for pod in world.pods():
        world.set_ready(pod)
    world.settle()
    world.deploy("v2", replicas=3, strategy=strategy)
    for _ in range(20):
        world.settle()
        assert len(world.pods()) <= 4
        assert sum(is_ready(p) for p in world.pods()) >= 3
        unready = [p for p in world.pods("v2") if not is_ready(p)]
        if not unready:
            break
        world.set_ready(unready[0])
        world.end_deleted()
    assert len(world.pods("v2")) == 3
    assert world.pods("v1") == []
    assert condition(world.deployment(), "Progressing")["reason"] == "NewReplicaSetAvailable"


def test_without_surge_one_goes_before_one_comes(world: World) -> None:
    strategy = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    world.deploy("v1", replicas=2, strategy=strategy)
    world.settle()
    for pod in world.pods():
        world.set_ready(pod)
    world.settle()
    world.deploy("v2", replicas=2, strategy=strategy)
    world.settle()
    assert (len(world.pods("v1")), len(world.pods("v2"))) == (1, 1)


def test_unready_old_pods_stay_while_the_new_ones_prove_nothing(world: World) -> None:
    """Only as many old pods may go as the new ones do not already lack (`maxScaledDown` of the real controller)."""
    strategy = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    world.deploy("v1", replicas=3, strategy=strategy)
    world.settle()
    world.deploy("v2", replicas=3, strategy=strategy)
    world.settle()
    assert (len(world.pods("v1")), len(world.pods("v2"))) == (3, 1)
    world.set_ready(world.pods("v2")[0])
    world.settle()
    assert (len(world.pods("v1")), len(world.pods("v2"))) == (2, 2)


def test_a_stuck_rollout_keeps_the_old_pods_and_reports_the_deadline(world: World) -> None:
    world.deploy("v1", replicas=1, progressDeadlineSeconds=60)
    world.settle()
    world.set_ready(world.pods()[0])
    world.settle()
    world.deploy("v2", replicas=1, progressDeadlineSeconds=60)
    world.settle()
    world.seconds += 61
    world.settle()
    assert (len(world.pods("v1")), len(world.pods("v2"))) == (1, 1)
    progressing = condition(world.deployment(), "Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "ProgressDeadlineExceeded")
    world.deploy("v1", replicas=1, progressDeadlineSeconds=60)
    world.settle()
    assert len(world.pods("v1")) == 1
    assert world.pods("v2") == []


def test_recreate_waits_for_the_last_old_pod(world: World) -> None:
    world.deploy("v1", strategy={"type": "Recreate"})
    world.settle()
    world.deploy("v2", strategy={"type": "Recreate"})
    world.settle()
    assert world.pods() == []
    world.end_deleted()
    world.settle()
    assert len(world.pods("v2")) == 1


def test_min_ready_seconds_delay_availability(world: World) -> None:
    world.deploy(minReadySeconds=10)
    world.settle()
    world.set_ready(world.pods()[0])
    world.settle()
    assert "availableReplicas" not in world.deployment()["status"]
    assert world.deployments.reconcile() == 10
    world.seconds += 10
    world.settle()
    assert world.deployment()["status"]["availableReplicas"] == 1


def test_scale_down_spares_ready_pods_and_obeys_the_deletion_cost(world: World) -> None:
    world.deploy(replicas=4)
    world.settle()
    a, b, c, _unready = world.pods()
    for pod, cost in ((a, "0"), (b, "-10"), (c, "5")):
        world.set_ready(pod)
        current = world.store.get(POD, "ns", pod["metadata"]["name"])
        assert current is not None
        current["metadata"]["annotations"] = {"controller.kubernetes.io/pod-deletion-cost": cost}
        world.store.replace(current)
    world.deploy(replicas=3)
    world.settle()
    assert {p["metadata"]["name"] for p in world.pods()} == {p["metadata"]["name"] for p in (a, b, c)}
    world.deploy(replicas=1)
    world.settle()
    assert [p["metadata"]["name"] for p in world.pods()] == [c["metadata"]["name"]]


def test_among_equals_the_youngest_goes_first() -> None:
    def pod(name: str, created: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "creationTimestamp": created}, "spec": {"nodeName": "n"}}

    old, young = pod("a", "2026-01-01T00:00:00Z"), pod("b", "2026-01-01T00:00:01Z")
    assert sorted([old, young], key=deletion_rank) == [young, old]


def test_a_deleted_or_evicted_pod_is_replaced(world: World) -> None:
    world.deploy()
    world.settle()
    (first,) = world.pods()
    world.store.delete(POD, "ns", first["metadata"]["name"])
    world.settle()
    (second,) = world.pods()
    assert second["metadata"]["name"] != first["metadata"]["name"]
    world.store.replace_status(second | {"status": {"phase": "Failed", "reason": "Evicted"}})
    world.settle()
    (third,) = world.pods()
    assert third["metadata"]["name"] != second["metadata"]["name"]


def test_deleting_the_deployment_deletes_its_pods(world: World) -> None:
    world.deploy(replicas=2)
    world.settle()
    world.store.delete(DEPLOYMENT, "ns", "web")
    world.end_deleted()
    world.settle()
    assert world.store.list(POD, "ns").items == []


def serve(world: World, **spec: Any) -> dict[str, Any]:
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    return world.store.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web", "namespace": "ns", "labels": {"team": "a"}},
            "spec": {"selector": {"app": "web"}, "ports": ports, **spec},
        },
        field_manager="test",
    )


def pod_on_port(world: World, name: str, port: int, *, ready: bool = True) -> None:
    containers = [{"name": "c", "ports": [{"name": "http", "containerPort": port}]}]
    meta = {"name": name, "namespace": "ns", "labels": {"app": "web"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"nodeName": "n", "containers": containers}}
    world.set_ready(world.store.create(pod), ready)


def slice_view(world: World) -> list[tuple[list[int], list[tuple[str, bool, bool, bool]]]]:
    found = []
    for item in world.store.list(ENDPOINT_SLICE, "ns", label_selector="kubernetes.io/service-name=web").items:
        endpoints = [
            (e["targetRef"]["name"], *(e["conditions"][k] for k in ("ready", "serving", "terminating")))
            for e in item["endpoints"]
        ]
        found.append(([p["port"] for p in item["ports"]], endpoints))
    return sorted(found)


def test_endpoint_slices_group_pods_by_their_real_ports(world: World) -> None:
    service = serve(world)
    world.settle()
    assert slice_view(world) == [([], [])]
    pod_on_port(world, "a", 20001)
    pod_on_port(world, "b", 20002, ready=False)
    pod_on_port(world, "c", 20001)
    world.settle()
    assert slice_view(world) == [
        ([20001], [("a", True, True, False), ("c", True, True, False)]),
        ([20002], [("b", False, False, False)]),
    ]
    item = world.store.list(ENDPOINT_SLICE, "ns").items[0]
    assert item["metadata"]["labels"]["team"] == "a"
    assert item["metadata"]["ownerReferences"][0]["uid"] == service["metadata"]["uid"]
    assert item["metadata"]["name"].startswith("web-")


def test_a_terminating_pod_is_listed_as_serving_but_not_ready(world: World) -> None:
    serve(world)
    pod_on_port(world, "a", 20001)
    world.settle()
    world.store.delete(POD, "ns", "a")
    world.settle()
    assert slice_view(world) == [([20001], [("a", False, True, True)])]
    world.end_deleted()
    world.settle()
    assert slice_view(world) == [([], [])]
    world.store.delete(SERVICE, "ns", "web")
    assert slice_view(world) == []


def test_not_ready_pods_are_published_where_the_service_asks_for_it(world: World) -> None:
    serve(world, publishNotReadyAddresses=True)
    pod_on_port(world, "a", 20001, ready=False)
    world.settle()
    assert slice_view(world) == [([20001], [("a", True, False, False)])]


def daemon_set(world: World, image: str = "v1") -> dict[str, Any]:
    template = {"metadata": {"labels": {"app": "kv"}}, "spec": {"containers": [{"name": "c", "image": image}]}}
    manifest = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "kv", "namespace": "ns"},
        "spec": {"selector": {"matchLabels": {"app": "kv"}}, "template": template},
    }
    return world.store.apply(manifest, field_manager="test")


def daemon_set_status(world: World) -> tuple[int, int, int]:
    found = world.store.get(DAEMON_SET, "ns", "kv")
    assert found is not None
    status = found["status"]
    assert status["observedGeneration"] == found["metadata"]["generation"]
    return status["desiredNumberScheduled"], status["updatedNumberScheduled"], status["numberReady"]


def test_a_daemon_set_has_one_pod_on_the_one_node_and_says_when_it_is_ready(world):
    daemon_set(world)
    world.settle()
    (pod,) = world.pods()
    assert pod["spec"]["nodeName"] == "laptop"
    assert daemon_set_status(world) == (1, 1, 0)
    world.set_ready(pod)
    world.settle()
    assert daemon_set_status(world) == (1, 1, 1)


def test_a_changed_daemon_set_ends_the_old_pod_before_the_new_one_comes(world):
    daemon_set(world)
    world.settle()
    world.set_ready(world.pods()[0])
    daemon_set(world, "v2")
    world.settle()
    assert world.pods() == []
    assert daemon_set_status(world) == (1, 0, 0)
    world.end_deleted()
    world.settle()
    assert len(world.pods("v2")) == 1
    world.set_ready(world.pods()[0])
    world.settle()
    assert daemon_set_status(world) == (1, 1, 1)


def test_a_deleted_daemon_set_takes_its_pod_along(world):
    daemon_set(world)
    world.settle()
    assert world.store.delete(DAEMON_SET, "ns", "kv")
    world.settle()
    world.end_deleted()
    world.settle()
    assert world.store.list(POD, "ns").items == []
