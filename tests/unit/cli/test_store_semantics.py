"""The object store behaves as an API server where the product relies on it."""

import itertools
import threading
import time
from typing import Any

import pytest

from paceline_api.kube import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    INFERENCE_SERVICE,
    POD,
    SERVICE,
    Conflict,
    Expired,
    Invalid,
    KubeClient,
    KubeError,
)
from paceline_cli.local.store import EVENTS_MAX, ObjectStore


@pytest.fixture
def store() -> ObjectStore:
    return make_store()


def make_store(**options: Any) -> ObjectStore:
    ids, ticks = itertools.count(1), itertools.count()
    return ObjectStore(
        now=lambda: f"2026-01-01T00:00:{next(ticks) % 60:02d}Z",
        new_uid=lambda: f"uid-{next(ids)}",
        monotonic=time.monotonic,
        **options,
    )


def config(name: str, data: dict[str, str], **meta: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "ns", **meta},
        "data": data,
    }


def service(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    meta = {"name": name, "namespace": "ns"}
    return {"apiVersion": "paceline.dev/v1alpha1", "kind": "InferenceService", "metadata": meta, "spec": spec}


def pod(name: str, node: str = "n", **meta: Any) -> dict[str, Any]:
    spec = {"nodeName": node, "terminationGracePeriodSeconds": 7} if node else {}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "ns", **meta}, "spec": spec}


def owner(manifest: dict[str, Any]) -> dict[str, Any]:
    return {"kind": manifest["kind"], "name": manifest["metadata"]["name"], "uid": manifest["metadata"]["uid"]}


def test_it_is_a_kube_client(store: ObjectStore) -> None:
    client: KubeClient = store
    assert client.get(POD, "ns", "nope") is None


def test_applying_twice_writes_once(store: ObjectStore) -> None:
    first = store.apply(config("c", {"a": "1"}), field_manager="m")
    writes = store.writes.total()
    again = store.apply(config("c", {"a": "1"}), field_manager="m")
    assert again == first
    assert store.writes.total() == writes == 1
    assert store.list(CONFIG_MAP, "ns").resource_version == first["metadata"]["resourceVersion"]


def test_generation_counts_changes_of_intent_only(store: ObjectStore) -> None:
    store.apply(service("s", {"replicas": 1}), field_manager="m")
    labelled = service("s", {"replicas": 1})
    labelled["metadata"]["labels"] = {"a": "b"}
    assert store.apply(labelled, field_manager="m")["metadata"]["generation"] == 1
    status = service("s", {}) | {"status": {"readyReplicas": 1}}
    after = store.apply_status(status, field_manager="m")
    assert (after["metadata"]["generation"], after["spec"], after["status"]) == (
        1,
        {"replicas": 1},
        {"readyReplicas": 1},
    )
    changed = store.apply(service("s", {"replicas": 2}), field_manager="m")
    assert (changed["metadata"]["generation"], changed["status"]) == (2, {"readyReplicas": 1})


def test_status_is_ignored_by_main_writes_and_kept_by_them(store: ObjectStore) -> None:
    created = store.create(service("s", {}) | {"status": {"x": 1}})
    assert "status" not in created
    store.replace_status(created | {"status": {"x": 2}})
    assert store.replace(service("s", {"a": 1}))["status"] == {"x": 2}


def test_create_and_replace_refuse_what_a_server_refuses(store: ObjectStore) -> None:
    first = store.create(config("c", {"a": "1"}))
    with pytest.raises(Conflict, match="already exists"):
        store.create(config("c", {}))
    store.replace(config("c", {"a": "2"}))
    with pytest.raises(Conflict, match="resourceVersion"):
        store.replace(config("c", {"a": "3"}, resourceVersion=first["metadata"]["resourceVersion"]))
    with pytest.raises(KubeError, match="not found"):
        store.replace(config("nope", {}))
    with pytest.raises(Conflict, match="uid"):
        store.delete(CONFIG_MAP, "ns", "c", uid="other")
    with pytest.raises(Invalid, match=r"metadata\.name"):
        store.create(config("Not_A_Name", {}))
    with pytest.raises(KubeError, match="not found"):
        store.apply_status(service("nope", {}), field_manager="m")


