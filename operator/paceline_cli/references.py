"""Warns of references between objects that the given files do not resolve.

Only warnings: in a cluster the other object may exist already, or come from another file. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from paceline_api.names import API_KEY_SECRET_KEY, DEFAULT_ROUTER
from paceline_api.v1alpha1 import InferenceService, KVStore, Resource, Router, Tenant
from paceline_cli.inputs import Finding, SourceObject

Typed = list[tuple[SourceObject, Resource]]


def reference_warnings(objects: Iterable[SourceObject], typed: Typed) -> list[Finding]:
    """Every reference that no object of the same namespace in the files answers."""
    names = _Names(list(objects))
    warnings: list[Finding] = []
    for item, resource in typed:
        match resource:
            case InferenceService():
                warnings += _of_service(item, resource, names)
            case Router():
                warnings += _of_router(item, resource, names)
            case Tenant():
                warnings += _of_tenant(item, resource, names)
            case KVStore():
                warnings += _of_store(item, resource, names)
            case _:
                pass
    return warnings + list(_shared_names(typed))


class _Names:
    """Which objects the files have."""

    def __init__(self, objects: list[SourceObject]) -> None:
        self._found = {(item.kind, item.namespace, item.name): item for item in objects}

    def get(self, kind: str, item: SourceObject, name: str) -> SourceObject | None:
        return self._found.get((kind, item.namespace, name))

    def missing(self, kind: str, item: SourceObject, name: str) -> str | None:
        """What to say if `item` refers to an object that the files lack."""
        if self.get(kind, item, name) is not None:
            return None
        return f"{kind} {name!r} is not in these files; it must exist in namespace {item.namespace!r} already"


def _of_service(item: SourceObject, service: InferenceService, names: _Names) -> Iterator[Finding]:
    store = service.spec.kv_store_ref
    if store and (text := names.missing(KVStore.naming.kind, item, store.name)):
        yield item.finding(("spec", "kvStoreRef", "name"), text)
    router = service.spec.routing.router_ref if service.spec.routing else None
    if router and router.name != DEFAULT_ROUTER and (text := names.missing(Router.naming.kind, item, router.name)):
        yield item.finding(("spec", "routing", "routerRef", "name"), text)


def _of_router(item: SourceObject, router: Router, names: _Names) -> Iterator[Finding]:
    tenant = router.spec.anonymous_tenant
    if tenant and (text := names.missing(Tenant.naming.kind, item, tenant)):
        yield item.finding(("spec", "anonymousTenant"), text)


def _of_tenant(item: SourceObject, tenant: Tenant, names: _Names) -> Iterator[Finding]:
    for index, ref in enumerate(tenant.spec.api_key_secret_refs or []):
        path = ("spec", "apiKeySecretRefs", index)
        yield from _of_data(item, path, "Secret", ref.name, [ref.key or API_KEY_SECRET_KEY], names)
    kind = InferenceService.naming.kind
    for index, name in enumerate(tenant.spec.services or []):
        if text := names.missing(kind, item, name):
            yield item.finding(("spec", "services", index), text)
    for index, override in enumerate(tenant.spec.service_overrides or []):
        if text := names.missing(kind, item, override.service):
            yield item.finding(("spec", "serviceOverrides", index, "service"), text)


def _of_data(
    item: SourceObject, path: tuple[str | int, ...], kind: str, name: str, wanted: Sequence[str], names: _Names
) -> Iterator[Finding]:
    """Keys of a Secret or ConfigMap that the object at `path` names."""
    found = names.get(kind, item, name)
    if found is None:
        yield item.finding((*path, "name"), str(names.missing(kind, item, name)))
        return
    keys = {key for part in ("data", "stringData", "binaryData") for key in found.manifest.get(part) or {}}
    where = (*path, "key") if len(wanted) == 1 else path
    for key in wanted:
        if key not in keys:
            yield item.finding(where, f"{kind} {name!r} at {found.place} has no key {key!r}")


def _of_store(item: SourceObject, store: KVStore, names: _Names) -> Iterator[Finding]:
    # Not needed for other kinds.
    from paceline_operator.planner.kv_settings import references_of

    for ref in references_of(store):
        if ref.field:
            yield from _of_data(item, tuple(ref.field.split(".")), ref.kind.kind, ref.name, ref.keys, names)


def router_of(service: InferenceService) -> str:
    """Name of the Router that serves it."""
    routing = service.spec.routing
    return routing.router_ref.name if routing and routing.router_ref else DEFAULT_ROUTER


def _shared_names(typed: Typed) -> Iterator[Finding]:
    """Two services of one router under one model name: clients could not tell them apart."""
    seen: dict[tuple[str, str, str], SourceObject] = {}
    for item, service in typed:
        if not isinstance(service, InferenceService):
            continue
        first = seen.setdefault((item.namespace, router_of(service), service.served_name()), item)
        if first is not item:
            path = ("spec", "model", "servedName") if service.spec.model.served_name else ("metadata", "name")
            yield item.finding(path, f"{service.served_name()!r} is served by {first.label} at {first.place} already")
