"""From cache and a few GETs to the frozen snapshot that the planner reads. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline_api.conditions import find
from paceline_api.kube import (
    DEPLOYMENT,
    INFERENCE_SERVICE,
    KV_STORE,
    POD,
    ROUTER,
    SECRET,
    SERVICE,
    TENANT,
    KubeClient,
    Manifest,
)
from paceline_api.names import (
    ANNOTATION_CONFIG_HASH,
    INTERNAL_TOKEN_SECRET,
    LABEL_ROUTER,
    LABEL_SERVICE,
    LABEL_STORE,
    label_value,
    router_name,
)
from paceline_operator.cache import Cache
from paceline_operator.dependents import store_of
from paceline_operator.feed import CHILD_KINDS
from paceline_operator.planner.kv_settings import Reference, engine_references, held_by, quotas_of, store_references
from paceline_operator.planner.manifests import being_deleted, dig
from paceline_operator.planner.model import (
    FLEET_KEY,
    SERVICE_KEY,
    TENANT_KEY,
    FleetObserved,
    Key,
    Observed,
    PodFact,
    RouterFact,
    ServiceObserved,
    StoreObserved,
    TenantObserved,
)
from paceline_operator.planner.router import fleet_url, key_secret_names
from paceline_operator.planner.service import router_of
from paceline_operator.planner.token import token_of, without_data

PROBLEM_LENGTH_MAX = 256
# Reasons for which a container has not started; ContainerCreating and PodInitializing are just young.
_YOUNG = frozenset({"ContainerCreating", "PodInitializing"})


class Observer:
    """Takes snapshots. `new_token` gives a fresh secret token each time it is called."""

    def __init__(self, client: KubeClient, cache: Cache, new_token: Callable[[], str]) -> None:
        self._client = client
        self._cache = cache
        self._new_token = new_token

    def observe(self, key: Key) -> Observed | None:
        """None where the object is gone. A fleet is always observed: it may have children left to delete."""
        if key.kind == FLEET_KEY:
            return self._fleet(key)
        if key.kind == SERVICE_KEY:
            manifest = self._cache.get(INFERENCE_SERVICE, key.namespace, key.name)
            return None if manifest is None else self._service(key, manifest)
        if key.kind == TENANT_KEY:
            manifest = self._cache.get(TENANT, key.namespace, key.name)
            return None if manifest is None else self._tenant(key, manifest)
        manifest = self._cache.get(KV_STORE, key.namespace, key.name)
        return None if manifest is None else self._store(key, manifest)

    def _service(self, key: Key, manifest: Manifest) -> ServiceObserved:
        label = label_value(key.name)
        router = router_of(manifest)
        store_name = store_of(manifest)
        store = self._cache.get(KV_STORE, key.namespace, store_name) if store_name else None
        peers = tuple(
            item
            for item in self._cache.list(INFERENCE_SERVICE, key.namespace)
            if item["metadata"]["name"] != key.name and router_of(item) == router and not being_deleted(item)
        )
        return ServiceObserved(
            manifest=manifest,
            children=self._children(key.namespace, LABEL_SERVICE, label),
            pods=self._pods(key.namespace, LABEL_SERVICE, label),
            router=self._router_fact(key.namespace, router),
            kv_store=store,
            quotas=quotas_of(self._cache.list(TENANT, key.namespace)) if store else {},
            store_data=self._held(store, engine_references) if store else {},
            peers=peers,
            token=token_of(self._cache.get(SECRET, key.namespace, INTERNAL_TOKEN_SECRET)),
        )

    def _fleet(self, key: Key) -> FleetObserved:
        label = label_value(key.name)
        token = self._client.get(SECRET, key.namespace, INTERNAL_TOKEN_SECRET)
        return FleetObserved(
            namespace=key.namespace,
            name=key.name,
            router=self._cache.get(ROUTER, key.namespace, key.name),
            services=tuple(self._cache.list(INFERENCE_SERVICE, key.namespace)),
            routers=tuple(self._cache.list(ROUTER, key.namespace)),
            tenants=tuple(self._cache.list(TENANT, key.namespace)),
            children=self._children(key.namespace, LABEL_ROUTER, label),
            pods=self._pods(key.namespace, LABEL_ROUTER, label),
            token_secret=None if token is None else without_data(token),
            new_token=self._new_token() if token is None else "",
        )

    def _tenant(self, key: Key, manifest: Manifest) -> TenantObserved:
        keys: dict[str, frozenset[str] | None] = {}
        for name in key_secret_names((manifest,)):
            secret = self._client.get(SECRET, key.namespace, name)
            data = (secret or {}).get("data") or {}
            keys[name] = None if secret is None else frozenset(item for item, value in data.items() if value)
        services = {str(item["metadata"]["name"]) for item in self._cache.list(INFERENCE_SERVICE, key.namespace)}
        return TenantObserved(manifest=manifest, secret_keys=keys, services=frozenset(services))

    def _store(self, key: Key, manifest: Manifest) -> StoreObserved:
        label = label_value(key.name)
        return StoreObserved(
            manifest=manifest,
            children=self._children(key.namespace, LABEL_STORE, label),
            pods=self._pods(key.namespace, LABEL_STORE, label),
            quotas=quotas_of(self._cache.list(TENANT, key.namespace)),
            data=self._held(manifest, store_references),
            new_token=self._new_token(),
        )

    def _held(
        self, store: Manifest, references: Callable[[Manifest], Sequence[Reference]]
    ) -> dict[str, Mapping[str, str] | None]:
        """What the objects hold that a store names. Users' Secrets are not watched: each is read by its name."""
        namespace = str(store["metadata"]["namespace"])
        return {item.label: held_by(self._client.get(item.kind, namespace, item.name)) for item in references(store)}

    def _children(self, namespace: str, label: str, value: str) -> tuple[Manifest, ...]:
        return tuple(item for kind in CHILD_KINDS for item in self._cache.labelled(kind, namespace, label, value))

    def _pods(self, namespace: str, label: str, value: str) -> tuple[PodFact, ...]:
        pods = self._cache.labelled(POD, namespace, label, value)
        return tuple(pod_fact(pod) for pod in pods if not being_deleted(pod))

    def _router_fact(self, namespace: str, router: str) -> RouterFact:
        # From the Deployment, whose every change is also the services' business; pods of a router are not.
        deployment = self._cache.get(DEPLOYMENT, namespace, router_name(router))
        ready = bool(dig(deployment, "status", "readyReplicas"))
        service = self._cache.get(SERVICE, namespace, router_name(router))
        return RouterFact(ready, fleet_url(namespace, router, service))