def test_validation_names_the_object_and_keeps_the_old_one() -> None:
    def positive(manifest: dict[str, Any]) -> None:
        if manifest["spec"].get("replicas", 0) < 0:
            raise ValueError("spec.replicas: must be at least 0")

    store = make_store(validators={INFERENCE_SERVICE: positive})
    store.apply(service("s", {"replicas": 1}), field_manager="m")
    with pytest.raises(Invalid, match=r"InferenceService 's' is invalid: spec\.replicas"):
        store.apply(service("s", {"replicas": -1}), field_manager="m")
    found = store.get(INFERENCE_SERVICE, "ns", "s")
    assert found is not None
    assert found["spec"] == {"replicas": 1}


def test_a_deployment_selector_is_immutable_and_must_match(store: ObjectStore) -> None:
    def deployment(selector: str, label: str) -> dict[str, Any]:
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "d", "namespace": "ns"},
            "spec": {
                "selector": {"matchLabels": {"app": selector}},
                "template": {"metadata": {"labels": {"app": label}}, "spec": {}},
            },
        }

    with pytest.raises(Invalid, match="must match"):
        store.apply(deployment("a", "b"), field_manager="m")
    store.apply(deployment("a", "a"), field_manager="m")
    with pytest.raises(Invalid, match="immutable"):
        store.apply(deployment("b", "b"), field_manager="m")
    assert store.get(DEPLOYMENT, "ns", "d") is not None


def test_an_object_goes_with_the_last_of_its_owners(store: ObjectStore) -> None:
    one, two = (store.create(service(name, {})) for name in ("one", "two"))
    middle = store.create(config("middle", {}, ownerReferences=[owner(one), owner(two)]))
    store.create(config("leaf", {}, ownerReferences=[owner(middle)]))
    store.delete(INFERENCE_SERVICE, "ns", "one")
    left = store.get(CONFIG_MAP, "ns", "middle")
    assert left is not None
    assert [ref["name"] for ref in left["metadata"]["ownerReferences"]] == ["two"]
    store.delete(INFERENCE_SERVICE, "ns", "two")
    assert store.list(CONFIG_MAP, "ns").items == []


def test_an_object_whose_owner_is_gone_already_does_not_stay(store: ObjectStore) -> None:
    gone = store.create(service("gone", {}))
    store.delete(INFERENCE_SERVICE, "ns", "gone")
    store.apply(config("late", {}, ownerReferences=[owner(gone)]), field_manager="m")
    assert store.get(CONFIG_MAP, "ns", "late") is None


def test_a_bound_pod_waits_for_its_node_and_an_unbound_one_does_not(store: ObjectStore) -> None:
    parent = store.create(service("s", {}))
    store.create(pod("bound", ownerReferences=[owner(parent)]))
    store.create(pod("unbound", node=""))
    assert store.delete(POD, "ns", "unbound")
    assert store.get(POD, "ns", "unbound") is None
    store.delete(INFERENCE_SERVICE, "ns", "s")
    waiting = store.get(POD, "ns", "bound")
    assert waiting is not None
    assert waiting["metadata"]["deletionTimestamp"]
    assert waiting["metadata"]["deletionGracePeriodSeconds"] == 7
    store.replace_status(waiting | {"status": {"phase": "Succeeded"}})
    assert store.get(POD, "ns", "bound") is not None
    assert store.delete(POD, "ns", "bound", grace_s=0)
    assert store.get(POD, "ns", "bound") is None


def test_a_finalizer_holds_an_object_until_it_is_removed(store: ObjectStore) -> None:
    store.create(config("c", {}, finalizers=["x.dev/purge"]))
    assert store.delete(CONFIG_MAP, "ns", "c")
    held = store.get(CONFIG_MAP, "ns", "c")
    assert held is not None
    assert held["metadata"]["deletionTimestamp"]
    store.replace(config("c", {}))
    assert store.get(CONFIG_MAP, "ns", "c") is None


