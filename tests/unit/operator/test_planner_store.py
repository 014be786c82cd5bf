"""KVStores as the planner renders them: settings that the store itself accepts, volumes, servers on nodes, status."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_samples import (
    NAMESPACE,
    NOW,
    SETTINGS,
    applied,
    arguments,
    condition,
    config_hash,
    created,
    live,
    observed,
    rolled_out,
    service,
    store,
    tenant,
)

from paceline_api.names import KV_ADMIN_PORT, KV_DISK_VOLUME, KV_SETTINGS_DIR, KV_SETTINGS_KEY
from paceline_api.validation import parse
from paceline_kvstore.config import StoreSettings, parse_settings
from paceline_operator.planner.kv_settings import engine_references, held_by, quotas_of, store_references
from paceline_operator.planner.manifests import covers
from paceline_operator.planner.model import Delete, StoreObserved
from paceline_operator.planner.plan import plan

KEYS = {"name": "kv-keys"}
TOKEN = {"token": "hash"}
DISK = {"capacity": "10Gi"}
S3 = {"bucket": "fleet-kv", "endpoint": "https://s3.example", "credentialsSecretRef": {"name": "s3"}}
REFERRING = service(kvStoreRef={"name": "shared"})

sizes = st.sampled_from(["2M", "512Mi", "8Gi", "1T", "1048576"])
memories = st.fixed_dictionaries({"capacity": sizes})
claims = st.fixed_dictionaries(
    {},
    optional={
        "storageClassName": st.just("fast"),
        "accessModes": st.sampled_from([["ReadWriteOnce"], ["ReadWriteOncePod"]]),
        "resources": st.just({"requests": {"storage": "9T"}}),
    },
)
disks = st.one_of(
    st.fixed_dictionaries({"capacity": sizes}, optional={"path": st.sampled_from(["/var/lib/kv", "/mnt/a/b.c"])}),
    st.builds(lambda size, claim: {"capacity": size, "volumeClaimTemplate": {"spec": claim}}, sizes, claims),
)
buckets = st.fixed_dictionaries(
    {"bucket": st.from_regex(r"[a-z0-9][a-z0-9.-]{1,20}[a-z0-9]", fullmatch=True)},
    optional={
        "prefix": st.from_regex(r"[A-Za-z0-9_.=-]{1,9}(/[A-Za-z0-9_.=-]{1,9}){0,2}", fullmatch=True),
        "endpoint": st.sampled_from(["https://s3.example", "http://10.0.0.1:8333"]),
        "region": st.just("eu-1"),
        "storageClass": st.just("STANDARD_IA"),
        "capacity": sizes,
        "credentialsSecretRef": st.just({"name": "s3"}),
        "caConfigMapRef": st.sampled_from([{"name": "ca"}, {"name": "ca", "key": "root.pem"}]),
    },
)
nodes = st.fixed_dictionaries(
    {},
    optional={
        "port": st.integers(1024, 65535).filter(lambda port: port != KV_ADMIN_PORT),
        "memory": memories,
        "tokenSecretRef": st.just({"name": "own", "key": "t"}),
        "image": st.just("kv:2"),
        "nodeSelector": st.just({"gpu": "yes"}),
        "tolerations": st.just([{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]),
    },
)


def whole(spec: dict) -> dict:
    """The spec with what the API demands and without what it refuses."""
    on_nodes = spec.get("mode") in ("node", "both")
    if spec.get("mode") == "both" or not {"memory", "disk", "s3"} & set(spec):
        spec = {"memory": {"capacity": "1Gi"}} | spec
    refused = set() if on_nodes else {"node"}
    refused |= set() if {"disk", "s3"} & set(spec) else {"encryption", "encoding"}
    if on_nodes and spec.get("encoding") in ("int8", "fp8"):
        spec = {**spec, "encoding": "zstd"}
    return {key: value for key, value in spec.items() if key not in refused}


store_specs = st.fixed_dictionaries(
    {},
    optional={
        "memory": memories,
        "disk": disks,
        "s3": buckets,
        "mode": st.sampled_from(["embedded", "node", "both"]),
        "node": nodes,
        "ttl": st.sampled_from(["7d", "1h30m", "500ms"]),
        "encryption": st.just({"keySecretRef": KEYS}),
        "reuse": st.sampled_from([{"policy": "always"}, {"policy": "measured"}, {"policy": "never"}]),
        "tenantQuota": sizes,
        "encoding": st.sampled_from(["none", "zstd", "int8", "fp8"]),
    },
).map(whole)


def data_of(manifest: dict, *, rotated: str = "") -> dict[str, dict[str, str]]:
    """Everything that the store names is there; what is in the Secret `rotated` has another value."""
    return {
        item.label: dict.fromkeys(item.keys, "new" if item.name == rotated else "old")
        for item in (*store_references(manifest), *engine_references(manifest))
    }


def store_plan(manifest: dict, **fields):
    fields.setdefault("data", data_of(manifest))
    return plan(StoreObserved(manifest=manifest, new_token="s3cret", **fields), NOW, SETTINGS)


def engine_plan(manifest: dict, consumer: dict = REFERRING, **fields):
    fields.setdefault("store_data", data_of(manifest))
    return plan(observed(consumer, kv_store=manifest, **fields), NOW, SETTINGS)


def settings_of(children: dict) -> StoreSettings:
    return parse_settings(json.loads(next(iter(children["ConfigMap"]["data"].values()))))


def pod_of(workload: dict) -> dict:
    return workload["spec"]["template"]["spec"]


def mounts_of(workload: dict) -> dict[str, str]:
    mounts = pod_of(workload)["containers"][0]["volumeMounts"]
    return {mount["name"]: mount["mountPath"] for mount in mounts}


def reason(result) -> str:
    ready = condition(result, "Ready")
    assert ready is not None
    return ready["reason"]


def check_pod(workload: dict, found: StoreSettings) -> None:
    pod, mounts = pod_of(workload), mounts_of(workload)
    container = pod["containers"][0]
    assert not any("hostPath" in volume for volume in pod["volumes"])
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    assert len(set(mounts.values())) == len(mounts)
    named = [found.encryption_key_file, found.node and found.node.token_file, found.disk and found.disk.path]
    named += [found.s3.credentials_dir, found.s3.ca_file] if found.s3 else []
    for path in filter(None, named):
        assert any(Path(mount) in (path, *path.parents) for mount in mounts.values()), f"{path} is not mounted"
    writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable <= {"tmp", "model-cache", KV_DISK_VOLUME}
    assert "secretKeyRef" not in str(container) and "envFrom" not in container


@settings(max_examples=150, deadline=None)
@given(store_specs)
def test_every_rendered_document_is_one_that_the_store_accepts_with_what_it_names_mounted(spec):
    manifest = store(**spec)
    parse(manifest)
    engine = applied(engine_plan(manifest).actions)
    found = settings_of(engine)
    check_pod(engine["Deployment"], found)
    assert f"--kv-store-config={KV_SETTINGS_DIR}/{KV_SETTINGS_KEY}" in arguments(engine["Deployment"])
    on_nodes = spec.get("mode") in ("node", "both")
    assert (found.node is not None) == on_nodes
    assert (found.memory is not None) == ("memory" in spec and spec.get("mode") != "node")
    servers = applied(store_plan(manifest).actions)
    assert ("DaemonSet" in servers) == on_nodes
    tiers = settings_of(servers) if on_nodes else found
    if on_nodes:
        check_pod(servers["DaemonSet"], tiers)
        assert tiers.node is None
    assert (tiers.disk is not None, tiers.s3 is not None) == ("disk" in spec, "s3" in spec)
    assert (tiers.encryption_key_file is not None) == ("encryption" in spec)
    assert tiers.encoding == spec.get("encoding", "none")
    assert (tiers.ttl is not None, tiers.default_quota is not None) == ("ttl" in spec, "tenantQuota" in spec)


@settings(max_examples=50, deadline=None)
@given(store_specs)
def test_the_plan_of_a_store_is_idempotent(spec):
    manifest = store(**spec)
    parse(manifest)
    first = store_plan(manifest)
    children = live(applied(first.actions).values())
    status = {} if first.status is None else first.status["status"]
    again = store_plan({**manifest, "status": status}, children=children)
    assert again.actions == ()
    assert again.events == ()
    engines = live(applied(engine_plan(manifest).actions).values())
    assert engine_plan(manifest, children=engines).actions == ()


def test_sizes_are_whole_bytes():
    manifest = store(memory={"capacity": "8Gi"}, disk={"capacity": "2G"}, s3={**S3, "capacity": 5_000_000})
    found = settings_of(applied(engine_plan(manifest).actions))
    assert found.memory == 8 << 30
    assert found.disk and found.disk.capacity == 2 * 10**9
    assert found.s3 and found.s3.capacity == 5_000_000


def test_an_ephemeral_disk_is_an_empty_dir_with_room_to_spare_that_the_scheduler_knows_of():
    deployment = applied(engine_plan(store(disk={"capacity": "10Gi", "path": "/data/kv"})).actions)["Deployment"]
    volume = next(item for item in pod_of(deployment)["volumes"] if item["name"] == KV_DISK_VOLUME)
    limit = int(volume["emptyDir"]["sizeLimit"])
    assert limit >= (10 << 30) * 1.05
    assert mounts_of(deployment)[KV_DISK_VOLUME] == "/data/kv"
    assert pod_of(deployment)["containers"][0]["resources"]["requests"] == {"ephemeral-storage": str(limit)}


def test_a_claim_is_each_pods_own_so_that_replicas_can_have_it():
    claim = {"storageClassName": "fast", "resources": {"requests": {"storage": "20Gi"}}}
    manifest = store(disk={"capacity": "10Gi", "volumeClaimTemplate": {"spec": claim}})
    deployment = applied(engine_plan(manifest, service(kvStoreRef={"name": "shared"}, replicas=3)).actions)[
        "Deployment"
    ]
    volume = next(item for item in pod_of(deployment)["volumes"] if item["name"] == KV_DISK_VOLUME)
    spec = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert spec["accessModes"] == ["ReadWriteOnce"]
    assert spec["storageClassName"] == "fast"
    assert spec["resources"]["requests"]["storage"] == "20Gi"


def test_a_claim_too_small_for_the_capacity_is_named():
    claim = {"resources": {"requests": {"storage": "5Gi"}}}
    manifest = store(disk={"capacity": "10Gi", "volumeClaimTemplate": {"spec": claim}})
    bad = store_plan(manifest)
    assert reason(bad) == "InvalidSpec"
    assert "requests.storage: 5Gi is less than spec.disk.capacity, 10Gi" in condition(bad, "Ready")["message"]
    assert reason(engine_plan(manifest)) == "KVStoreInvalid"


@pytest.mark.parametrize(
    ("resources", "requests", "limits"),
    [
        (None, {"memory": str(1 << 30)}, None),
        ({"requests": {"memory": "2Gi", "cpu": "1"}}, {"memory": str(3 << 30), "cpu": "1"}, None),
        ({"limits": {"memory": "2Gi"}}, {"memory": str(3 << 30)}, {"memory": str(3 << 30)}),
        (
            {"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}},
            {"memory": str(2 << 30)},
            {"memory": str(3 << 30)},
        ),
    ],
    ids=["none", "requests", "limits", "both"],
)
def test_the_memory_tier_is_on_top_of_the_engines_own_memory(resources, requests, limits):
    consumer = service(kvStoreRef={"name": "shared"}, engine={"resources": resources} if resources else {})
    deployment = applied(engine_plan(store(memory={"capacity": "1Gi"}), consumer).actions)["Deployment"]
    found = pod_of(deployment)["containers"][0]["resources"]
    assert (found["requests"], found.get("limits")) == (requests, limits)


def test_preempted_requests_may_still_be_given_memory():
    consumer = service(kvStoreRef={"name": "shared"}, engine={"extraArgs": ["--kv-store-memory=1Gi"]})
    args = arguments(applied(engine_plan(store(), consumer).actions)["Deployment"])
    assert [item for item in args if item.startswith("--kv-store-memory")] == ["--kv-store-memory=1Gi"]


@pytest.mark.parametrize("flag", ["--kv-store-config=/x", "--kv-store-disk=/x"])
def test_the_settings_are_the_operators(flag):
    assert reason(engine_plan(store(), service(engine={"extraArgs": [flag]}))) == "InvalidSpec"


@pytest.mark.parametrize(
    ("before", "after", "engines_roll", "servers_roll"),
    [
        ({"disk": DISK}, {"disk": DISK, "ttl": "1h"}, True, False),
        ({"disk": DISK}, {"disk": DISK, "reuse": {"policy": "never"}}, True, False),
        ({"disk": DISK}, {"disk": DISK, "reuse": {"policy": "measured"}}, False, False),
        ({"memory": {"capacity": "1Gi"}, "mode": "node"}, {"memory": {"capacity": "2Gi"}, "mode": "node"}, False, True),
        (
            {"memory": {"capacity": "1Gi"}, "mode": "node"},
            {"memory": {"capacity": "1Gi"}, "mode": "node", "ttl": "1h"},
            False,
            True,
        ),
        (
            {"memory": {"capacity": "1Gi"}, "mode": "node"},
            {"memory": {"capacity": "1Gi"}, "mode": "node", "node": {"port": 9000}},
            True,
            True,
        ),
    ],
    ids=["ttl", "reuse", "the default", "a server's memory", "a server's ttl", "the port"],
)
def test_a_changed_setting_rolls_what_reads_it(before, after, engines_roll, servers_roll):
    old, new = store(**before), store(**after)
    engines = [applied(engine_plan(item).actions)["Deployment"] for item in (old, new)]
    assert (config_hash(engines[0]) != config_hash(engines[1])) == engines_roll
    if before.get("mode"):
        servers = [applied(store_plan(item).actions)["DaemonSet"] for item in (old, new)]
        assert (config_hash(servers[0]) != config_hash(servers[1])) == servers_roll


@pytest.mark.parametrize(
    ("spec", "engines_roll", "servers_roll"),
    [
        ({"disk": DISK}, True, False),
        ({"s3": {"bucket": "fleet-kv"}}, False, False),
        ({"memory": {"capacity": "1Gi"}, "mode": "node"}, False, True),
        ({"memory": {"capacity": "1Gi"}, "mode": "both"}, True, True),
    ],
    ids=["embedded", "S3 alone", "node", "both"],
)
def test_a_tenants_quota_is_known_where_there_is_memory_or_disk_to_bound(spec, engines_roll, servers_roll):
    manifest, quotas = (
        store(**spec),
        quotas_of([tenant("b", kvQuota="2Gi"), tenant("a", kvQuota=3_000_000), tenant("c")]),
    )
    before, after = (applied(engine_plan(manifest, quotas=q).actions) for q in ({}, quotas))
    assert (config_hash(before["Deployment"]) != config_hash(after["Deployment"])) == engines_roll
    found = settings_of(after)
    if "mode" in spec:
        servers = [applied(store_plan(manifest, quotas=q).actions) for q in ({}, quotas)]
        assert (config_hash(servers[0]["DaemonSet"]) != config_hash(servers[1]["DaemonSet"])) == servers_roll
        found = settings_of(servers[1])
    assert found.tenant_quotas == ({"a": 3_000_000, "b": 2 << 30} if engines_roll or servers_roll else {})


def documents(children: dict) -> tuple[str, set[str]]:
    """The key that the workload's pods mount, and all that are there."""
    workload = children.get("DaemonSet") or children["Deployment"]
    item = next(volume for volume in pod_of(workload)["volumes"] if volume["name"] == "kv-store-settings")
    return item["configMap"]["items"][0]["key"], set(children["ConfigMap"]["data"])