def pod_fact(pod: Manifest) -> PodFact:
    """What the planner needs of a (trimmed) pod."""
    conditions = dig(pod, "status", "conditions") or []
    return PodFact(
        name=str(pod["metadata"]["name"]),
        config_hash=str(dig(pod, "metadata", "annotations", ANNOTATION_CONFIG_HASH) or ""),
        ready=(find(conditions, "Ready") or {}).get("status") == "True",
        problem=_problem(pod, conditions),
    )


def _problem(pod: Manifest, conditions: Sequence[Manifest]) -> tuple[str, str] | None:
    """(reason, message), without anything that changes while the problem stays the same."""
    if dig(pod, "status", "phase") == "Failed":
        return str(dig(pod, "status", "reason") or "Failed"), _short(dig(pod, "status", "message"))
    scheduled = find(conditions, "PodScheduled") or {}
    if scheduled.get("status") == "False":
        return str(scheduled.get("reason") or "Unschedulable"), _short(scheduled.get("message"))
    for container in dig(pod, "status", "containerStatuses") or []:
        waiting = dig(container, "state", "waiting")
        ended = dig(container, "state", "terminated") or dig(container, "lastState", "terminated")
        if waiting is not None and waiting.get("reason") not in _YOUNG:
            reason = str(waiting.get("reason") or "Waiting")
            return reason, _ended(ended) if ended else _short(waiting.get("message"))
        if ended is not None and dig(container, "state", "running") is None:
            return str(ended.get("reason") or "Error"), _ended(ended)
    return None


def _ended(terminated: Manifest) -> str:
    text = f"exit code {terminated.get('exitCode')}"
    last = _short(terminated.get("message"))
    return f"{text}: {last}" if last else text


def _short(text: object) -> str:
    """The last line that says something: of a log's tail, that is the error."""
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    return lines[-1][:PROBLEM_LENGTH_MAX] if lines else ""
