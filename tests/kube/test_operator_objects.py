"""The operator on the real API server: what it makes of the users' objects, and what it leaves alone.

Nodes of other tests are cordoned here: Deployments, garbage collection and field ownership are the cluster's own, Pods
stay pending.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane, wait_until
from operator_process import (
    EXAMPLE,
    OPERATOR_USER,
    WAIT_S,
    Cluster,
    InProcess,
    Process,
    condition,
    example,
    install,
    service,
)

from paceline_api.kube import (
    CONFIG_MAP,
    DAEMON_SET,
    DEPLOYMENT,
    INFERENCE_SERVICE,
    KV_STORE,
    ROLE,
    ROUTER,
    SERVICE,
    TENANT,
)
from paceline_kube import OfficialKubeClient

pytestmark = pytest.mark.kube
NewProcess = Callable[..., Process]


@pytest.fixture(autouse=True)
def no_node_takes_pods(kubectl: Callable[..., str]) -> Iterator[None]:
    nodes = kubectl("get", "nodes", "-o", "name").split()
    for node in nodes:
        kubectl("cordon", node)
    yield
    for node in nodes:
        kubectl("uncordon", node)


@pytest.fixture
def operator_kubeconfig(control_plane: ControlPlane, kubectl: Callable[..., str], namespace: str) -> Path:
    """Credentials of the operator's own ServiceAccount."""
    install(control_plane, kubectl)
    token = kubectl("--namespace", "paceline-system", "create", "token", "paceline-operator").strip()
    return control_plane.write_kubeconfig(f"operator-{namespace}", token)


@pytest.fixture
def cluster(control_plane: ControlPlane, kubectl: Callable[..., str], namespace: str) -> Cluster:
    return Cluster(kubectl, OfficialKubeClient.connect(control_plane.kubeconfig), namespace)


@pytest.fixture
def operator(operator_kubeconfig: Path, namespace: str) -> Iterator[InProcess]:
    """A running operator, kopf and all, in this process."""
    running = InProcess(operator_kubeconfig, namespace).start()
    yield running
    running.stop()


@pytest.fixture
def new_process(control_plane: ControlPlane, operator_kubeconfig: Path, namespace: str) -> Iterator[NewProcess]:
    """Makes operator processes; what still runs is killed after the test."""
    made: list[Process] = []

    def make(*arguments: str) -> Process:
        made.append(Process(control_plane, operator_kubeconfig, namespace, *arguments))
        return made[-1]

    yield make
    for process in made:
        process.kill()
        sys.stderr.write(process.log())  # Shown by pytest where a test failed.


ALL = [
    "Deployment/paceline-default-router",
    "Deployment/smollm2-engine",
    "Role/paceline-default-router",
    "RoleBinding/paceline-default-router",
    "Secret/paceline-internal",
    "Service/paceline-default-router",
    "Service/smollm2-engine",
    "ServiceAccount/paceline-default-router",
    "ServiceAccount/smollm2-engine",
]
FLEET = "paceline-default-router"


def test_the_example_becomes_its_children_and_then_nothing_is_written(new_process, control_plane, cluster):
    operator = new_process().start()
    cluster.apply(*example())
    cluster.wait_children(*ALL)
    for kind, name in ((INFERENCE_SERVICE, "smollm2"), (ROUTER, "default")):
        wait_until(f"{name} counts its pod", lambda k=kind, n=name: cluster.get(k, n)["status"]["replicas"] == 1)
    operator.settle()
    assert cluster.children() == ALL

    mark = control_plane.audit.mark()
    cluster.apply(*example())
    assert operator.stop() == 0
    operator.start()
    own = [write for write in control_plane.audit.writes(mark, cluster.namespace) if write.user == OPERATOR_USER]
    assert [str(write) for write in own] == [], "a settled namespace was written to"
    assert operator.metric("paceline_operator_reconciles_total", result="ok") >= 3
    assert operator.metric("paceline_operator_reconciles_total", result="error") == 0


