"""From API objects to the router's view: endpoints, names, tenants, and what a person must mend."""

from __future__ import annotations

from typing import Any

from paceline_api import names
from paceline_api.slo import Targets
from paceline_router import records
from paceline_router.records import EndpointId, KeyRef, RouterRecord
from paceline_router.snapshot import Observed, build


def service(name: str = "chat", created: str = "2026-01-01T00:00:00Z", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "creationTimestamp": created}, "spec": {"model": {}, **spec}}


def slice_of(name: str, *endpoints: dict[str, Any], port: int = 8000, **rest: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "s", "labels": {names.LABEL_SLICE_SERVICE: names.engine_name(name)}},
        "addressType": "IPv4",
        "ports": [{"name": "metrics", "port": 1}, {"name": "http", "port": port}],
        "endpoints": list(endpoints),
        **rest,
    }


def endpoint(pod: str, address: str = "10.0.0.1", **conditions: Any) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": pod}}


def observed(services: list[dict[str, Any]], slices: list[dict[str, Any]] = []) -> Observed:  # noqa: B006
    read = [records.read_service(item) for item in services]
    return Observed(
        services={item.name: item for item in read},
        slices={str(index): records.read_slice(item) for index, item in enumerate(slices)},
    )


def serving(view: Observed, model: str = "chat") -> list[EndpointId]:
    snapshot, _ = build(view, "default", complete=True)
    return [item.id for item in snapshot.models[model].serving]


def test_the_http_port_of_each_slice_counts():
    view = observed(
        [service()], [slice_of("chat", endpoint("a"), port=9001), slice_of("chat", endpoint("b"), port=9002)]
    )
    assert serving(view) == [EndpointId("a", "10.0.0.1", 9001), EndpointId("b", "10.0.0.1", 9002)]


def test_slices_of_other_services_do_not_count():
    assert serving(observed([service()], [slice_of("other", endpoint("a"))])) == []


def test_a_service_of_63_characters_finds_its_slices():
    name = "x" * 63
    assert len(serving(observed([service(name)], [slice_of(name, endpoint("a"))]), name)) == 1


def test_conditions_that_are_not_stated_read_as_the_api_says():
    items = [
        endpoint("plain"),
        endpoint("null", ready=None),
        endpoint("unready", ready=False),
        endpoint("leaving", ready=True, terminating=True),
    ]
    view = observed([service()], [slice_of("chat", *items)])
    assert [item.pod for item in serving(view)] == ["null", "plain"]
    snapshot, _ = build(view, "default", complete=True)
    assert len(snapshot.models["chat"].endpoints) == 4


def test_one_pod_in_two_slices_is_one_endpoint_and_the_worse_view_counts():
    both = [slice_of("chat", endpoint("a")), slice_of("chat", endpoint("a", ready=False))]
    assert serving(observed([service()], both)) == []
    assert serving(observed([service()], both[::-1])) == []


def test_a_dual_stack_pod_is_one_endpoint():
    six = slice_of("chat", endpoint("a", "fd00::1"), addressType="IPv6")
    view = observed([service()], [six, slice_of("chat", endpoint("a"))])
    assert serving(view) == [EndpointId("a", "10.0.0.1", 8000)]
    only_six, _ = build(observed([service()], [six]), "default", complete=True)
    assert only_six.models["chat"].serving[0].base_url == "http://[fd00::1]:8000"


def test_slices_without_an_http_port_or_with_names_give_nothing():
    no_port = slice_of("chat", endpoint("a")) | {"ports": [{"name": "metrics", "port": 1}]}
    names_only = slice_of("chat", endpoint("a"), addressType="FQDN")
    assert serving(observed([service()], [no_port, names_only])) == []
    assert serving(observed([service()], [slice_of("chat") | {"endpoints": None, "ports": None}])) == []


def test_only_services_of_this_router_are_served():
    view = observed([service("a"), service("b", routing={"routerRef": {"name": "edge"}})])
    assert list(build(view, "default", complete=True)[0].models) == ["a"]
    assert list(build(view, "edge", complete=True)[0].models) == ["b"]


def test_a_model_name_belongs_to_the_older_service():
    young = service("a", created="2026-02-01T00:00:00Z", model={"servedName": "llama"})
    old = service("b", created="2026-01-01T00:00:00Z", model={"servedName": "llama"})
    snapshot, problems = build(observed([young, old]), "default", complete=True)
    assert snapshot.models["llama"].service.name == "b"
    assert problems == [
        "InferenceService a: the model name llama belongs to the older b; set another spec.model.servedName"
    ]


def test_a_newer_crd_does_not_take_the_service_down():
    spec = {"routing": {"policy": "psychic"}, "slo": {"ttft": "soon", "e2e": "30s"}, "novel": {"x": 1}}
    record = records.read_service(service(**spec))
    assert record.policy == "leastLoaded"
    assert record.targets == Targets(e2e_s=30.0)


def test_a_tenant_is_read_strictly():
    record = records.read_tenant(
        {
            "metadata": {"name": "a"},
            "spec": {
                "slo": {"ttft": "800ms", "tpot": "60ms"},
                "serviceOverrides": [{"service": "chat", "slo": {"ttft": "2s"}}],
                "services": ["chat"],
                "apiKeySecretRefs": [{"name": "s"}, {"name": "t", "key": "k"}],
            },
        }
    )
    assert record is not None
    assert record.targets == Targets(ttft_s=0.8, tpot_s=0.06)
    assert record.overrides == {"chat": Targets(ttft_s=2.0)}
    assert record.key_refs == (KeyRef("s", "apiKey"), KeyRef("t", "k"))
    assert record.may_use("chat") and not record.may_use("other")
    assert records.read_tenant({"metadata": {"name": "a", "deletionTimestamp": "x"}, "spec": {}}) is None


def test_an_empty_allow_list_allows_nothing():
    record = records.read_tenant({"metadata": {"name": "a"}, "spec": {"services": []}})
    assert record is not None
    assert not record.may_use("chat")


def test_a_missing_secret_is_reported_once_lists_are_complete():
    tenant = records.read_tenant({"metadata": {"name": "a"}, "spec": {"apiKeySecretRefs": [{"name": "s"}]}})
    assert tenant is not None
    view = Observed(tenants={"a": tenant})
    assert build(view, "default", complete=False)[1] == []
    assert build(view, "default", complete=True)[1] == [
        "tenant a: Secret s has no usable key apiKey; that API key opens nothing"
    ]


def test_router_defaults():
    assert build(Observed(), "default", complete=True)[0].router == RouterRecord()
    assert records.read_router({"spec": {"anonymousTenant": "guest", "maxBodyBytes": 2048}}) == RouterRecord(
        "guest", 2048
    )
