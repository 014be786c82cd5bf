"""The children of the examples as YAML files: a change of what is rendered shows up in review.

After a change on purpose: PACELINE_UPDATE_GOLDEN=1 python -m pytest tests/unit/operator/test_golden.py
"""

import os
from pathlib import Path

import pytest
import yaml
from operator_samples import NOW, SETTINGS, applied, created, fleet, observed

from paceline_api.validation import parse
from paceline_operator.planner.kv_settings import store_references
from paceline_operator.planner.model import StoreObserved
from paceline_operator.planner.plan import plan

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"
EXAMPLE = ROOT / "manifests" / "examples" / "smollm2.yaml"


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def example() -> dict[str, dict]:
    objects = {}
    for item in yaml.safe_load_all(EXAMPLE.read_text()):
        stamps = {"namespace": "default", "uid": f"uid-{item['kind']}", "generation": 1}
        objects[item["kind"]] = {**item, "metadata": {**item["metadata"], **stamps}}
    return objects


def rendered() -> dict[str, list[dict]]:
    objects = example()
    service = plan(observed(objects["InferenceService"]), NOW, SETTINGS)
    gateway = plan(
        fleet(
            namespace="default",
            router=objects["Router"],
            routers=(objects["Router"],),
            services=(objects["InferenceService"],),
            tenants=(objects["Tenant"],),
            new_token="not-a-real-token",
        ),
        NOW,
        SETTINGS,
    )
    (fleet_store,) = yaml.safe_load_all((EXAMPLE.parent / "kv-store-fleet.yaml").read_text())
    stamps = {"namespace": "default", "uid": "uid-KVStore", "generation": 1}
    fleet_store = {**fleet_store, "metadata": {**fleet_store["metadata"], **stamps}}
    held = {item.label: dict.fromkeys(item.keys, "hash") for item in store_references(fleet_store)}
    consumer = objects["InferenceService"]
    consumer = {**consumer, "spec": {**consumer["spec"], "kvStoreRef": {"name": "fleet"}}}
    servers = plan(StoreObserved(manifest=fleet_store, data=held), NOW, SETTINGS)
    sharing = plan(observed(consumer, kv_store=fleet_store, store_data=held), NOW, SETTINGS)
    return {
        "kv-store-fleet.yaml": list(applied(servers.actions).values()),
        "kv-store-engine.yaml": list(applied(sharing.actions).values()),
        "smollm2-engine.yaml": list(applied(service.actions).values()),
        "smollm2-router.yaml": created(gateway.actions) + list(applied(gateway.actions).values()),
    }


GOLDENS = ["kv-store-engine.yaml", "kv-store-fleet.yaml", "smollm2-engine.yaml", "smollm2-router.yaml"]


@pytest.mark.parametrize("name", GOLDENS)
def test_the_example_renders_as_recorded(name):
    text = yaml.dump_all(rendered()[name], Dumper=_NoAliases, sort_keys=False, width=120)
    path = GOLDEN / name
    if os.environ.get("PACELINE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{name} differs; see this file's docstring if the change is meant"


@pytest.mark.parametrize("path", sorted(EXAMPLE.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_valid(path):
    for item in yaml.safe_load_all(path.read_text()):
        parse(item)


def test_the_base_refers_to_files_that_are_there():
    base = ROOT / "manifests" / "base"
    kustomization = yaml.safe_load((base / "kustomization.yaml").read_text())
    for name in kustomization["resources"]:
        assert (base / name).exists(), name
    rules = [item for item in yaml.safe_load_all((base / "rbac.yaml").read_text()) if "rules" in item]
    assert rules
    assert "*" not in str([item["rules"] for item in rules])


def test_the_operator_may_grant_what_it_grants_to_routers():
    """The API server refuses a Role with rights that its author lacks."""
    base = yaml.safe_load_all((ROOT / "manifests" / "base" / "rbac.yaml").read_text())
    own = next(item for item in base if item["kind"] == "ClusterRole")["rules"]
    held = {
        (group, resource, verb)
        for rule in own
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    role = next(item for item in rendered()["smollm2-router.yaml"] if item["kind"] == "Role")
    tenant_secret = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "list", "watch"]}
    for rule in [*role["rules"], tenant_secret]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                assert {(group, resource, verb) for verb in rule["verbs"]} <= held
