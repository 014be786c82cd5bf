"""The whole operator in one process over the in-memory object store: no kopf, no cluster, real threads."""

import threading
from copy import deepcopy

from operator_samples import (
    NAMESPACE,
    condition,
    ready_status,
    router,
    service,
    store,
    tenant,
    wait_until,
)
from prometheus_client import CollectorRegistry
from whole_operator import FLEET, become_ready, become_ready_router, caught_up, settle

from paceline_api.kube import (
    DEPLOYMENT,
    EVENT,
    INFERENCE_SERVICE,
    ROLE,
    ROUTER,
    SECRET,
    SERVICE,
    TENANT,
    Conflict,
)
from paceline_api.names import MANAGED_BY
from paceline_operator.settings import Settings


def test_from_one_object_to_ready_and_then_silence(cluster, start):
    operator = start()
    cluster.put(service())
    settle(cluster, operator)
    found = cluster.get(INFERENCE_SERVICE, "chat")
    assert ready_status(found) == "True"
    assert found["status"]["url"] == "http://paceline-default-router.models.svc/v1"
    assert cluster.names(DEPLOYMENT) == ["chat-engine", "paceline-default-router"]
    assert cluster.token is not None
    writes = cluster.writes()
    cluster.put(service())
    operator.resync()
    settle(cluster, operator)
    assert cluster.writes() == writes


def test_a_restarted_operator_writes_nothing(cluster, start):
    first = start()
    cluster.put(service())
    settle(cluster, first)
    first.stop()
    writes = cluster.writes()
    settle(cluster, start())
    assert cluster.writes() == writes


def test_nothing_is_ever_written_to_the_users_object_but_its_status(cluster, start):
    operator = start()
    cluster.put(service())
    before = cluster.get(INFERENCE_SERVICE, "chat")
    settle(cluster, operator)
    after = cluster.get(INFERENCE_SERVICE, "chat")
    assert after["spec"] == before["spec"]
    assert "finalizers" not in after["metadata"]
    assert "annotations" not in after["metadata"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"]


def test_a_hand_edited_and_a_deleted_child_come_back(cluster, start):
    operator = start()
    cluster.put(service())
    settle(cluster, operator)
    edited = cluster.get(DEPLOYMENT, "chat-engine")
    cluster.store.replace({**edited, "spec": {**edited["spec"], "replicas": 5}})
    wait_until("the edit is gone", lambda: cluster.get(DEPLOYMENT, "chat-engine")["spec"]["replicas"] == 1)
    cluster.store.delete(SERVICE, NAMESPACE, "chat-engine")
    wait_until("the Service is back", lambda: "chat-engine" in cluster.names(SERVICE))


def _add_to_pod(spec):
    spec |= {"hostNetwork": True, "hostPID": True, "nodeSelector": {"x": "y"}}
    spec["containers"][0]["securityContext"]["privileged"] = True
    spec["containers"][0]["env"].append({"name": "LD_PRELOAD", "value": "/x.so"})
    spec["containers"].append({"name": "miner", "image": "evil:1", "securityContext": {"privileged": True}})
    spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}})