def test_users_objects_get_no_finalizer_no_annotation_and_no_change_of_spec(operator, cluster):
    for item in example():
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(item))
    cluster.wait_children(*ALL)
    operator.settle()
    for sent, kind in zip(example(), (ROUTER, TENANT, INFERENCE_SERVICE), strict=True):
        found = cluster.get(kind, sent["metadata"]["name"])
        assert "finalizers" not in found["metadata"]
        assert "annotations" not in found["metadata"]
        assert found["spec"] == sent["spec"]
        assert found["metadata"]["generation"] == 1
        managers = {entry["manager"] for entry in found["metadata"]["managedFields"]}
        assert managers == {"kubectl-create", "paceline-operator-status"}


def test_kubectl_shows_useful_columns(operator, cluster):
    cluster.apply(*example())
    cluster.wait_reason(INFERENCE_SERVICE, "smollm2", "EnginesUnschedulable")
    header, row = cluster.kubectl("get", "pisvc").strip().splitlines()
    assert header.split() == ["NAME", "READY", "REASON", "REPLICAS", "DESIRED", "MODEL", "AGE"]
    assert row.split()[:6] == ["smollm2", "False", "EnginesUnschedulable", "0", "1", "smollm2"]
    wide = cluster.kubectl("get", "pisvc", "-o", "wide")
    assert f"http://{FLEET}.{cluster.namespace}.svc/v1" in wide
    assert cluster.kubectl("get", "ptenant", "laptop", "--no-headers").split()[:3] == ["laptop", "True", "Valid"]


def test_a_hand_edited_child_is_put_back(operator, cluster):
    cluster.apply(*example())
    cluster.wait_children(*ALL)
    cluster.kubectl("scale", "deployment/smollm2-engine", "--replicas=4")
    cluster.kubectl("set", "image", "deployment/smollm2-engine", "engine=evil:1")
    cluster.kubectl("delete", "service", "smollm2-engine")
    rule = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    patch = json.dumps([{"op": "add", "path": "/rules/-", "value": rule}])
    cluster.kubectl("patch", "role", FLEET, "--type=json", "-p", patch)

    def restored() -> bool:
        deployment = cluster.get(DEPLOYMENT, "smollm2-engine")
        image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
        same = (deployment["spec"]["replicas"], image) == (1, "paceline-engine:0.1.0")
        closed = "secrets" not in str(cluster.get(ROLE, FLEET)["rules"])
        return same and closed and cluster.get(SERVICE, "smollm2-engine") is not None

    wait_until("every edit is undone", restored, timeout=WAIT_S)


def test_what_is_added_to_a_child_by_hand_is_taken_out_and_then_nothing_is_written(operator, control_plane, cluster):
    cluster.apply(*example())
    cluster.wait_children(*ALL)
    operator.settle()
    kinds = (SERVICE, ROLE, DEPLOYMENT)
    before = {kind: cluster.get(kind, FLEET) for kind in kinds}
    cluster.kubectl("patch", "service", FLEET, "-p", '{"spec": {"selector": {"x": "y"}}}')
    rule = [{"op": "add", "path": "/rules/0/resourceNames", "value": ["one"]}]
    cluster.kubectl("patch", "role", FLEET, "--type=json", "-p", json.dumps(rule))
    miner = {"name": "miner", "image": "evil:1", "securityContext": {"privileged": True}}
    pod = {"hostNetwork": True, "hostPID": True, "nodeSelector": {"x": "y"}, "containers": [miner]}
    cluster.kubectl("patch", "deployment", FLEET, "-p", json.dumps({"spec": {"template": {"spec": pod}}}))

    def restored() -> bool:
        now = {kind: cluster.get(kind, FLEET) for kind in kinds}
        same = now[SERVICE]["spec"]["selector"] == before[SERVICE]["spec"]["selector"]
        same = same and now[ROLE]["rules"] == before[ROLE]["rules"]
        return same and now[DEPLOYMENT]["spec"]["template"] == before[DEPLOYMENT]["spec"]["template"]

    wait_until("every addition is gone", restored, timeout=WAIT_S)
    operator.settle()
    mark = control_plane.audit.mark()
    operator.operator.resync()
    operator.settle()
    own = [write for write in control_plane.audit.writes(mark, cluster.namespace) if write.user == OPERATOR_USER]
    assert [str(write) for write in own] == []


