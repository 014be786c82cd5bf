"""Router fleets, the internal token, Tenants and KVStores. No I/O, no clock."""

import base64

import pytest
from operator_samples import (
    NOW,
    SETTINGS,
    applied,
    condition,
    created,
    fleet,
    live,
    obj,
    rolled_out,
    router,
    service,
    store,
    tenant,
)

from paceline_operator.planner.model import Apply, Delete, StoreObserved, TenantObserved
from paceline_operator.planner.plan import plan
from paceline_operator.planner.router import fleet_url

TOKEN = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "paceline-internal", "namespace": "models"}}


def make(**fields):
    return plan(fleet(**fields), NOW, SETTINGS)


def kinds(**fields):
    return applied(make(**fields).actions)


def token_with(uid="uid-secret", owners=()):
    labels = {"app.kubernetes.io/managed-by": "paceline"}
    metadata = {**TOKEN["metadata"], "uid": uid, "ownerReferences": list(owners), "labels": labels}
    return {**TOKEN, "metadata": metadata, "tokenHash": "h1"}


def test_no_fleet_without_a_reason():
    assert make().empty


def test_a_service_alone_gets_a_fleet_with_the_defaults_that_it_owns_without_controlling():
    children = kinds(services=(service(),))
    assert set(children) == {"ServiceAccount", "Role", "RoleBinding", "Service", "Deployment"}
    assert children["Deployment"]["metadata"]["name"] == "paceline-default-router"
    assert children["Deployment"]["spec"]["replicas"] == 1
    for child in children.values():
        owners = child["metadata"]["ownerReferences"]
        assert [(owner["name"], "controller" in owner) for owner in owners] == [("chat", False)]


def test_every_referring_service_owns_the_fleet_and_others_do_not():
    others = service("other", routing={"routerRef": {"name": "second"}})
    children = kinds(services=(service("b"), service("a"), others))
    assert [owner["name"] for owner in children["Deployment"]["metadata"]["ownerReferences"]] == ["a", "b"]


def test_a_router_object_controls_its_fleet_beside_the_services_and_sizes_it():
    children = kinds(router=router(replicas=2, expose="LoadBalancer"), services=(service(),))
    owners = children["Deployment"]["metadata"]["ownerReferences"]
    assert [(owner["kind"], owner.get("controller")) for owner in owners] == [
        ("Router", True),
        ("InferenceService", None),
    ]
    assert children["Deployment"]["spec"]["replicas"] == 2
    assert children["Service"]["spec"]["type"] == "LoadBalancer"
    assert children["Service"]["spec"]["ports"] == [
        {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}
    ]
    assert "PodDisruptionBudget" in children


def test_a_fleet_that_nobody_needs_any_more_is_deleted():
    before = live(kinds(services=(service(),)).values())
    moved = service(routing={"routerRef": {"name": "second"}})
    actions = make(services=(moved,), children=before).actions
    assert {item.kind.kind for item in actions if isinstance(item, Delete)} == {child["kind"] for child in before}
    assert not [item for item in actions if isinstance(item, Apply)]


def test_the_router_reads_no_secret_but_those_that_tenants_name():
    without = kinds(services=(service(),))["Role"]["rules"]
    assert all("secrets" not in rule["resources"] for rule in without)
    tenants = (
        tenant("b", apiKeySecretRefs=[{"name": "key-b"}, {"name": "key-a"}]),
        tenant("a", apiKeySecretRefs=[{"name": "key-a", "key": "k"}]),
    )
    rules = kinds(services=(service(),), tenants=tenants)["Role"]["rules"]
    secret_rules = [rule for rule in rules if "secrets" in rule["resources"]]
    assert [rule["resourceNames"] for rule in secret_rules] == [["key-a", "key-b"]]
    assert all("*" not in str(rule) for rule in rules)
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list", "watch"}


def test_tenants_services_and_anonymous_access_never_roll_the_router():
    def template(**fields):
        return kinds(**fields)["Deployment"]["spec"]["template"]

    plain = template(router=router(), services=(service(),))
    assert template(router=router(anonymousTenant="t"), tenants=(tenant("t"),)) == plain
    assert template(router=router(maxBodyBytes=4096), services=(service("b", slo={"ttft": "1s"}),)) == plain
    assert template(services=(service(model={"source": "file:///m", "servedName": "x"}),)) == plain