@pytest.mark.parametrize("planned", [engine_plan, store_plan], ids=["engines", "servers"])
def test_pods_find_the_settings_that_they_were_made_with_until_they_are_replaced(planned):
    both = {"mode": "both", "memory": {"capacity": "1Gi"}}
    children = applied(planned(store(**both)).actions)
    first, there = documents(children)
    assert there == {first}

    changed = store(**both | {"memory": {"capacity": "2Gi"}})
    kinds = children | applied(planned(changed, children=live(children.values())).actions)
    second, there = documents(kinds)
    assert (first != second, there) == (True, {first, second})
    # Their rollout hangs, and a third setting comes.
    third = store(**both | {"memory": {"capacity": "3Gi"}})
    kinds |= applied(planned(third, children=live(kinds.values())).actions)
    assert documents(kinds)[1] == {first, second, documents(kinds)[0]}
    assert not applied(planned(third, children=live(kinds.values())).actions)
    counts = dict.fromkeys(("observedGeneration", "desiredNumberScheduled", "updatedNumberScheduled"), 1)
    done = [item | {"status": counts} if item["kind"] == "DaemonSet" else item for item in live(kinds.values())]
    kinds |= applied(planned(third, children=rolled_out(done, 1)).actions)
    assert documents(kinds)[1] == {documents(kinds)[0]}