def test_a_child_without_our_label_gets_it_back(operator, cluster):
    cluster.apply(*example())
    cluster.wait_children(*ALL)
    operator.settle()
    cluster.kubectl("label", "deployment/smollm2-engine", "app.kubernetes.io/managed-by-")
    key = "app.kubernetes.io/managed-by"
    wait_until(
        "the label is back",
        lambda: key in cluster.get(DEPLOYMENT, "smollm2-engine")["metadata"]["labels"],
        timeout=WAIT_S,
    )
    cluster.kubectl("scale", "deployment/smollm2-engine", "--replicas=4")
    wait_until(
        "an edit after it is undone",
        lambda: cluster.get(DEPLOYMENT, "smollm2-engine")["spec"]["replicas"] == 1,
        timeout=WAIT_S,
    )


def test_a_deleted_token_is_made_anew_and_both_fleets_start_with_it(operator, cluster):
    cluster.apply(*example())
    cluster.wait_children(*ALL)
    operator.settle()
    before = cluster.generations()
    cluster.kubectl("delete", "secret", "paceline-internal")
    cluster.wait_children(*ALL)
    wait_until(
        "both fleets are rolled",
        lambda: all(cluster.generations()[name] == before[name] + 1 for name in before),
        timeout=WAIT_S,
    )
    operator.settle()


def test_a_secret_of_somebody_else_is_not_taken_over(operator, cluster):
    cluster.kubectl("create", "secret", "generic", "paceline-internal", "--from-literal=password=x")
    cluster.apply(service())
    ready = cluster.wait_reason(INFERENCE_SERVICE, "chat", "NameTaken")
    assert "Secret paceline-internal exists already" in ready["message"]
    secret = json.loads(cluster.kubectl("get", "secret", "paceline-internal", "-o", "json"))
    assert "ownerReferences" not in secret["metadata"]
    cluster.kubectl("delete", "secret", "paceline-internal")
    cluster.wait_children(f"Deployment/{FLEET}", "Deployment/chat-engine", "Secret/paceline-internal")


def test_deleting_a_router_object_leaves_the_gateway_of_running_services_up(operator, cluster):
    cluster.apply(*example())
    cluster.wait_children(*ALL)
    operator.settle()
    uids = {kind: cluster.get(kind, FLEET)["metadata"]["uid"] for kind in (DEPLOYMENT, SERVICE)}
    cluster.kubectl("delete", "router", "default", "--timeout=10s")

    def handed_over() -> bool:
        owners = cluster.get(DEPLOYMENT, FLEET)["metadata"]["ownerReferences"]
        return [owner["kind"] for owner in owners] == ["InferenceService"]

    wait_until("the service owns the fleet", handed_over, timeout=WAIT_S)
    operator.settle()
    assert {kind: cluster.get(kind, FLEET)["metadata"]["uid"] for kind in uids} == uids


def test_deleting_the_objects_removes_everything(operator, cluster):
    cluster.apply(*example())
    cluster.wait_children(*ALL)
    cluster.kubectl("delete", "-f", str(EXAMPLE))
    cluster.wait_empty()
    operator.settle()
    assert cluster.children() == []


def test_an_operator_that_dies_half_way_through_a_creation_is_followed_by_one_that_finishes(new_process, cluster):
    operator = new_process().start()
    cluster.apply(*example())
    wait_until("the first child is there", cluster.children, timeout=WAIT_S, interval=0.0)
    operator.kill()
    operator.start()
    cluster.wait_children(*ALL)