def test_selectors(store: ObjectStore) -> None:
    for name, labels in (("a", {"app": "x", "tier": "1"}), ("b", {"app": "x"}), ("c", {"app": "y"})):
        store.create(pod(name, node=name, labels=labels))

    def names(**selectors: str) -> str:
        return "".join(p["metadata"]["name"] for p in store.list(POD, None, **selectors).items)

    assert names(label_selector="app=x") == "ab"
    assert names(label_selector="app in (x, y),tier") == "a"
    assert names(label_selector="app!=x") == "c"
    assert names(label_selector="!tier,app notin (y)") == "b"
    assert names(field_selector="spec.nodeName=c") == "c"
    assert names(field_selector="metadata.name!=c") == "ab"
    with pytest.raises(Invalid, match="field selector"):
        names(field_selector="spec.image=x")


def test_a_watch_sees_objects_enter_and_leave_its_selector(store: ObjectStore) -> None:
    version = store.list(CONFIG_MAP, "ns").resource_version
    store.create(config("c", {}, labels={"on": "yes"}))
    store.replace(config("c", {"a": "1"}, labels={"on": "yes"}))
    store.replace(config("c", {}, labels={"on": "no"}))
    store.replace(config("c", {}, labels={"on": "yes"}))
    store.delete(CONFIG_MAP, "ns", "c")
    watch = store.watch(CONFIG_MAP, "ns", resource_version=version, label_selector="on=yes", timeout_s=0)
    events = list(watch)
    assert [e.type for e in events] == ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
    versions = [int(e.object["metadata"]["resourceVersion"]) for e in events]
    assert versions == sorted(set(versions))
    rest = store.watch(CONFIG_MAP, "ns", resource_version=str(versions[2]), label_selector="on=yes", timeout_s=0)
    assert [e.type for e in rest] == ["ADDED", "DELETED"]


def test_a_watch_that_fell_behind_must_list_again() -> None:
    store = make_store(history_max=10)
    version = store.create(config("c", {}))["metadata"]["resourceVersion"]
    for number in range(20):
        store.replace(config("c", {"n": str(number)}))
    with pytest.raises(Expired):
        list(store.watch(CONFIG_MAP, "ns", resource_version=version, timeout_s=0))


def test_a_waiting_watch_is_woken_by_a_write_and_ended_by_close(store: ObjectStore) -> None:
    seen: list[str] = []
    first = threading.Event()

    def follow() -> None:
        for event in store.watch(SERVICE, "ns", resource_version="0", timeout_s=30):
            seen.append(event.object["metadata"]["name"])
            first.set()

    thread = threading.Thread(target=follow)
    thread.start()
    meta = {"name": "web", "namespace": "ns"}
    store.create({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {}})
    assert first.wait(10)
    store.close()
    thread.join(10)
    assert not thread.is_alive()
    assert seen == ["web"]


def test_old_events_make_room_for_new_ones(store: ObjectStore) -> None:
    for number in range(EVENTS_MAX + 5):
        meta = {"name": f"e{number}", "namespace": "ns"}
        store.create({"apiVersion": "v1", "kind": "Event", "metadata": meta, "reason": "Scaled"})
    names = {item["metadata"]["name"] for item in store.list(EVENT, "ns").items}
    assert len(names) == EVENTS_MAX
    assert "e4" not in names
    assert f"e{EVENTS_MAX + 4}" in names


def test_what_a_caller_does_to_a_result_does_not_reach_the_store(store: ObjectStore) -> None:
    store.create(config("c", {"a": "1"}))
    found = store.get(CONFIG_MAP, "ns", "c")
    assert found is not None
    found["data"]["a"] = "changed"
    store.list(CONFIG_MAP, "ns").items[0]["data"]["a"] = "changed"
    again = store.get(CONFIG_MAP, "ns", "c")
    assert again is not None
    assert again["data"] == {"a": "1"}
