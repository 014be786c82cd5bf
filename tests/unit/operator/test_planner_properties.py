"""Properties of the planner over many specs, and what `covers` counts as already written."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_samples import NOW, SETTINGS, applied, fleet, live, observed, rolled_out, router, service, store, tenant

from paceline_operator.planner.manifests import covers, difference, sealed
from paceline_operator.planner.plan import plan

engines = st.fixed_dictionaries(
    {},
    optional={
        "maxModelLen": st.integers(16, 4096),
        "maxNumSeqs": st.integers(1, 256),
        "blockSize": st.sampled_from([8, 16, 32]),
        "kvCacheMemory": st.sampled_from(["256Mi", "1Gi"]),
        "image": st.sampled_from(["a:1", "b:2"]),
        "extraArgs": st.sampled_from([["--device=simulated"], ["--a=1", "--b"]]),
        "resources": st.sampled_from([{}, {"requests": {"cpu": "500m"}}, {"limits": {"memory": "1024Mi"}}]),
    },
)
specs = st.fixed_dictionaries(
    {"model": st.sampled_from([{"source": "file:///m"}, {"source": "file:///m", "chatTemplate": "{{ x }}"}])},
    optional={
        "engine": engines,
        "replicas": st.integers(0, 4),
        "slo": st.sampled_from([{"ttft": "1s"}, {"e2e": "30s", "target": "95"}]),
        "rollout": st.sampled_from([{"strategy": "inPlace"}, {"drainTimeout": "30s"}]),
        "kvStoreRef": st.just({"name": "shared"}),
        "routing": st.just({"routerRef": {"name": "second"}}),
    },
)
names = st.from_regex(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)


@settings(max_examples=60, deadline=None)
@given(names, specs)
def test_the_plan_is_deterministic_idempotent_and_json(name, spec):
    state = observed(service(name, **spec), kv_store=store())
    first = plan(state, NOW, SETTINGS)
    assert first == plan(state, NOW, SETTINGS)
    json.dumps([action.manifest for action in first.actions])
    assert all(len(action.manifest["metadata"]["name"]) <= 63 for action in first.actions)
    done = observed(
        {**state.manifest, "status": first.status["status"]},
        kv_store=store(),
        children=live(applied(first.actions).values()),
    )
    second = plan(done, NOW + 60, SETTINGS)
    assert second.actions == ()


@settings(max_examples=40, deadline=None)
@given(specs, specs)
def test_any_change_of_the_spec_converges_in_one_plan_and_leaves_nothing_once_it_is_rolled_out(before, after):
    children = live(applied(plan(observed(service(**before), kv_store=store()), NOW, SETTINGS).actions).values())
    fresh = applied(plan(observed(service(**after), kv_store=store()), NOW, SETTINGS).actions)
    result = {item["kind"]: item for item in children}
    # Until then the settings of pods that run stay.
    for shown in (lambda items: items, rolled_out):
        change = plan(
            observed(service(**after), kv_store=store(), children=shown(live(result.values()))), NOW, SETTINGS
        )
        for action in change.actions:
            if hasattr(action, "manifest"):
                result[action.manifest["kind"]] = action.manifest
            else:
                del result[action.kind.kind]
        assert set(result) - {"ConfigMap"} == set(fresh) - {"ConfigMap"}
        assert all(covers(result[kind], fresh[kind]) for kind in fresh if kind != "ConfigMap")
    assert set(result) == set(fresh)
    assert all(covers(result[kind], fresh[kind]) for kind in fresh)


@settings(max_examples=30, deadline=None)
@given(st.lists(names, max_size=4, unique=True), st.booleans(), st.integers(1, 3))
def test_a_fleet_converges_in_one_plan(services, with_router, replicas):
    gateway = router(replicas=replicas) if with_router else None
    fields = {"router": gateway, "services": tuple(service(name) for name in services), "tenants": (tenant(),)}
    first = plan(fleet(**fields), NOW, SETTINGS)
    children = live(item for item in applied(first.actions).values() if item["kind"] != "Secret")
    again = plan(fleet(**fields, children=children), NOW, SETTINGS)
    assert applied(again.actions) == {}


@pytest.mark.parametrize(
    ("alive", "intent", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({}, {"a": 1}, False),
        (None, {}, True),
        ({"args": ["a", "b"]}, {"args": ["a"]}, False),
        ({"args": ["b", "a"]}, {"args": ["a", "b"]}, False),
        ({"env": [{"name": "x", "value": "1"}, {"name": "y"}]}, {"env": [{"name": "x", "value": "1"}]}, True),
        ({"env": [{"name": "x", "value": "2"}]}, {"env": [{"name": "x", "value": "1"}]}, False),
        ({"rules": [{"a": 1}, {"b": 2}]}, {"rules": [{"a": 1}]}, False),
        ({"requests": {"memory": "1Gi"}}, {"requests": {"memory": "1024Mi"}}, True),
        ({"requests": {"memory": "1Gi"}}, {"requests": {"memory": "2Gi"}}, False),
        ({"rules": [{"a": 1, "b": 2}]}, {"rules": [{"a": 1}]}, False),
        ({"selector": {"a": "1", "b": "2"}}, {"selector": {"a": "1"}}, False),
        ({"size": "1Gi"}, {"size": "1024Mi"}, False),
    ],
)
def test_covers_predicts_whether_an_apply_would_change_anything(alive, intent, same):
    assert covers(alive, intent) is same


def test_a_field_that_the_intent_drops_is_noticed_by_the_seal():
    full = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "n"}, "data": {"a": "1"}}
    less = {**full, "data": {}}
    stored = live([sealed(full)])
    assert difference([full], stored) == ()
    assert len(difference([less], stored)) == 1