def test_deletion_needs_no_operator_and_a_new_one_leaves_nothing_behind(operator, operator_kubeconfig, cluster):
    cluster.apply(*example())
    cluster.wait_children(*ALL)
    operator.stop()
    cluster.kubectl("delete", "inferenceservice", "smollm2", "--timeout=10s")
    second = InProcess(operator_kubeconfig, cluster.namespace).start()
    try:
        wait_until("the engine is gone", lambda: "smollm2" not in str(cluster.children()), timeout=WAIT_S)
        second.settle()
        assert f"Deployment/{FLEET}" in cluster.children(), "the Router object still wants its fleet"
        cluster.kubectl("delete", "router", "default", "--timeout=10s")
        cluster.wait_empty()
    finally:
        second.stop()


def test_names_of_63_characters(operator, cluster):
    long = "m" * 62
    other = service(long + "b", model={"source": "file:///m", "servedName": "b"})
    cluster.apply(service(long + "a"), other)

    def complete() -> bool:
        named = [name for name in cluster.children() if "/mmm" in name]
        return len(named) == 6 and all(condition(cluster.get(INFERENCE_SERVICE, long + end)) for end in "ab")

    wait_until("both have their children and say how they are", complete, timeout=WAIT_S)
    cluster.kubectl("delete", "inferenceservices", "--all")
    cluster.wait_empty()


@pytest.mark.parametrize(
    ("change", "rolled"),
    [
        ({"slo": {"ttft": "1s"}}, set()),
        ({"routing": {"policy": "roundRobin"}}, set()),
        ({"model": {"source": "file:///m", "servedName": "other"}}, {"chat-engine"}),
        ({"engine": {"blockSize": 32}}, {"chat-engine"}),
    ],
    ids=["slo", "routing", "servedName", "blockSize"],
)
def test_a_changed_field_rolls_only_what_it_must(operator, cluster, change: dict[str, Any], rolled):
    cluster.apply(service())
    cluster.wait_children(f"Deployment/{FLEET}", "Deployment/chat-engine")
    operator.settle()
    before = cluster.generations()
    cluster.apply(service(**change))
    wait_until("the new generation is observed", lambda: cluster.observed_generation("chat") == 2, timeout=WAIT_S)
    operator.settle()
    after = cluster.generations()
    assert {name for name in after if after[name] != before[name]} == rolled


def test_an_invalid_change_is_refused_naming_the_field_and_leaves_the_engines_alone(operator, cluster):
    cluster.apply(service())
    cluster.wait_children("Deployment/chat-engine")
    operator.settle()
    before = cluster.generations()
    with pytest.raises(AssertionError, match=r"spec\.engine\.blockSize"):
        cluster.apply(service(engine={"blockSize": 0}))
    with pytest.raises(AssertionError, match=r"spec\.model\.source.*pvc://CLAIM/PATH"):
        cluster.apply(service(model={"source": "pvc://claim"}))
    with pytest.raises(AssertionError, match=r"spec\.model\.revision.*belongs to an hf:// source"):
        cluster.apply(service(model={"source": "file:///m.gguf", "revision": "main"}))
    # What the schema cannot say, the operator says in the condition.
    cluster.apply(service(engine={"extraArgs": ["--port=1"]}))
    ready = cluster.wait_reason(INFERENCE_SERVICE, "chat", "InvalidSpec")
    assert "spec.engine.extraArgs[0]: --port is set by the operator" in ready["message"]
    assert condition(cluster.get(INFERENCE_SERVICE, "chat"), "Stalled")["status"] == "True"
    assert cluster.generations() == before


def test_scale_reaches_the_engines_and_the_second_replica_a_disruption_budget(operator, cluster):
    cluster.apply(service(replicas=1))
    cluster.wait_children("Deployment/chat-engine")
    operator.settle()
    selector = cluster.get(INFERENCE_SERVICE, "chat")["status"]["selector"]
    assert selector == "paceline.dev/inference-service=chat,paceline.dev/role=engine"
    cluster.kubectl("scale", "pisvc/chat", "--replicas=2")
    cluster.wait_children("PodDisruptionBudget/chat-engine")
    wait_until("it scales", lambda: cluster.get(DEPLOYMENT, "chat-engine")["spec"]["replicas"] == 2, timeout=WAIT_S)
    cluster.kubectl("scale", "pisvc/chat", "--replicas=1")
    wait_until("the budget is gone", lambda: "PodDisruptionBudget" not in str(cluster.children()), timeout=WAIT_S)


