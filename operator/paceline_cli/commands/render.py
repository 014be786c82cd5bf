"""`paceline render`: the children that the operator would create for the objects of some files.

The same pure planner decides as in the operator. Left out is what only a live object has: the uids in ownerReferences
and the hash of the intent that covers them; tokens are shown as placeholders, and Secrets and ConfigMaps that a KVStore
names are taken to be there, whatever they hold. Must not reach a cluster.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline_api.kube import DEPLOYMENT, INFERENCE_SERVICE, KV_STORE, ROUTER, SECRET, TENANT, Manifest
from paceline_api.names import DEFAULT_ROUTER, kv_name
from paceline_api.v1alpha1 import InferenceService, KVStore, Resource
from paceline_cli.commands.validate import Verdict, load_valid
from paceline_cli.errors import BadInput
from paceline_cli.inputs import SourceObject
from paceline_cli.references import router_of
from paceline_cli.yaml_text import dump_documents
from paceline_operator.planner.kv_settings import Reference, engine_references, quotas_of, store_references
from paceline_operator.planner.manifests import ANNOTATION_INTENT
from paceline_operator.planner.model import (
    Apply,
    Create,
    FleetObserved,
    Observed,
    PlanSettings,
    ServiceObserved,
    StoreObserved,
)
from paceline_operator.planner.plan import plan
from paceline_operator.planner.token import ANNOTATION_TOKEN_HASH

TOKEN_PLACEHOLDER = "<random, created once by the operator>"
_NO_UID = "00000000-0000-0000-0000-000000000000"


def run(files: Sequence[str], *, as_json: bool, settings: PlanSettings) -> int:
    """Writes the children to stdout; raises BadInput for files that are not valid or not complete."""
    children = render(load_valid(files), settings)
    if as_json:
        items = [manifest for _, manifest in children]
        sys.stdout.write(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n")
    else:
        sys.stdout.write(dump_documents(children))
    return 0


def render(verdict: Verdict, settings: PlanSettings) -> list[tuple[str, Manifest]]:
    """(whose child it is, the child), in the order in which the operator would apply them; no child twice."""
    found: dict[tuple[str, str, str], tuple[str, Manifest]] = {}
    for owner, observed in _Files(verdict).observations():
        for action in plan(observed, 0.0, settings).actions:
            if isinstance(action, Apply | Create):
                child = _shown(action.manifest)
                metadata = child["metadata"]
                key = (str(child["kind"]), str(metadata["namespace"]), str(metadata["name"]))
                found.setdefault(key, (f"child of {owner}", child))
    return list(found.values())


class _Files:
    """The objects of the files as the operator would observe them in an empty cluster."""

    def __init__(self, verdict: Verdict) -> None:
        self._typed = sorted(verdict.typed, key=lambda pair: (pair[0].namespace, pair[0].kind, pair[0].name))

    def observations(self) -> Iterator[tuple[str, Observed]]:
        """Every service, then every router fleet that one refers to or a Router object declares."""
        incomplete: list[str] = []
        for item, resource in self._typed:
            if isinstance(resource, InferenceService):
                store = self._store(item, resource, incomplete)
                held = {} if store is None else _held(engine_references(store))
                quotas = quotas_of(self._all(TENANT.kind, item.namespace))
                yield item.label, ServiceObserved(manifest=_live(item), kv_store=store, store_data=held, quotas=quotas)
        if incomplete:
            raise BadInput(*incomplete)
        for item, resource in self._typed:
            if isinstance(resource, KVStore):
                yield from self._stores(item)
        for namespace, name in self._fleets():
            yield f"{ROUTER.kind}/{name}", self._fleet(namespace, name)

    def _stores(self, item: SourceObject) -> Iterator[tuple[str, Observed]]:
        """As first seen, when the operator makes a token, and with all that the store names."""
        store = _live(item)
        held = _held(store_references(store))
        made = {label: keys for label, keys in held.items() if label != f"{SECRET.kind} {kv_name(item.name)}"}
        quotas = quotas_of(self._all(TENANT.kind, item.namespace))
        yield item.label, StoreObserved(manifest=store, data=made, quotas=quotas, new_token=TOKEN_PLACEHOLDER)
        yield item.label, StoreObserved(manifest=store, data=held, quotas=quotas)

    def _store(self, item: SourceObject, service: InferenceService, incomplete: list[str]) -> Manifest | None:
        ref = service.spec.kv_store_ref
        if ref is None:
            return None
        store = self._one(KV_STORE.kind, item.namespace, ref.name)
        if store is None:
            why = f"KVStore {ref.name!r} decides the engine's arguments; add the file that has it"
            incomplete.append(str(item.finding(("spec", "kvStoreRef", "name"), why)))
        return store

    def _fleets(self) -> list[tuple[str, str]]:
        fleets = {
            (item.namespace, router_of(resource) if isinstance(resource, InferenceService) else item.name)
            for item, resource in self._typed
            if item.kind in (INFERENCE_SERVICE.kind, ROUTER.kind)
        }
        return sorted(fleets, key=lambda fleet: (fleet[0], fleet[1] != DEFAULT_ROUTER, fleet[1]))

    def _fleet(self, namespace: str, name: str) -> FleetObserved:
        return FleetObserved(
            namespace=namespace,
            name=name,
            router=self._one(ROUTER.kind, namespace, name),
            services=self._all(INFERENCE_SERVICE.kind, namespace),
            routers=self._all(ROUTER.kind, namespace),
            tenants=self._all(TENANT.kind, namespace),
            new_token=TOKEN_PLACEHOLDER,
        )

    def _all(self, kind: str, namespace: str) -> tuple[Manifest, ...]:
        return tuple(_live(item) for item, _ in self._of(kind, namespace))

    def _one(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return next((_live(item) for item, _ in self._of(kind, namespace) if item.name == name), None)

    def _of(self, kind: str, namespace: str) -> list[tuple[SourceObject, Resource]]:
        return [pair for pair in self._typed if pair[0].kind == kind and pair[0].namespace == namespace]


def _held(references: Sequence[Reference]) -> dict[str, Mapping[str, str] | None]:
    return {item.label: dict.fromkeys(item.keys, "") for item in references}


def _without_token_hash(manifest: Manifest) -> Manifest:
    """Of the placeholder, which pod templates of a router carry."""
    if manifest["kind"] != DEPLOYMENT.kind:
        return manifest
    template = manifest["spec"]["template"]
    annotations = dict(template["metadata"].get("annotations", {}))
    annotations.pop(ANNOTATION_TOKEN_HASH, None)
    template = {**template, "metadata": {**template["metadata"], "annotations": annotations}}
    return {**manifest, "spec": {**manifest["spec"], "template": template}}


def _live(item: SourceObject) -> Manifest:
    """The object with what the API server would add and the planner reads."""
    metadata = {**item.manifest["metadata"], "namespace": item.namespace, "uid": _NO_UID, "generation": 1}
    return {**item.manifest, "metadata": metadata}


def _shown(manifest: Manifest) -> Manifest:
    """The child without what only a live owner gives it, and without secrets."""
    metadata: dict[str, Any] = {k: v for k, v in manifest["metadata"].items() if k != "ownerReferences"}
    kept = {k: v for k, v in metadata.get("annotations", {}).items() if k != ANNOTATION_INTENT}
    metadata["annotations"] = kept
    if not kept:
        del metadata["annotations"]
    shown = _without_token_hash({**manifest, "metadata": metadata})
    if manifest["kind"] == "Secret" and "data" in manifest:
        shown["stringData"] = dict.fromkeys(shown.pop("data"), TOKEN_PLACEHOLDER)
    return shown
