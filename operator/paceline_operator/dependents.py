"""Which keys a changed object concerns. Reads the cache only; does no I/O.

Label values may be hashed, so the way from a child's label back to its owner's name goes through the objects known.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline_api.kube import DEPLOYMENT, INFERENCE_SERVICE, KV_STORE, ROUTER, SECRET, SERVICE, TENANT, Kind, Manifest
from paceline_api.names import LABEL_ROUTER, LABEL_SERVICE, LABEL_STORE, label_value
from paceline_operator.cache import Cache
from paceline_operator.planner.manifests import dig, place
from paceline_operator.planner.model import FLEET_KEY, SERVICE_KEY, STORE_KEY, TENANT_KEY, Key
from paceline_operator.planner.service import router_of, served_name_of


def keys_for(cache: Cache, kind: Kind, manifest: Manifest) -> set[Key]:
    """Keys to reconcile because this object is new, changed or gone. Call with the old and the new object."""
    namespace, name = place(manifest)
    if kind == INFERENCE_SERVICE:
        return _for_service(cache, namespace, name, manifest)
    if kind == ROUTER:
        return {Key(FLEET_KEY, namespace, name), *_services_on(cache, namespace, name)}
    if kind == TENANT:
        return {Key(TENANT_KEY, namespace, name), *fleets(cache, namespace), *_with_quotas(cache, namespace)}
    if kind == KV_STORE:
        users = (item for item in cache.list(INFERENCE_SERVICE, namespace) if store_of(item) == name)
        return {Key(STORE_KEY, namespace, name), *_service_keys(users)}
    if kind == SECRET:
        return fleets(cache, namespace) | _service_keys(cache.list(INFERENCE_SERVICE, namespace))
    return _for_child(cache, kind, namespace, manifest)


def store_of(service: Manifest) -> str | None:
    """Name of the KVStore that a service refers to."""
    return dig(service, "spec", "kvStoreRef", "name")


def fleets(cache: Cache, namespace: str | None) -> set[Key]:
    """Router fleets that exist, that a service refers to, or that have children left."""
    found = {
        (str(item["metadata"]["namespace"]), str(item["metadata"]["name"])) for item in cache.list(ROUTER, namespace)
    }
    found |= {
        (str(item["metadata"]["namespace"]), router_of(item)) for item in cache.list(INFERENCE_SERVICE, namespace)
    }
    known = {(space, label_value(name)) for space, name in found}
    for kind in (DEPLOYMENT, SERVICE):
        found |= cache.label_values(kind, namespace, LABEL_ROUTER) - known
    return {Key(FLEET_KEY, space, name) for space, name in found}


def every_key(cache: Cache) -> set[Key]:
    """What a resync goes through."""
    keys = fleets(cache, None)
    for kind in (INFERENCE_SERVICE, TENANT, KV_STORE):
        keys |= {
            Key(kind.kind, str(item["metadata"]["namespace"]), str(item["metadata"]["name"]))
            for item in cache.list(kind)
        }
    return keys


def _for_service(cache: Cache, namespace: str, name: str, manifest: Manifest) -> set[Key]:
    keys = {Key(SERVICE_KEY, namespace, name), Key(FLEET_KEY, namespace, router_of(manifest))}
    served = served_name_of(manifest)
    peers = (item for item in cache.list(INFERENCE_SERVICE, namespace) if served_name_of(item) == served)
    keys |= _service_keys(peers)
    for tenant in cache.list(TENANT, namespace):
        if name in (dig(tenant, "spec", "services") or []):
            keys.add(Key(TENANT_KEY, namespace, str(tenant["metadata"]["name"])))
    return keys


def _for_child(cache: Cache, kind: Kind, namespace: str, manifest: Manifest) -> set[Key]:
    labels = manifest["metadata"].get("labels") or {}
    keys: set[Key] = set()
    if LABEL_SERVICE in labels:
        owners = cache.list(INFERENCE_SERVICE, namespace)
        keys |= _service_keys(item for item in owners if label_value(item["metadata"]["name"]) == labels[LABEL_SERVICE])
    if LABEL_STORE in labels:
        stores = (place(item) for item in cache.list(KV_STORE, namespace))
        keys |= {Key(STORE_KEY, *store) for store in stores if label_value(store[1]) == labels[LABEL_STORE]}
    if LABEL_ROUTER in labels:
        keys |= {key for key in fleets(cache, namespace) if label_value(key.name) == labels[LABEL_ROUTER]}
        # A fleet's Deployment and Service decide whether its services are Ready, and their URL.
        if kind in (DEPLOYMENT, SERVICE):
            for key in [key for key in keys if key.kind == FLEET_KEY]:
                keys |= _services_on(cache, namespace, key.name)
    return keys


def _with_quotas(cache: Cache, namespace: str) -> set[Key]:
    """Stores and the services that have one: tenants' quotas are among their settings."""
    stores = {Key(STORE_KEY, *place(item)) for item in cache.list(KV_STORE, namespace)}
    return stores | _service_keys(item for item in cache.list(INFERENCE_SERVICE, namespace) if store_of(item))


def _services_on(cache: Cache, namespace: str, router: str) -> set[Key]:
    return _service_keys(item for item in cache.list(INFERENCE_SERVICE, namespace) if router_of(item) == router)


def _service_keys(services: Iterable[Manifest]) -> set[Key]:
    return {Key(SERVICE_KEY, *place(item)) for item in services}