def test_the_routers_rights_follow_the_tenants(operator, cluster):
    cluster.apply(*example())
    cluster.wait_children(*ALL)
    router = f"--as=system:serviceaccount:{cluster.namespace}:{FLEET}"

    def allowed(*what: str) -> bool:
        try:
            return cluster.kubectl("auth", "can-i", *what, router).strip() == "yes"
        except AssertionError:
            return False

    assert allowed("list", "tenants.paceline.dev")
    assert not allowed("get", "secret/key")
    tenant = {"apiVersion": "paceline.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": "team"}}
    cluster.apply({**tenant, "spec": {"apiKeySecretRefs": [{"name": "key"}]}})
    cluster.wait_reason(TENANT, "team", "SecretNotFound")
    wait_until("the role names the Secret", lambda: allowed("watch", "secret/key"), timeout=WAIT_S)
    assert allowed("get", "secret/key")
    assert not allowed("get", "secret/another")
    assert not allowed("list", "secrets")
    cluster.kubectl("create", "secret", "generic", "key", "--from-literal=apiKey=s3cret")
    cluster.wait_reason(TENANT, "team", "Valid")


def kv_store(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "paceline.dev/v1alpha1", "kind": "KVStore", "metadata": {"name": "shared"}, "spec": spec}


# No node has the label, so that no pod is made: what pods do is another test's.
ON_NODES = {"mode": "node", "memory": {"capacity": "1Gi"}, "node": {"nodeSelector": {"nowhere": "true"}}}
STORE_CHILDREN = ["DaemonSet/shared-kv", "Secret/shared-kv", "Service/shared-kv", "ServiceAccount/shared-kv"]
CLAIM = {"spec": {"storageClassName": "fast", "resources": {"requests": {"storage": "2000000000"}}}}


