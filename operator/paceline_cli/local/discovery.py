"""Discovery documents of the local API: which groups, versions and kinds it serves. Pure."""

from paceline_api.kube import KINDS, Kind, Manifest
from paceline_api.v1alpha1 import RESOURCES
from paceline_cli.local.rules import has_status

_CORE_SHORT_NAMES = {
    "ConfigMap": "cm",
    "DaemonSet": "ds",
    "Deployment": "deploy",
    "Event": "ev",
    "Pod": "po",
    "PodDisruptionBudget": "pdb",
    "Service": "svc",
    "ServiceAccount": "sa",
}
_SHORT_NAMES = _CORE_SHORT_NAMES | {resource.naming.kind: resource.naming.short for resource in RESOURCES}
_OURS = frozenset(resource.naming.kind for resource in RESOURCES)
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_BY_PLURAL = {(kind.group, kind.version, kind.plural): kind for kind in KINDS}


def find(group: str, version: str, plural: str) -> Kind | None:
    """The kind behind a path."""
    return _BY_PLURAL.get((group, version, plural))


def document(path: str) -> Manifest | None:
    """The discovery document at a path, None for any other path."""
    words = [word for word in path.split("/") if word]
    groups = sorted({kind.group for kind in KINDS if kind.group})
    if words == ["version"]:
        return {"major": "1", "minor": "36", "gitVersion": "v1.36.0+paceline.local", "platform": "local"}
    if words in (["healthz"], ["readyz"], ["livez"]):
        return {"status": "ok"}
    if words == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if words == ["apis"]:
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(group) for group in groups]}
    if words == ["api", "v1"]:
        return _resources("", "v1")
    if len(words) == 2 and words[0] == "apis" and words[1] in groups:
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(words[1])}
    if len(words) == 3 and words[0] == "apis" and any((k.group, k.version) == tuple(words[1:]) for k in KINDS):
        return _resources(words[1], words[2])
    return None


def _group(group: str) -> Manifest:
    versions = sorted({kind.version for kind in KINDS if kind.group == group})
    listed = [{"groupVersion": f"{group}/{version}", "version": version} for version in versions]
    return {"name": group, "versions": listed, "preferredVersion": listed[0]}


def _resources(group: str, version: str) -> Manifest:
    resources = []
    for kind in KINDS:
        if (kind.group, kind.version) != (group, version):
            continue
        entry = {"name": kind.plural, "singularName": kind.kind.lower(), "namespaced": True, "kind": kind.kind}
        names: Manifest = {"shortNames": [_SHORT_NAMES[kind.kind]]} if kind.kind in _SHORT_NAMES else {}
        if kind.kind in _OURS:
            names["categories"] = ["paceline"]
        resources.append({**entry, **names, "verbs": _VERBS})
        if has_status(kind):
            status = {**entry, "name": f"{kind.plural}/status", "singularName": "", "verbs": ["get", "patch", "update"]}
            resources.append(status)
    name = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": resources}