def test_what_is_added_to_a_child_by_hand_is_taken_out(cluster, start):
    operator = start()
    cluster.put(service())
    settle(cluster, operator)
    before = {kind: cluster.get(kind, FLEET) for kind in (SERVICE, ROLE, DEPLOYMENT)}
    edited = deepcopy(before)
    edited[SERVICE]["spec"]["selector"]["x"] = "y"
    edited[ROLE]["rules"][0]["resourceNames"] = ["one"]
    _add_to_pod(edited[DEPLOYMENT]["spec"]["template"]["spec"])
    edited[DEPLOYMENT]["spec"]["template"]["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] = "now"
    for item in edited.values():
        cluster.store.replace(item)
    content = {SERVICE: "spec", ROLE: "rules"}
    wait_until(
        "selector and rules are ours again",
        lambda: all(cluster.get(kind, FLEET)[key] == before[kind][key] for kind, key in content.items()),
    )
    pod = before[DEPLOYMENT]["spec"]["template"]["spec"]
    wait_until("the pod is", lambda: cluster.get(DEPLOYMENT, FLEET)["spec"]["template"]["spec"] == pod)
    kept = cluster.get(DEPLOYMENT, FLEET)["spec"]["template"]["metadata"]["annotations"]
    assert kept["kubectl.kubernetes.io/restartedAt"] == "now", "a restart by kubectl was undone"
    settle(cluster, operator)


def test_what_the_clusters_admission_adds_is_not_fought_over(cluster, start):
    class Mutating:
        """Admission that gives every Deployment a toleration."""

        def __getattr__(self, name):
            return getattr(cluster.store, name)

        def _admit(self, written):
            if written["kind"] != "Deployment":
                return written
            wanted = deepcopy(written)
            wanted["spec"]["template"]["spec"]["tolerations"] = [{"operator": "Exists"}]
            return cluster.store.replace(wanted)

        def apply(self, manifest, *, field_manager):
            return self._admit(cluster.store.apply(manifest, field_manager=field_manager))

        def replace(self, manifest):
            return self._admit(cluster.store.replace(manifest))

    operator = start(Mutating())
    cluster.put(service())
    settle(cluster, operator)
    writes = cluster.writes()
    operator.resync()
    settle(cluster, operator)
    assert cluster.writes() == writes
    assert ready_status(cluster.get(INFERENCE_SERVICE, "chat")) == "True"


def test_a_child_without_our_label_gets_it_back_and_is_maintained_further(cluster, start):
    operator = start()
    cluster.put(service())
    settle(cluster, operator)
    bare = cluster.get(DEPLOYMENT, "chat-engine")
    labels = {key: text for key, text in bare["metadata"]["labels"].items() if key != MANAGED_BY}
    cluster.store.replace({**bare, "metadata": {**bare["metadata"], "labels": labels}})
    wait_until("the label is back", lambda: MANAGED_BY in cluster.get(DEPLOYMENT, "chat-engine")["metadata"]["labels"])
    settle(cluster, operator)
    writes = cluster.writes()
    operator.resync()
    settle(cluster, operator)
    assert cluster.writes() == writes
    edited = cluster.get(DEPLOYMENT, "chat-engine")
    cluster.store.replace({**edited, "spec": {**edited["spec"], "replicas": 5}})
    wait_until("the edit is gone", lambda: cluster.get(DEPLOYMENT, "chat-engine")["spec"]["replicas"] == 1)


def test_deleting_the_service_removes_everything(cluster, start):
    operator = start()
    cluster.put(service())
    settle(cluster, operator)
    cluster.store.delete(INFERENCE_SERVICE, NAMESPACE, "chat")
    wait_until("nothing is left", lambda: cluster.everything() == [])
    settle(cluster, operator)
    assert cluster.everything() == []


def test_a_router_object_keeps_the_fleet_when_the_last_service_goes(cluster, start):
    operator = start()
    cluster.put(router())
    cluster.put(service())
    settle(cluster, operator)
    token = cluster.token["data"]
    cluster.store.delete(INFERENCE_SERVICE, NAMESPACE, "chat")
    settle(cluster, operator)
    assert cluster.names(DEPLOYMENT) == ["paceline-default-router"]
    assert cluster.token["data"] == token
    assert ready_status(cluster.get(ROUTER, "default")) == "True"


def test_a_deleted_router_object_leaves_a_fleet_with_the_defaults(cluster, start):
    operator = start()
    cluster.put(router(replicas=2))
    cluster.put(service())
    settle(cluster, operator)
    before = {kind: cluster.get(kind, FLEET)["metadata"]["uid"] for kind in (DEPLOYMENT, SERVICE, ROLE)}
    cluster.store.delete(ROUTER, NAMESPACE, "default")
    wait_until("the fleet is the service's", lambda: cluster.get(DEPLOYMENT, FLEET)["spec"]["replicas"] == 1)
    settle(cluster, operator)
    owners = cluster.get(DEPLOYMENT, FLEET)["metadata"]["ownerReferences"]
    assert [owner["kind"] for owner in owners] == ["InferenceService"]
    assert {kind: cluster.get(kind, FLEET)["metadata"]["uid"] for kind in before} == before, "the gateway was down"


def test_a_service_that_moves_to_another_router_takes_the_old_fleet_down(cluster, start):
    operator = start()
    cluster.put(service())
    settle(cluster, operator)
    cluster.put(service(routing={"routerRef": {"name": "second"}}))
    settle(cluster, operator)
    assert cluster.names(DEPLOYMENT) == ["chat-engine", "paceline-second-router"]
    assert ready_status(cluster.get(INFERENCE_SERVICE, "chat")) == "True"


def test_a_changed_tenant_reaches_the_role_and_rolls_nothing(cluster, start):
    operator = start()
    cluster.put(service())
    settle(cluster, operator)
    generations = {name: cluster.get(DEPLOYMENT, name)["metadata"]["generation"] for name in cluster.names(DEPLOYMENT)}
    cluster.put(tenant(apiKeySecretRefs=[{"name": "key"}]))
    wait_until("the role names the Secret", lambda: "'key'" in str(cluster.get(ROLE, FLEET)["rules"]))
    settle(cluster, operator)
    after = {name: cluster.get(DEPLOYMENT, name)["metadata"]["generation"] for name in cluster.names(DEPLOYMENT)}
    assert after == generations


def test_a_tenants_missing_secret_is_found_once_it_is_there(cluster, start):
    operator = start()
    cluster.put(tenant(apiKeySecretRefs=[{"name": "key"}]))
    wait_until("it says what is missing", lambda: ready_status(cluster.get(TENANT, "team")) == "False")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key", "namespace": NAMESPACE}}
    cluster.store.create({**secret, "data": {"apiKey": "c2VjcmV0"}})
    operator.resync()
    wait_until("it is ready", lambda: ready_status(cluster.get(TENANT, "team")) == "True")


def test_a_kv_store_that_comes_later_lets_the_engines_start(cluster, start):
    operator = start()
    cluster.put(service(kvStoreRef={"name": "shared"}))
    settle(cluster, operator)
    assert "chat-engine" not in cluster.names(DEPLOYMENT)
    cluster.put(store())
    become_ready(cluster)


def test_a_crash_looping_engine_shows_its_last_line_and_one_warning(cluster, start):
    operator = start()
    cluster.put(service())
    settle(cluster, operator)
    cluster.break_pod("chat-engine-0", "CrashLoopBackOff", "Traceback\nno such file: model.gguf\n")
    deployment = cluster.get(DEPLOYMENT, "chat-engine")
    status = {**deployment["status"], "readyReplicas": 0}
    cluster.store.replace_status({**deployment, "status": status})
    found = wait_until(
        "the reason is shown",
        lambda: next(
            (
                item
                for item in [condition(cluster.get(INFERENCE_SERVICE, "chat"), "Ready")]
                if item["reason"] == "EnginesFailing"
            ),
            None,
        ),
    )
    assert found["message"] == "pod chat-engine-0: CrashLoopBackOff: exit code 2: no such file: model.gguf"
    wait_until("the operator is idle", lambda: operator.idle)
    events = [item for item in cluster.store.list(EVENT, NAMESPACE).items if item["type"] == "Warning"]
    assert [event["reason"] for event in events] == ["EnginesFailing"]


def test_an_object_of_somebody_else_is_not_taken_over(cluster, start):
    foreign = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat-engine", "namespace": NAMESPACE}}
    cluster.store.create({**foreign, "spec": {"selector": {"app": "mine"}}})
    start()
    cluster.put(service())
    found = wait_until(
        "the condition says so",
        lambda: (
            (condition(cluster.get(INFERENCE_SERVICE, "chat"), "Ready") or {}).get("reason") == "ApplyFailed"
            if cluster.get(INFERENCE_SERVICE, "chat").get("status")
            else None
        ),
    )
    assert found
    assert cluster.get(SERVICE, "chat-engine")["spec"]["selector"] == {"app": "mine"}
    assert "chat-engine" in cluster.names(DEPLOYMENT), "the other children are not held up"


def test_deletions_while_the_operator_was_down_converge(cluster, start):
    first = start()
    cluster.put(service())
    cluster.put(service("other"))
    settle(cluster, first)
    first.stop()
    cluster.store.delete(DEPLOYMENT, NAMESPACE, "chat-engine")
    cluster.store.delete(INFERENCE_SERVICE, NAMESPACE, "other")
    second = start()
    settle(cluster, second)
    assert cluster.names(DEPLOYMENT) == ["chat-engine", "paceline-default-router"]
    owners = cluster.get(DEPLOYMENT, "paceline-default-router")["metadata"]["ownerReferences"]
    assert [owner["name"] for owner in owners] == ["chat"]


def test_the_token_survives_a_race_of_two_creators(cluster, start):
    class Late:
        """Sees no Secret although another operator has just made it."""

        def __getattr__(self, name):
            return getattr(cluster.store, name)

        def get(self, kind, namespace, name):
            return None if kind == SECRET else cluster.store.get(kind, namespace, name)

        def create(self, manifest):
            if manifest["kind"] == "Secret" and cluster.token is None:
                cluster.store.create({**manifest, "data": {"token": "Zmlyc3Q="}})
                raise Conflict(409, "AlreadyExists", "secrets paceline-internal already exists")
            return cluster.store.create(manifest)

    operator = start(Late())
    cluster.put(service())
    settle(cluster, operator)
    assert cluster.token["data"] == {"token": "Zmlyc3Q="}


def test_a_secret_of_somebody_else_is_not_taken_over_and_told(cluster, start):
    foreign = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "paceline-internal", "namespace": NAMESPACE}}
    cluster.store.create({**foreign, "data": {"password": "c2VjcmV0"}})
    start()
    cluster.put(service())
    found = wait_until(
        "the condition says so",
        lambda: condition({"status": {"conditions": []}, **cluster.get(INFERENCE_SERVICE, "chat")}, "Ready"),
    )
    assert found["reason"] == "NameTaken"
    assert "Secret paceline-internal exists already and is not of Paceline" in found["message"]
    assert "ownerReferences" not in cluster.token["metadata"]
    assert cluster.token["data"] == {"password": "c2VjcmV0"}
    cluster.store.delete(SECRET, NAMESPACE, "paceline-internal")
    become_ready(cluster)
    assert list(cluster.token["data"]) == ["token"]