def test_a_store_and_its_service_become_their_children_and_then_nothing_is_written(operator, control_plane, cluster):
    disk = {"capacity": "1Gi", "volumeClaimTemplate": CLAIM}
    objects = [kv_store(**ON_NODES, disk=disk), service(kvStoreRef={"name": "shared"})]
    cluster.apply(*objects)
    cluster.wait_children(*STORE_CHILDREN, "ConfigMap/shared-kv", "ConfigMap/chat-engine", "Deployment/chat-engine")
    cluster.wait_reason(KV_STORE, "shared", "NoNodes")
    operator.settle()
    settings = json.loads(next(iter(cluster.get(CONFIG_MAP, "chat-engine")["data"].values())))
    assert settings["node"]["address"] == f"tcp://shared-kv.{cluster.namespace}.svc:7460"
    assert cluster.get(SERVICE, "shared-kv")["spec"]["internalTrafficPolicy"] == "Local"

    mark = control_plane.audit.mark()
    cluster.apply(*objects)
    operator.operator.resync()
    operator.settle()
    own = [write for write in control_plane.audit.writes(mark, cluster.namespace) if write.user == OPERATOR_USER]
    assert [str(write) for write in own] == [], "a settled namespace was written to"

    # What pods would be refused for, were there a node: their rights.
    cluster.kubectl_anywhere("label", "namespace", cluster.namespace, "pod-security.kubernetes.io/enforce=restricted")
    template = cluster.get(DAEMON_SET, "shared-kv")["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template["metadata"], "name": "trial"}}
    cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


def test_a_changed_ttl_rolls_the_engines_that_read_it(operator, cluster):
    cluster.apply(kv_store(disk={"capacity": "1Gi"}), service(kvStoreRef={"name": "shared"}))
    cluster.wait_children("Deployment/chat-engine", f"Deployment/{FLEET}")
    operator.settle()
    before = cluster.generations()
    cluster.apply(kv_store(disk={"capacity": "1Gi"}, ttl="1h"))
    wait_until("it rolls", lambda: cluster.generations()["chat-engine"] == before["chat-engine"] + 1, timeout=WAIT_S)
    operator.settle()
    assert cluster.generations() == before | {"chat-engine": before["chat-engine"] + 1}
    assert '"ttl": 3600' in str(cluster.get(CONFIG_MAP, "chat-engine")["data"])


def test_engines_wait_for_the_secrets_that_a_store_names(operator, cluster):
    s3 = {"bucket": "fleet-kv", "credentialsSecretRef": {"name": "s3"}}
    cluster.apply(kv_store(s3=s3), service(kvStoreRef={"name": "shared"}))
    ready = cluster.wait_reason(INFERENCE_SERVICE, "chat", "SecretNotFound")
    assert "KVStore shared: spec.s3.credentialsSecretRef: there is no Secret s3" in ready["message"]
    assert "Deployment/chat-engine" not in cluster.children()
    keys = ("--from-literal=AWS_ACCESS_KEY_ID=a", "--from-literal=AWS_SECRET_ACCESS_KEY=b")
    cluster.kubectl("create", "secret", "generic", "s3", *keys)
    cluster.wait_children("Deployment/chat-engine")
    cluster.wait_reason(KV_STORE, "shared", "Valid")
    assert "AWS" not in json.dumps(cluster.get(DEPLOYMENT, "chat-engine"))


def test_a_deleted_store_leaves_nothing_and_its_service_keeps_running(operator, cluster):
    cluster.apply(kv_store(**ON_NODES), service(kvStoreRef={"name": "shared"}))
    cluster.wait_children(*STORE_CHILDREN, "Deployment/chat-engine")
    operator.settle()
    template = cluster.get(DEPLOYMENT, "chat-engine")["spec"]["template"]
    cluster.kubectl("delete", "kvstore", "shared", "--timeout=10s")
    wait_until("it is gone", lambda: "shared-kv" not in str(cluster.children()), timeout=WAIT_S)
    cluster.wait_reason(INFERENCE_SERVICE, "chat", "KVStoreNotFound")
    operator.settle()
    assert cluster.get(DEPLOYMENT, "chat-engine")["spec"]["template"] == template


def test_an_object_of_somebody_else_is_not_taken_over(operator, cluster):
    cluster.kubectl("create", "service", "clusterip", "chat-engine", "--tcp=80:80")
    cluster.apply(service())
    ready = cluster.wait_reason(INFERENCE_SERVICE, "chat", "ApplyFailed")
    assert "Service chat-engine: exists already" in ready["message"]
    assert cluster.get(SERVICE, "chat-engine")["spec"]["selector"] == {"app": "chat-engine"}


def test_a_child_deleted_in_a_watch_gap_comes_back_with_the_resync(operator, cluster):
    """The informer ends, as a connection that goes silent does; the resync's real list finds the ghost."""
    cluster.apply(service(model={"source": "file:///m", "chatTemplate": "x"}))
    cluster.wait_children("ConfigMap/chat-engine")
    operator.settle()
    operator.operator._informer.stop(10.0)
    cluster.kubectl("delete", "configmap", "chat-engine")
    operator.settle()
    assert "ConfigMap/chat-engine" not in cluster.children()
    operator.operator.resync()
    cluster.wait_children("ConfigMap/chat-engine")
    ghosts = operator.registry.get_sample_value("paceline_operator_ghosts_total", {"kind": "ConfigMap"})
    assert ghosts == 1


def test_missing_crds_end_the_operator_with_a_clear_line(new_process, control_plane, kubectl):
    kubectl("delete", "crd", "kvstores.paceline.dev")
    try:
        operator = new_process().start(wait=False)
        assert operator.wait() == 2
        assert "does not serve kvstores of paceline.dev: install the CRDs" in operator.log()
    finally:
        install(control_plane, kubectl, again=True)


def test_a_crd_that_is_deleted_under_a_running_operator_ends_it_with_a_clear_line(new_process, control_plane, kubectl):
    operator = new_process().start()
    kubectl("delete", "crd", "kvstores.paceline.dev")
    try:
        assert operator.wait() == 1
        assert "Stopping: the informer has ended" in operator.log()
    finally:
        install(control_plane, kubectl, again=True)
