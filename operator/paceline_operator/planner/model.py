"""What the planner reads (`Observed`) and what it answers (`Plan`), as frozen records.

Manifests inside are plain dicts in the API's JSON shape and must not be changed by anyone who holds them. Must not
import anything that does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline_api.kube import INFERENCE_SERVICE, KV_STORE, ROUTER, TENANT, Kind, Manifest

SERVICE_KEY = INFERENCE_SERVICE.kind
FLEET_KEY = ROUTER.kind
TENANT_KEY = TENANT.kind
STORE_KEY = KV_STORE.kind


class Key(NamedTuple):
    """What one reconcile is about. A `Router` key is the router fleet of that name, with or without a Router object."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The operator's settings that reach manifests. Images may carry a tag or a digest."""

    image_engine: str = "paceline-engine:0.1.0"
    image_router: str = "paceline-router:0.1.0"
    image_kvstore: str = "paceline-kvstore:0.1.0"


@dataclass(frozen=True, slots=True)
class PodFact:
    """One pod of a fleet. `problem` is why its container does not run, as (CamelCase reason, message)."""

    name: str
    config_hash: str
    ready: bool
    problem: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class RouterFact:
    """What a service needs to know of its router fleet."""

    ready: bool = False
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """The namespace's internal token. `hash` is empty
    where no usable token is known, `problem` is (reason, message) of why an operator knows none."""

    hash: str = ""
    problem: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceObserved:
    """An InferenceService. `peers` are the other services on its router, `kv_store` the object its ref names.

    `store_data`: what the Secrets and ConfigMaps hold that the store names, by label; None for one that is not there.
    `quotas`: bytes of stored KV by tenant.
    """

    manifest: Manifest
    children: tuple[Manifest, ...] = ()
    pods: tuple[PodFact, ...] = ()
    router: RouterFact = RouterFact()
    kv_store: Manifest | None = None
    quotas: Mapping[str, int] = field(default_factory=dict[str, int])
    store_data: Mapping[str, Mapping[str, str] | None] = field(default_factory=dict[str, "Mapping[str, str] | None"])
    peers: tuple[Manifest, ...] = ()
    token: Token = Token()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObserved:
    """A router fleet and everything of its namespace that it depends on.

    `services` and `routers` are all of the namespace: they own the namespace's internal token together.
    `token_secret` is that Secret with a hash in place of its data. `new_token` is used only where there is no such
    Secret.
    """

    namespace: str
    name: str
    router: Manifest | None = None
    services: tuple[Manifest, ...] = ()
    routers: tuple[Manifest, ...] = ()
    tenants: tuple[Manifest, ...] = ()
    children: tuple[Manifest, ...] = ()
    pods: tuple[PodFact, ...] = ()
    token_secret: Manifest | None = None
    new_token: str = ""
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantObserved:
    """A Tenant. `secret_keys` has the non-empty keys of every Secret it refers to, None where there is none."""

    manifest: Manifest
    secret_keys: Mapping[str, frozenset[str] | None] = field(default_factory=dict[str, "frozenset[str] | None"])
    services: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreObserved:
    """A KVStore, and the children of its node server. `data` and `quotas` as in
    `ServiceObserved`.

    `new_token` is used only where the server's token is the operator's to make and there is none.
    """

    manifest: Manifest
    children: tuple[Manifest, ...] = ()
    pods: tuple[PodFact, ...] = ()
    quotas: Mapping[str, int] = field(default_factory=dict[str, int])
    data: Mapping[str, Mapping[str, str] | None] = field(default_factory=dict[str, "Mapping[str, str] | None"])
    new_token: str = ""
    errors: tuple[str, ...] = ()


Observed = ServiceObserved | FleetObserved | TenantObserved | StoreObserved


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of the complete intent. `known` is False where no such child was observed."""

    manifest: Manifest
    known: bool = True


@dataclass(frozen=True, slots=True)
class Create:
    """Create once; an object that is there already is left alone."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete exactly the object with this uid."""

    kind: Kind
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Strip:
    """Take out what others have added to the pod template of a workload; `manifest` is its complete intent."""

    manifest: Manifest
    added: tuple[str, ...]


Action = Apply | Create | Delete | Strip


@dataclass(frozen=True, slots=True)
class EventNote:
    """An Event to record about the object of the plan. `warning` False is type Normal."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do. `status` is a manifest for the status subresource, None where nothing would change.

    `urgent` is False where only figures or messages of the status changed: such a write may wait.
    """

    actions: tuple[Action, ...] = ()
    status: Manifest | None = None
    urgent: bool = True
    events: tuple[EventNote, ...] = ()
    requeue_after_s: float | None = None

    @property
    def empty(self) -> bool:
        return not self.actions and self.status is None and not self.events