def test_the_token_is_created_once_with_owners_and_its_data_never_written_again():
    both = {"services": (service(),), "routers": (router(),), "router": router()}
    first = created(make(**both, new_token="s3cret").actions)
    assert [base64.b64decode(item["data"]["token"]) for item in first] == [b"s3cret"]
    assert {owner["name"] for owner in first[0]["metadata"]["ownerReferences"]} == {"chat", "default"}
    stale = make(**both, token_secret=token_with()).actions
    secrets = [item.manifest for item in stale if isinstance(item, Apply) and item.manifest["kind"] == "Secret"]
    assert len(secrets) == 1
    assert "data" not in secrets[0]
    assert "stringData" not in secrets[0]
    assert secrets[0]["metadata"]["uid"] == "uid-secret", "an apply could create it empty"
    kept = make(**both, token_secret={**secrets[0], "type": "Opaque", "tokenHash": "h1"}).actions
    assert not [item for item in kept if getattr(item, "manifest", {}).get("kind") == "Secret"]
    assert not created(kept)


@pytest.mark.parametrize(
    ("labels", "tokens", "reason"),
    [({}, "h1", "NameTaken"), ({"app.kubernetes.io/managed-by": "paceline"}, "", "InternalTokenInvalid")],
)
def test_a_secret_that_is_not_a_token_of_ours_is_left_alone_and_told(labels, tokens, reason):
    secret = {**TOKEN, "metadata": {**TOKEN["metadata"], "uid": "u", "labels": labels}, "tokenHash": tokens}
    refused = make(router=router(), routers=(router(),), token_secret=secret)
    assert refused.actions == ()
    assert condition(refused, "Ready")["reason"] == reason
    assert "paceline-internal" in condition(refused, "Ready")["message"]
    assert condition(refused, "Stalled")["status"] == "True"


def test_fleet_url():
    assert fleet_url("ns", "default", None) == "http://paceline-default-router.ns.svc/v1"

    def balanced(**ingress):
        return {"status": {"loadBalancer": {"ingress": [ingress]}}}

    assert fleet_url("ns", "default", balanced(ip="1.2.3.4")) == "http://1.2.3.4/v1"
    assert fleet_url("ns", "default", balanced(hostname="x.example")) == "http://x.example/v1"
    local = balanced(ip="127.0.0.1", ports=[{"port": 8080, "protocol": "TCP"}])
    assert fleet_url("ns", "default", local) == "http://127.0.0.1:8080/v1"


def test_status_of_a_router():
    start = make(router=router())
    assert condition(start, "Ready")["reason"] == "RouterStarting"
    children = rolled_out(live(applied(start.actions).values()))
    done = make(router=router(), children=children, token_secret=token_with())
    assert condition(done, "Ready")["status"] == "True"
    assert done.status["status"]["url"] == "http://paceline-default-router.models.svc/v1"
    missing = make(router=router(anonymousTenant="nobody"), children=children)
    assert condition(missing, "Ready")["reason"] == "TenantNotFound"
    assert condition(missing, "Reconciling")["status"] == "True"
    invalid = make(router=router(replicas=0), children=children)
    assert condition(invalid, "Ready")["reason"] == "InvalidSpec"
    assert invalid.actions == ()


def test_a_router_that_is_being_deleted_hands_its_fleet_to_the_services():
    going = router()
    going["metadata"]["deletionTimestamp"] = "2024-01-01T00:00:00Z"
    children = kinds(router=going, services=(service(),))
    assert [owner["kind"] for owner in children["Deployment"]["metadata"]["ownerReferences"]] == ["InferenceService"]


@pytest.mark.parametrize(
    ("keys", "services", "reason"),
    [
        ({"k": frozenset({"apiKey"})}, {"chat"}, "Valid"),
        ({"k": None}, {"chat"}, "SecretNotFound"),
        ({"k": frozenset({"other"})}, {"chat"}, "SecretKeyNotFound"),
        ({"k": frozenset({"apiKey"})}, set(), "ServiceNotFound"),
    ],
)
def test_a_tenant_is_ready_when_what_it_refers_to_is_there(keys, services, reason):
    manifest = tenant(apiKeySecretRefs=[{"name": "k"}], services=["chat"])
    found = plan(TenantObserved(manifest=manifest, secret_keys=keys, services=frozenset(services)), NOW, SETTINGS)
    assert condition(found, "Ready")["reason"] == reason
    assert found.actions == ()
    # Secrets are not watched, so a missing one is looked for again.
    assert (found.requeue_after_s is None) is (reason == "Valid")


def test_a_kv_store_is_ready_when_it_is_valid():
    good = plan(StoreObserved(manifest=store()), NOW, SETTINGS)
    assert condition(good, "Ready")["status"] == "True"
    assert "1Gi" in condition(good, "Ready")["message"]
    bad = plan(StoreObserved(manifest=obj("KVStore", "x", {"disk": {"capacity": "1Gi", "path": "/d"}})), NOW, SETTINGS)
    assert condition(bad, "Stalled")["status"] == "True"
    assert "spec.disk" in condition(bad, "Ready")["message"]
