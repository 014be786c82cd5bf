"""Turns checked files into the objects that the local API gets: one namespace, kinds that a laptop runs. Pure."""

from __future__ import annotations

import base64
from typing import Any

from paceline_api.kube import CONFIG_MAP, INFERENCE_SERVICE, KV_STORE, ROUTER, SECRET, TENANT, Manifest
from paceline_api.v1alpha1 import InferenceService, Resource, Router
from paceline_cli.errors import BadInput
from paceline_cli.inputs import SourceObject
from paceline_cli.references import router_of

_KINDS = (SECRET, CONFIG_MAP, KV_STORE, TENANT, ROUTER, INFERENCE_SERVICE)
_ORDER = {kind.kind: number for number, kind in enumerate(_KINDS)}
_NAMESPACE_KIND = "Namespace"

Typed = list[tuple[SourceObject, Resource]]


def local_objects(objects: list[SourceObject], typed: Typed) -> tuple[str, list[Manifest]]:
    """(namespace, objects in the order to apply). Raises BadInput for what a laptop does not run.

    Namespace objects are left out: there is one namespace, that of the objects.
    """
    wanted = [item for item in objects if item.kind != _NAMESPACE_KIND]
    known = {(kind.api_version, kind.kind) for kind in _KINDS}
    problems = [
        str(item.finding(("kind",), f"`paceline up` does not run {item.kind} objects; keep it in a file of its own"))
        for item in wanted
        if (item.manifest.get("apiVersion"), item.kind) not in known
    ]
    if not problems and not any(isinstance(resource, InferenceService) for _, resource in typed):
        problems.append("the files hold no InferenceService: there is nothing to run")
    problems += _other_namespaces(wanted)
    if problems:
        raise BadInput(*problems)
    namespace = wanted[0].namespace
    ordered = sorted(wanted, key=lambda item: _ORDER[item.kind])
    return namespace, [_stored(item, namespace) for item in ordered]


def _other_namespaces(items: list[SourceObject]) -> list[str]:
    """One line for each namespace that is not the first object's."""
    first_of: dict[str, SourceObject] = {}
    for item in items:
        first_of.setdefault(item.namespace, item)
    if not first_of:
        return []
    first, *others = first_of.values()
    why = f"`paceline up` runs one namespace, and {first.label} is in {first.namespace!r}; make them equal"
    return [str(other.finding(("metadata", "namespace"), why)) for other in others]


def _stored(item: SourceObject, namespace: str) -> Manifest:
    """With what the API server would fill in, and without what it would ignore."""
    metadata = {**item.manifest["metadata"], "namespace": namespace}
    manifest: dict[str, Any] = {key: value for key, value in item.manifest.items() if key != "status"}
    manifest["metadata"] = metadata
    if item.kind == SECRET.kind and manifest.get("stringData"):
        texts = manifest.pop("stringData")
        encoded = {key: base64.b64encode(str(text).encode()).decode() for key, text in texts.items()}
        manifest["data"] = {**(manifest.get("data") or {}), **encoded}
    return manifest


def router_names(typed: Typed) -> list[str]:
    """Router fleets that will exist; the one that gets the wanted port comes first: the first service's."""
    referred = [router_of(resource) for _, resource in typed if isinstance(resource, InferenceService)]
    declared = [item.name for item, resource in typed if isinstance(resource, Router)]
    return list(dict.fromkeys(referred + declared))


def anonymous_router(typed: Typed, name: str) -> bool:
    """Whether that Router lets requests without a key in, as the tenant it names."""
    return any(
        isinstance(resource, Router) and item.name == name and resource.spec.anonymous_tenant is not None
        for item, resource in typed
    )
