"""A whole operator over a fake cluster that has KVStores: what it makes, that it then rests, and what rolls."""

import base64
from copy import deepcopy

import pytest
from operator_samples import (
    NAMESPACE,
    config_hash,
    ready_status,
    service,
    store,
    tenant,
    wait_until,
)
from whole_operator import become_ready, settle

from paceline_api.kube import CONFIG_MAP, DAEMON_SET, DEPLOYMENT, INFERENCE_SERVICE, KV_STORE, SECRET, SERVICE

CHAT = service(kvStoreRef={"name": "shared"})
KEYS = {"keySecretRef": {"name": "kv-keys"}}


def secret(name: str, value: str, key: str = "keys") -> dict:
    metadata = {"name": name, "namespace": NAMESPACE, "uid": ""}
    data = {key: base64.b64encode(value.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


def store_is_ready(cluster, name="shared"):
    def ready() -> bool:
        cluster.run_deployments()
        return ready_status(cluster.get(KV_STORE, name)) == "True"

    wait_until(f"KVStore {name} is Ready", ready)


def reason_of(cluster, kind, name):
    conditions = (cluster.get(kind, name).get("status") or {}).get("conditions") or []
    return next((item["reason"] for item in conditions if item["type"] == "Ready"), None)


@pytest.mark.parametrize("first", ["store", "service"])
def test_a_store_on_nodes_serves_with_a_token_that_both_sides_mount_and_then_nothing_is_written(cluster, start, first):
    objects = [store(memory={"capacity": "1Gi"}, mode="node"), CHAT]
    for item in objects if first == "store" else reversed(objects):
        cluster.put(item)
    operator = start()
    store_is_ready(cluster)
    become_ready(cluster)
    settle(cluster, operator)
    assert cluster.get(SECRET, "shared-kv")["data"]["token"]
    assert cluster.get(SERVICE, "shared-kv")["spec"]["internalTrafficPolicy"] == "Local"
    assert cluster.get(KV_STORE, "shared")["status"]["readyNodes"] == 1
    writes = cluster.writes()
    cluster.put(objects[0])
    operator.resync()
    settle(cluster, operator)
    assert cluster.writes() == writes


def test_a_deleted_store_leaves_nothing_of_its_own(cluster, start):
    cluster.put(store(memory={"capacity": "1Gi"}, mode="node"))
    operator = start()
    store_is_ready(cluster)
    settle(cluster, operator)
    assert cluster.store.delete(KV_STORE, NAMESPACE, "shared")
    wait_until("everything is gone", lambda: cluster.everything() == [])


def test_a_servers_token_that_was_deleted_is_made_anew_and_both_sides_start_with_it(cluster, start):
    cluster.put(store(memory={"capacity": "1Gi"}, mode="node"))
    cluster.put(CHAT)
    operator = start()
    store_is_ready(cluster)
    become_ready(cluster)
    settle(cluster, operator)
    workloads = ((DAEMON_SET, "shared-kv"), (DEPLOYMENT, "chat-engine"))
    before = [config_hash(cluster.get(*item)) for item in workloads]
    cluster.store.delete(SECRET, NAMESPACE, "shared-kv")
    operator.resync()

    def both_roll() -> bool:
        # The store makes the Secret; whoever looked before it sees it with the store's next status.
        cluster.run_deployments()
        after = [config_hash(cluster.get(*item)) for item in workloads]
        return all(old != new for old, new in zip(before, after, strict=True))

    wait_until("both roll", both_roll)
    assert cluster.get(SECRET, "shared-kv")["data"]["token"]


def test_engines_wait_for_the_keys_that_the_store_names_and_roll_when_they_change(cluster, start, monkeypatch):
    monkeypatch.setattr("paceline_operator.planner.kv_store.RECHECK_S", 0.05)
    cluster.put(store(disk={"capacity": "1Gi"}, encryption=KEYS))
    cluster.put(CHAT)
    operator = start()
    wait_until("the service says why", lambda: reason_of(cluster, INFERENCE_SERVICE, "chat") == "SecretNotFound")
    wait_until("so does the store", lambda: reason_of(cluster, KV_STORE, "shared") == "SecretNotFound")
    assert "chat-engine" not in cluster.names(DEPLOYMENT)

    cluster.put(secret("kv-keys", "0" * 64))
    become_ready(cluster)
    settle(cluster, operator)
    before = config_hash(cluster.get(DEPLOYMENT, "chat-engine"))
    cluster.put(secret("kv-keys", "1" * 64 + "\n" + "0" * 64))
    operator.resync()
    wait_until("it rolls", lambda: config_hash(cluster.get(DEPLOYMENT, "chat-engine")) != before)


def test_a_changed_ttl_or_quota_rolls_the_engines_once_and_other_objects_roll_none(cluster, start):
    cluster.put(store(disk={"capacity": "1Gi"}))
    cluster.put(CHAT)
    operator = start()
    become_ready(cluster)
    settle(cluster, operator)
    before = cluster.get(DEPLOYMENT, "chat-engine")["metadata"]["generation"]
    cluster.put(tenant(services=["chat"]))
    settle(cluster, operator)
    assert cluster.get(DEPLOYMENT, "chat-engine")["metadata"]["generation"] == before
    cluster.put(tenant("other", kvQuota="500M"))
    wait_until("its quota is known", lambda: "500000000" in str(cluster.get(CONFIG_MAP, "chat-engine")["data"]))
    settle(cluster, operator)
    before += 1
    assert cluster.get(DEPLOYMENT, "chat-engine")["metadata"]["generation"] == before
    cluster.put(store(disk={"capacity": "1Gi"}, ttl="1h"))
    wait_until("it rolls", lambda: cluster.get(DEPLOYMENT, "chat-engine")["metadata"]["generation"] == before + 1)
    settle(cluster, operator)
    assert '"ttl": 3600' in str(cluster.get(CONFIG_MAP, "chat-engine")["data"])
    assert cluster.get(DEPLOYMENT, "chat-engine")["metadata"]["generation"] == before + 1


def test_a_childs_deletion_by_hand_is_noticed_and_undone(cluster, start):
    cluster.put(store(memory={"capacity": "1Gi"}, mode="node"))
    operator = start()
    store_is_ready(cluster)
    settle(cluster, operator)
    for kind in (DAEMON_SET, SERVICE):
        before = cluster.get(kind, "shared-kv")["metadata"]["uid"]
        cluster.store.delete(kind, NAMESPACE, "shared-kv")
        wait_until("it is back", lambda k=kind: "shared-kv" in cluster.names(k))
        assert cluster.get(kind, "shared-kv")["metadata"]["uid"] != before


def test_what_is_added_to_a_servers_pods_by_hand_is_taken_out(cluster, start):
    cluster.put(store(disk={"capacity": "1Gi"}, mode="node", node={"tolerations": [{"operator": "Exists"}]}))
    operator = start()
    store_is_ready(cluster)
    settle(cluster, operator)
    before = cluster.get(DAEMON_SET, "shared-kv")
    edited = deepcopy(before)
    pod = edited["spec"]["template"]["spec"]
    pod |= {"hostNetwork": True, "tolerations": []}
    pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    cluster.store.replace(edited)
    wanted = before["spec"]["template"]["spec"]
    wait_until("the pods are ours", lambda: cluster.get(DAEMON_SET, "shared-kv")["spec"]["template"]["spec"] == wanted)
    settle(cluster, operator)


def test_a_server_that_is_wanted_no_more_goes(cluster, start):
    cluster.put(store(memory={"capacity": "1Gi"}, mode="node"))
    operator = start()
    store_is_ready(cluster)
    cluster.put(store(memory={"capacity": "1Gi"}, mode="embedded"))
    wait_until("the server is gone", lambda: cluster.names(DAEMON_SET) == [])
    settle(cluster, operator)
    assert "shared-kv" not in cluster.names(SERVICE)