def test_engines_that_lose_their_store_keep_its_settings_until_they_are_replaced():
    children = applied(engine_plan(store(memory={"capacity": "1Gi"})).actions)
    key, _ = documents(children)
    without = plan(observed(service(), children=live(children.values())), NOW, SETTINGS)
    assert not [action for action in without.actions if isinstance(action, Delete)]
    children |= applied(without.actions)
    assert set(children["ConfigMap"]["data"]) == {key}
    done = plan(observed(service(), children=rolled_out(live(children.values()), 1)), NOW, SETTINGS)
    assert [action.kind.kind for action in done.actions if isinstance(action, Delete)] == ["ConfigMap"]


def test_a_tenant_that_is_going_or_not_valid_has_no_quota():
    going = tenant("going", kvQuota="2Gi")
    going["metadata"]["deletionTimestamp"] = "2024-01-01T00:00:00Z"
    assert quotas_of([going, tenant("broken", kvQuota="2Gi", surprise=1), tenant("a", kvQuota="2Gi")]) == {"a": 2 << 30}


@pytest.mark.parametrize(("secret", "rolls"), [("kv-keys", True), ("s3", False)])
def test_rotated_keys_roll_the_pods_and_credentials_are_read_again_without(secret, rolls):
    manifest = store(disk=DISK, s3=S3, encryption={"keySecretRef": KEYS})
    before = applied(engine_plan(manifest).actions)["Deployment"]
    after = applied(engine_plan(manifest, store_data=data_of(manifest, rotated=secret)).actions)["Deployment"]
    assert (config_hash(before) != config_hash(after)) == rolls


