"""The router's view of its namespace at one moment: immutable, built whole, swapped in one assignment. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline_api import names
from paceline_router.auth import Digest, KeyIndex, index_keys
from paceline_router.records import Endpoint, EndpointId, RouterRecord, ServiceRecord, SliceRecord, TenantRecord


@dataclass(frozen=True, slots=True)
class Model:
    """A served name: its service and all known endpoints in a stable order."""

    service: ServiceRecord
    endpoints: tuple[Endpoint, ...] = ()
    serving: tuple[Endpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Models by served name, tenants by name. `complete` once every initial list is in it."""

    models: Mapping[str, Model] = field(default_factory=dict[str, Model])
    tenants: Mapping[str, TenantRecord] = field(default_factory=dict[str, TenantRecord])
    keys: KeyIndex = field(default_factory=lambda: KeyIndex({}))
    router: RouterRecord = field(default_factory=RouterRecord)
    complete: bool = False

    def models_of(self, tenant: TenantRecord) -> list[Model]:
        """What the tenant may use, by served name."""
        return [model for _, model in sorted(self.models.items()) if tenant.may_use(model.service.name)]


@dataclass(slots=True)
class Observed:
    """Everything discovery knows, keyed as the API keys it. `secrets`: Secret name to key digests by data key."""

    services: dict[str, ServiceRecord] = field(default_factory=dict[str, ServiceRecord])
    routers: dict[str, RouterRecord] = field(default_factory=dict[str, RouterRecord])
    tenants: dict[str, TenantRecord] = field(default_factory=dict[str, TenantRecord])
    slices: dict[str, SliceRecord] = field(default_factory=dict[str, SliceRecord])
    secrets: dict[str, dict[str, Digest]] = field(default_factory=dict[str, dict[str, Digest]])


def build(observed: Observed, router_name: str, *, complete: bool) -> tuple[Snapshot, list[str]]:
    """The snapshot for the router of that name, and one line for each thing a person should mend."""
    models, problems = _models(observed, router_name)
    owners: list[tuple[str, Digest]] = []
    for tenant in observed.tenants.values():
        for ref in tenant.key_refs:
            found = observed.secrets.get(ref.secret, {}).get(ref.key)
            if found is not None:
                owners.append((tenant.name, found))
            elif complete:
                problems.append(
                    f"tenant {tenant.name}: Secret {ref.secret} has no usable key {ref.key}; that API key opens nothing"
                )
    keys, shared = index_keys(owners)
    snapshot = Snapshot(
        models=models,
        tenants=dict(observed.tenants),
        keys=keys,
        router=observed.routers.get(router_name, RouterRecord()),
        complete=complete,
    )
    return snapshot, problems + shared


def _models(observed: Observed, router_name: str) -> tuple[dict[str, Model], list[str]]:
    by_service: dict[str, list[Endpoint]] = {}
    for record in observed.slices.values():
        by_service.setdefault(record.service, []).extend(record.endpoints)
    models: dict[str, Model] = {}
    problems: list[str] = []
    ours = [service for service in observed.services.values() if service.router == router_name]
    for service in sorted(ours, key=lambda service: (service.created, service.name)):
        holder = models.get(service.served_name)
        if holder is not None:
            problems.append(
                f"InferenceService {service.name}: the model name {service.served_name} belongs to the older "
                f"{holder.service.name}; set another spec.model.servedName"
            )
            continue
        endpoints = _merged(by_service.get(names.engine_name(service.name), ()))
        serving = tuple(endpoint for endpoint in endpoints if endpoint.serving)
        models[service.served_name] = Model(service, endpoints, serving)
    return models, problems


def _merged(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """One entry a pod: slices may overlap while the control plane moves an endpoint, and list IPv4 and IPv6 apart.

    Of two views of one address the less serving one counts; of two addresses of one pod IPv4 does.
    """
    by_id: dict[EndpointId, Endpoint] = {}
    for endpoint in endpoints:
        known = by_id.get(endpoint.id)
        if known is None or known.serving:
            by_id[endpoint.id] = endpoint
    by_pod: dict[object, Endpoint] = {}
    for key in sorted(by_id, key=lambda key: (":" in key.address, key)):
        by_pod.setdefault(key.pod or key, by_id[key])
    return tuple(sorted(by_pod.values(), key=lambda endpoint: endpoint.id))
