"""The small part of the Kubernetes API that Paceline uses, as a Protocol.

Two implementations stand behind it: the official client (`paceline_kube`) and the in-memory object store of the
local runtime (`paceline_cli.local`). Calls are synchronous and safe to make from several threads. Objects are plain
dicts in the API's own JSON shape. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Manifest = dict[str, Any]
EventType = Literal["ADDED", "MODIFIED", "DELETED"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind as the API addresses it. `group` is empty for the core group."""

    group: str
    version: str
    kind: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


INFERENCE_SERVICE = Kind("paceline.dev", "v1alpha1", "InferenceService", "inferenceservices")
ROUTER = Kind("paceline.dev", "v1alpha1", "Router", "routers")
TENANT = Kind("paceline.dev", "v1alpha1", "Tenant", "tenants")
KV_STORE = Kind("paceline.dev", "v1alpha1", "KVStore", "kvstores")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
DAEMON_SET = Kind("apps", "v1", "DaemonSet", "daemonsets")
SERVICE = Kind("", "v1", "Service", "services")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SECRET = Kind("", "v1", "Secret", "secrets")
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
POD = Kind("", "v1", "Pod", "pods")
EVENT = Kind("", "v1", "Event", "events")
ROLE = Kind("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
POD_DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
ENDPOINT_SLICE = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")

KINDS = (
    INFERENCE_SERVICE,
    ROUTER,
    TENANT,
    KV_STORE,
    DEPLOYMENT,
    DAEMON_SET,
    SERVICE,
    CONFIG_MAP,
    SECRET,
    SERVICE_ACCOUNT,
    POD,
    EVENT,
    ROLE,
    ROLE_BINDING,
    POD_DISRUPTION_BUDGET,
    ENDPOINT_SLICE,
    LEASE,
)
_BY_TYPE = {(kind.api_version, kind.kind): kind for kind in KINDS}


def kind_of(manifest: Manifest) -> Kind:
    """The Kind of a manifest by its apiVersion and kind; ValueError names an unknown pair."""
    pair = (str(manifest.get("apiVersion")), str(manifest.get("kind")))
    try:
        return _BY_TYPE[pair]
    except KeyError:
        raise ValueError(f"kind {pair[1]} of apiVersion {pair[0]} is not one that Paceline handles") from None


class KubeError(Exception):
    """The API refused a call. `status` is the HTTP status, `reason` the API's CamelCase reason."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason} ({status}): {message}")
        self.status = status
        self.reason = reason
        self.message = message


class Conflict(KubeError):
    """409: another writer was first, a precondition failed, or the object exists already."""


class Expired(KubeError):
    """410: the resourceVersion to watch from is too old; list again."""


class Invalid(KubeError):
    """400 or 422: the object was refused by validation."""


class WatchEvent(NamedTuple):
    type: EventType
    object: Manifest


class ObjectList(NamedTuple):
    """Items with apiVersion and kind filled in, and the resourceVersion to watch from."""

    items: list[Manifest]
    resource_version: str


class KubeClient(Protocol):
    """Reads answer None for an object that is not there; all other refusals raise a KubeError."""

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None: ...

    def list(
        self, kind: Kind, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
    ) -> ObjectList:
        """All objects of a namespace, or of every namespace for None."""
        ...

    def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        timeout_s: int = 300,
    ) -> Iterator[WatchEvent]:
        """Changes after `resource_version`; ends after `timeout_s`; raises Expired when that version is gone."""
        ...

    def apply(self, manifest: Manifest, *, field_manager: str) -> Manifest:
        """Forced server-side apply of complete intent. An apply that changes nothing writes nothing."""
        ...

    def apply_status(self, manifest: Manifest, *, field_manager: str) -> Manifest:
        """Forced server-side apply through the status subresource."""
        ...

    def create(self, manifest: Manifest) -> Manifest:
        """Raises Conflict if the object exists."""
        ...

    def replace(self, manifest: Manifest) -> Manifest:
        """PUT; with metadata.resourceVersion set it raises Conflict when another writer was first."""
        ...

    def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None) -> bool:
        """Background deletion. False if it was not there; Conflict if `uid` names another object."""
        ...