def test_what_a_secret_holds_is_known_by_a_hash_that_its_readers_alone_could_check():
    secret = {"metadata": {"uid": "u1"}, "data": {"a": "QQ==", "b": "", "c": "QQ=="}}
    held = held_by(secret)
    assert held is not None and set(held) == {"a", "c"}
    assert held["a"] != held["c"]
    assert held_by({**secret, "metadata": {"uid": "u2"}})["a"] != held["a"]
    assert held_by(None) is None


@pytest.mark.parametrize(
    ("data", "expected", "words"),
    [
        ({"Secret kv-keys": None}, "SecretNotFound", "spec.encryption.keySecretRef: there is no Secret kv-keys"),
        ({"Secret kv-keys": {"other": "x"}}, "SecretKeyNotFound", "Secret kv-keys has no key keys with a value"),
        ({"Secret s3": {"AWS_ACCESS_KEY_ID": "x"}}, "SecretKeyNotFound", "no key AWS_SECRET_ACCESS_KEY"),
        ({"ConfigMap ca": None}, "ConfigMapNotFound", "spec.s3.caConfigMapRef: there is no ConfigMap ca"),
    ],
)
def test_what_is_missing_is_said_at_the_store_and_the_service_and_no_engine_starts_or_changes(data, expected, words):
    manifest = store(disk=DISK, s3={**S3, "caConfigMapRef": {"name": "ca"}}, encryption={"keySecretRef": KEYS})
    held = data_of(manifest) | data
    result = store_plan(manifest, data=held)
    assert reason(result) == expected
    assert words in condition(result, "Ready")["message"]
    assert result.requeue_after_s
    waiting = engine_plan(manifest, store_data=held)
    assert (reason(waiting), waiting.actions) == (expected, ())
    message = condition(waiting, "Ready")["message"]
    assert message.startswith("KVStore shared: ") and words in message
    running = live(applied(engine_plan(manifest).actions).values())
    assert engine_plan(manifest, store_data=held, children=running).actions == ()


