"""The `paceline.dev/v1alpha1` API: InferenceService, Router, Tenant and KVStore as pydantic models.

The models are the one source of the CRDs (`paceline_api.crdgen`), of `paceline validate` and of what the planner
reads. They refuse unknown fields, and refuse fields whose feature is not built yet with a message that says so.
"""

from paceline_api.v1alpha1.base import Condition, Resource
from paceline_api.v1alpha1.inference_service import (
    InferenceService,
    InferenceServiceSpec,
    InferenceServiceStatus,
)
from paceline_api.v1alpha1.kv_store import KVStore, KVStoreSpec, KVStoreStatus
from paceline_api.v1alpha1.router import Router, RouterSpec, RouterStatus
from paceline_api.v1alpha1.tenant import Tenant, TenantSpec, TenantStatus

RESOURCES: tuple[type[Resource], ...] = (InferenceService, Router, Tenant, KVStore)

__all__ = [
    "RESOURCES",
    "Condition",
    "InferenceService",
    "InferenceServiceSpec",
    "InferenceServiceStatus",
    "KVStore",
    "KVStoreSpec",
    "KVStoreStatus",
    "Resource",
    "Router",
    "RouterSpec",
    "RouterStatus",
    "Tenant",
    "TenantSpec",
    "TenantStatus",
]
