"""What the router keeps of each API object: a few typed fields, read leniently.

The API server has validated these objects already, perhaps against a newer CRD than this router knows, so unknown
fields are ignored here and an unreadable optional field falls back to "not set". What grants access is read strictly.
Pure; must not import I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, get_args

from paceline_api import names, wire
from paceline_api.kube import Manifest
from paceline_api.quantity import parse_duration_s
from paceline_api.runtimes import PACELINE
from paceline_api.slo import DEFAULT_SHARE, Targets
from paceline_router.policy import Policy

log = logging.getLogger(__name__)

DEFAULT_POLICY: Policy = "leastLoaded"
_POLICIES: dict[str, Policy] = {name: name for name in get_args(Policy)}


class EndpointId(NamedTuple):
    """One life of one replica. The pod's name is part of it: a successor at the same address starts from zero."""

    pod: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A replica's http port as an EndpointSlice states it. `runtime` is the engine software behind it."""

    id: EndpointId
    ready: bool
    terminating: bool
    runtime: str = PACELINE

    @property
    def serving(self) -> bool:
        """Whether it may get new requests."""
        return self.ready and not self.terminating

    @property
    def base_url(self) -> str:
        host = f"[{self.id.address}]" if ":" in self.id.address else self.id.address
        return f"http://{host}:{self.id.port}"


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """An InferenceService. `created` is Unix seconds, 0 when unknown."""

    name: str
    served_name: str
    router: str
    policy: Policy
    targets: Targets
    created: int


@dataclass(frozen=True, slots=True)
class KeyRef:
    """Where an API key is: a Secret of the namespace and a key in its data."""

    secret: str
    key: str


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """A Tenant. `services` None allows every service of the namespace."""

    name: str
    services: frozenset[str] | None = None
    targets: Targets | None = None
    overrides: Mapping[str, Targets] = field(default_factory=dict[str, Targets])
    key_refs: tuple[KeyRef, ...] = ()

    def may_use(self, service: str) -> bool:
        return self.services is None or service in self.services

    def targets_for(self, service: ServiceRecord) -> Targets:
        """The promise that counts: for this service, else the tenant's, else the service's own."""
        return self.overrides.get(service.name) or self.targets or service.targets


@dataclass(frozen=True, slots=True)
class RouterRecord:
    """The Router object, or its defaults."""

    anonymous_tenant: str | None = None
    max_body_bytes: int = wire.BODY_BYTES_MAX


@dataclass(frozen=True, slots=True)
class SliceRecord:
    """One EndpointSlice of a Service."""

    service: str
    endpoints: tuple[Endpoint, ...]


def read_service(manifest: Manifest) -> ServiceRecord:
    spec = _dict(manifest.get("spec"))
    routing = _dict(spec.get("routing"))
    name = str(manifest["metadata"]["name"])
    return ServiceRecord(
        name=name,
        served_name=str(_dict(spec.get("model")).get("servedName") or name),
        router=str(_dict(routing.get("routerRef")).get("name") or names.DEFAULT_ROUTER),
        policy=_policy(name, routing.get("policy")),
        targets=_targets(name, spec.get("slo")) or Targets(),
        created=_unix_time(manifest["metadata"].get("creationTimestamp")),
    )


def read_tenant(manifest: Manifest) -> TenantRecord | None:
    """None for a tenant that is being deleted: its keys are void from that moment."""
    if manifest["metadata"].get("deletionTimestamp"):
        return None
    spec = _dict(manifest.get("spec"))
    name = str(manifest["metadata"]["name"])
    services = spec.get("services")
    overrides = [_dict(item) for item in spec.get("serviceOverrides") or ()]
    return TenantRecord(
        name=name,
        services=None if services is None else frozenset(str(service) for service in services),
        targets=_targets(name, spec.get("slo")),
        overrides={str(item["service"]): _targets(name, item.get("slo")) or Targets() for item in overrides},
        key_refs=tuple(
            KeyRef(str(ref["name"]), str(ref.get("key") or names.API_KEY_SECRET_KEY))
            for ref in spec.get("apiKeySecretRefs") or ()
        ),
    )


def read_router(manifest: Manifest) -> RouterRecord:
    spec = _dict(manifest.get("spec"))
    anonymous = spec.get("anonymousTenant")
    return RouterRecord(
        anonymous_tenant=str(anonymous) if anonymous else None,
        max_body_bytes=int(spec.get("maxBodyBytes") or wire.BODY_BYTES_MAX),
    )


def read_slice(manifest: Manifest) -> SliceRecord:
    labels = _dict(manifest["metadata"].get("labels"))
    service = str(labels.get(names.LABEL_SLICE_SERVICE, ""))
    # Kubernetes copies a Service's labels onto its slices.
    runtime = str(labels.get(names.LABEL_RUNTIME, PACELINE))
    ports = {str(port.get("name")): port.get("port") for port in manifest.get("ports") or ()}
    port = ports.get(names.PORT_HTTP)
    if port is None or manifest.get("addressType") == "FQDN":
        return SliceRecord(service, ())
    endpoints = [_endpoint(_dict(item), int(port), runtime) for item in manifest.get("endpoints") or ()]
    return SliceRecord(service, tuple(endpoint for endpoint in endpoints if endpoint is not None))


def _endpoint(item: dict[str, Any], port: int, runtime: str) -> Endpoint | None:
    addresses = item.get("addresses") or ()
    if not addresses:
        return None
    conditions = _dict(item.get("conditions"))
    # The API: a condition that is not stated reads as ready and not terminating.
    return Endpoint(
        EndpointId(str(_dict(item.get("targetRef")).get("name", "")), str(addresses[0]), port),
        ready=conditions.get("ready") is not False,
        terminating=conditions.get("terminating") is True,
        runtime=runtime,
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _policy(service: str, value: object) -> Policy:
    if value is None:
        return DEFAULT_POLICY
    policy = _POLICIES.get(str(value))
    if policy is None:
        log.warning("InferenceService %s: routing policy %s is unknown here, using %s", service, value, DEFAULT_POLICY)
        return DEFAULT_POLICY
    return policy


def _targets(owner: str, slo: object) -> Targets | None:
    if not isinstance(slo, dict):
        return None
    return Targets(
        ttft_s=_duration_s(owner, slo.get("ttft")),
        tpot_s=_duration_s(owner, slo.get("tpot")),
        e2e_s=_duration_s(owner, slo.get("e2e")),
        share=_share(owner, slo.get("target")),
    )


def _share(owner: str, percent: object) -> float:
    if percent is None:
        return DEFAULT_SHARE
    try:
        return float(str(percent)) / 100
    except ValueError:
        log.warning("%s: SLO target %s is not a percentage, using %g", owner, percent, DEFAULT_SHARE * 100)
        return DEFAULT_SHARE


def _duration_s(owner: str, value: object) -> float | None:
    if value is None:
        return None
    try:
        return parse_duration_s(str(value))
    except ValueError as error:
        log.warning("%s: an SLO limit is not judged: %s", owner, error)
        return None


def _unix_time(value: object) -> int:
    try:
        return int(datetime.fromisoformat(str(value)).timestamp())
    except ValueError:
        return 0