NODE = store(memory={"capacity": "4Gi"}, disk=DISK, mode="node")


def test_a_node_server_is_a_daemon_set_behind_a_service_of_its_own_node():
    children = applied(store_plan(NODE).actions)
    assert set(children) == {"ServiceAccount", "ConfigMap", "Service", "DaemonSet"}
    for child in children.values():
        assert child["metadata"]["name"] == "shared-kv"
        owner = child["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["name"], owner["controller"]) == ("KVStore", "shared", True)
    assert children["Service"]["spec"]["internalTrafficPolicy"] == "Local"
    assert children["Service"]["spec"]["selector"] == children["DaemonSet"]["spec"]["selector"]["matchLabels"]
    pod = pod_of(children["DaemonSet"])
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    container = pod["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {container[probe]["httpGet"]["port"] for probe in container if probe.endswith("Probe")} == {"admin"}
    assert int(container["resources"]["requests"]["memory"]) > 4 << 30


def test_engines_reach_their_nodes_server_by_name_with_its_token():
    deployment = applied(engine_plan(NODE).actions)
    found = settings_of(deployment)
    assert found.node is not None
    assert (str(found.node.address), found.memory, found.disk) == (f"tcp://shared-kv.{NAMESPACE}.svc:7460", None, None)
    servers = applied(store_plan(NODE).actions)
    secrets = [
        {volume["secret"]["secretName"] for volume in pod_of(pod)["volumes"] if volume["name"] == "kv-store-token"}
        for pod in (deployment["Deployment"], servers["DaemonSet"])
    ]
    assert secrets == [{"shared-kv"}, {"shared-kv"}]


def test_in_mode_both_engines_have_memory_of_their_own():
    manifest = store(memory={"capacity": "1Gi"}, mode="both", node={"memory": {"capacity": "64Gi"}}, disk=DISK)
    assert settings_of(applied(engine_plan(manifest).actions)).memory == 1 << 30
    assert settings_of(applied(store_plan(manifest).actions)).memory == 64 << 30


def test_the_token_is_made_once_and_before_anything_that_mounts_it():
    first = store_plan(NODE, data={"Secret shared-kv": None})
    assert applied(first.actions) == {}
    (secret,) = created(first.actions)
    assert base64.b64decode(secret["data"]["token"]) == b"s3cret"
    assert secret["metadata"]["ownerReferences"][0]["kind"] == "KVStore"
    assert first.requeue_after_s is not None and first.requeue_after_s < 1
    waiting = engine_plan(NODE, store_data={"Secret shared-kv": None})
    assert (reason(waiting), waiting.actions) == ("KVStoreTokenNotFound", ())
    assert "the operator makes it" in condition(waiting, "Ready")["message"]
    emptied = store_plan(NODE, data={"Secret shared-kv": {}})
    assert (reason(emptied), emptied.actions) == ("KVStoreTokenNotFound", ())
    assert "delete it, and it is made anew" in condition(emptied, "Ready")["message"]
    assert created(store_plan(NODE).actions) == []


def test_a_token_of_the_users_is_never_made():
    manifest = store(memory={"capacity": "1Gi"}, mode="node", node={"tokenSecretRef": {"name": "mine"}})
    waiting = store_plan(manifest, data={"Secret mine": None})
    assert (reason(waiting), waiting.actions) == ("SecretNotFound", ())
    assert "spec.node.tokenSecretRef" in condition(waiting, "Ready")["message"]


def rolled(children, *, nodes: int, ready: int, updated: int | None = None):
    counts = {"desiredNumberScheduled": nodes, "numberReady": ready, "observedGeneration": 1}
    status = counts | {"updatedNumberScheduled": ready if updated is None else updated}
    return tuple({**item, "status": status} if item["kind"] == "DaemonSet" else item for item in children)


def test_the_store_is_ready_when_the_server_of_every_node_is():
    children = live(applied(store_plan(NODE).actions).values())
    fresh = store_plan(NODE, children=children)
    assert reason(fresh) == "NodeServersStarting"
    some = store_plan(NODE, children=rolled(children, nodes=3, ready=2))
    assert (reason(some), condition(some, "Reconciling")["status"]) == ("RollingOut", "True")
    assert "2 of 3" in condition(some, "Ready")["message"]
    old_pods = store_plan(NODE, children=rolled(children, nodes=3, ready=3, updated=1))
    assert reason(old_pods) == "RollingOut"
    done = store_plan(NODE, children=rolled(children, nodes=3, ready=3))
    assert reason(done) == "Serving"
    assert done.status["status"]["readyNodes"] == 3
    assert done.status["status"]["address"] == f"tcp://shared-kv.{NAMESPACE}.svc:7460"
    assert reason(store_plan(NODE, children=rolled(children, nodes=0, ready=0))) == "NoNodes"


def test_servers_that_are_wanted_no_more_are_deleted():
    children = live(applied(store_plan(NODE).actions).values())
    embedded = store_plan(store(memory={"capacity": "4Gi"}), children=children)
    assert {action.kind.kind for action in embedded.actions if isinstance(action, Delete)} == {
        "ServiceAccount",
        "ConfigMap",
        "Service",
        "DaemonSet",
    }
    assert reason(embedded) == "Valid"


def test_a_refused_apply_is_a_condition_of_the_store():
    state = StoreObserved(manifest=NODE, data=data_of(NODE), errors=("DaemonSet shared-kv: Forbidden",))
    assert reason(plan(state, NOW, SETTINGS)) == "ApplyFailed"


def test_quantities_that_the_api_server_writes_its_own_way_are_no_difference():
    intent = {"volumes": [{"name": "a", "emptyDir": {"sizeLimit": "2000000000"}}]}
    assert covers({"volumes": [{"name": "a", "emptyDir": {"sizeLimit": "2G"}}]}, intent)
    assert not covers({"volumes": [{"name": "a", "emptyDir": {"sizeLimit": "3G"}}]}, intent)


def test_an_upgraded_operator_does_not_roll_servers():
    children = live(applied(store_plan(NODE).actions).values())
    state = StoreObserved(manifest=NODE, data=data_of(NODE), children=children)
    assert plan(state, NOW, replace(SETTINGS, image_kvstore="kvstore:2")).actions == ()
