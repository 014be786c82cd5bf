"""Plan of a Tenant: no children, only whether what it refers to is there. Pure."""

from __future__ import annotations

from paceline_api.kube import Manifest
from paceline_api.names import API_KEY_SECRET_KEY
from paceline_api.v1alpha1 import Tenant
from paceline_api.validation import InvalidObject, parse
from paceline_operator.planner.manifests import being_deleted
from paceline_operator.planner.model import Plan, TenantObserved
from paceline_operator.planner.status import Verdict, reconciling, stalled, status_change

# Secrets are not watched: a missing one is looked for again after this long.
SECRET_RECHECK_S = 10.0


def plan_tenant(observed: TenantObserved, now: float) -> Plan:
    if being_deleted(observed.manifest):
        return Plan()
    try:
        tenant = parse(observed.manifest)
    except InvalidObject as error:
        return _finish(observed.manifest, _invalid(error), now)
    assert isinstance(tenant, Tenant)
    missing = _missing_secret(tenant, observed) or _missing_service(tenant, observed)
    verdict = missing or Verdict(True, "Valid", "everything that the tenant refers to is there")
    return _finish(observed.manifest, verdict, now, None if missing is None else SECRET_RECHECK_S)


def _invalid(error: InvalidObject) -> Verdict:
    return stalled("InvalidSpec", f"{error}; correct the field and apply again")


def _missing_secret(tenant: Tenant, observed: TenantObserved) -> Verdict | None:
    for index, reference in enumerate(tenant.spec.api_key_secret_refs or []):
        field = f"spec.apiKeySecretRefs[{index}]"
        keys = observed.secret_keys.get(reference.name)
        key = reference.key or API_KEY_SECRET_KEY
        if keys is None:
            message = f"{field}: there is no Secret {reference.name} in this namespace; create it"
            return reconciling("SecretNotFound", message, warning=True)
        if key not in keys:
            message = f"{field}: Secret {reference.name} has no key {key} with a value; add it"
            return reconciling("SecretKeyNotFound", message, warning=True)
    return None


def _missing_service(tenant: Tenant, observed: TenantObserved) -> Verdict | None:
    for index, name in enumerate(tenant.spec.services or []):
        if name not in observed.services:
            message = f"spec.services[{index}]: there is no InferenceService {name} in this namespace; create it"
            return reconciling("ServiceNotFound", message, warning=True)
    return None


def _finish(manifest: Manifest, verdict: Verdict, now: float, recheck_s: float | None = None) -> Plan:
    change = status_change(manifest, verdict, [], {}, now)
    return Plan(status=change.manifest, urgent=change.urgent, events=change.events, requeue_after_s=recheck_s)