def test_a_deleted_token_is_made_anew_at_once_and_everything_starts_again_with_it(cluster, start):
    operator = start()
    cluster.put(service())
    settle(cluster, operator)
    before = {name: cluster.get(DEPLOYMENT, name)["metadata"]["generation"] for name in cluster.names(DEPLOYMENT)}
    token = cluster.token["data"]["token"]
    cluster.store.delete(SECRET, NAMESPACE, "paceline-internal")
    wait_until("the token is back", lambda: cluster.token is not None)
    assert cluster.token["data"]["token"] != token
    once = {name: generation + 1 for name, generation in before.items()}

    def generations() -> dict[str, int]:
        return {name: cluster.get(DEPLOYMENT, name)["metadata"]["generation"] for name in cluster.names(DEPLOYMENT)}

    wait_until("both fleets are rolled", lambda: generations() == once)
    settle(cluster, operator)
    assert generations() == once, "and only once"
    assert ready_status(cluster.get(INFERENCE_SERVICE, "chat")) == "True"


def test_figures_alone_wait_for_the_status_interval_and_conditions_do_not(cluster, start):
    operator = start(settings=Settings(resync_s=3600, first_resync_s=3600, status_interval_s=3600))
    cluster.put(router(replicas=2))
    become_ready_router(cluster)
    settle(cluster, operator)
    deployment = cluster.get(DEPLOYMENT, FLEET)
    cluster.store.replace_status({**deployment, "status": {**deployment["status"], "replicas": 3, "readyReplicas": 1}})
    wait_until("the condition is written at once", lambda: ready_status(cluster.get(ROUTER, "default")) == "False")
    assert cluster.get(ROUTER, "default")["status"]["readyReplicas"] == 1
    deployment = cluster.get(DEPLOYMENT, FLEET)
    writes = cluster.store.writes[ROUTER]
    cluster.store.replace_status({**deployment, "status": {**deployment["status"], "replicas": 4}})
    wait_until("the operator has seen it", lambda: operator.idle and caught_up(cluster, operator))
    assert cluster.store.writes[ROUTER] == writes


def test_stop_ends_the_workers(cluster, start):
    operator = start()
    cluster.put(service())
    settle(cluster, operator)
    cluster.store.close()
    operator.stop()
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("reconcile-", "resync"))}


def test_metrics_count_reconciles_and_writes(cluster, start):
    registry = CollectorRegistry()
    operator = start(registry=registry)
    cluster.put(service())
    settle(cluster, operator)
    value = registry.get_sample_value
    assert value("paceline_operator_reconciles_total", {"kind": "InferenceService", "result": "ok"}) >= 1
    assert value("paceline_operator_writes_total", {"verb": "apply", "kind": "Deployment"}) == 2
    assert value("paceline_operator_writes_total", {"verb": "create", "kind": "Secret"}) == 1
    assert value("paceline_operator_queue_depth") == 0
