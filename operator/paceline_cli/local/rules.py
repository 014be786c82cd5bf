"""What the API server adds to and demands of an object before it is stored. Pure: time and ids are arguments."""

import base64
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from paceline_api.kube import (
    DAEMON_SET,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    INFERENCE_SERVICE,
    KV_STORE,
    POD,
    POD_DISRUPTION_BUDGET,
    ROUTER,
    SECRET,
    SERVICE,
    TENANT,
    Invalid,
    Kind,
    Manifest,
)

Validator = Callable[[Manifest], object]
"""Raises ValueError (as pydantic does) for an object that must not be stored."""

_CUSTOM = (INFERENCE_SERVICE, ROUTER, TENANT, KV_STORE)
_WITH_STATUS = frozenset({*_CUSTOM, DEPLOYMENT, DAEMON_SET, SERVICE, POD, POD_DISRUPTION_BUDGET})
_WITH_GENERATION = frozenset({*_CUSTOM, DEPLOYMENT, DAEMON_SET, POD, POD_DISRUPTION_BUDGET, ENDPOINT_SLICE})
_SERVER_OWNED = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "selfLink",
)
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_MAX, _SERVICE_NAME_MAX = 253, 63


def has_status(kind: Kind) -> bool:
    """True if status is a subresource: main writes ignore it."""
    return kind in _WITH_STATUS


def key_of(manifest: Manifest, kind: Kind) -> tuple[str, str]:
    """(namespace, name); raises Invalid where one is missing or malformed."""
    meta = manifest.get("metadata") or {}
    name, namespace = meta.get("name"), meta.get("namespace")
    if not name or not namespace:
        raise Invalid(422, "Invalid", f"{kind.kind}: metadata.name and metadata.namespace are required")
    length = _SERVICE_NAME_MAX if kind is SERVICE else _NAME_MAX
    if len(name) > length or not _SUBDOMAIN.fullmatch(name) or (kind is SERVICE and "." in name):
        what = f"must be lower case letters, digits, '-' or '.', at most {length} characters"
        raise Invalid(422, "Invalid", f"{kind.kind} {name!r} is invalid: metadata.name: {what}")
    return namespace, name


def body_of(manifest: Manifest, kind: Kind) -> Manifest:
    """A copy of what a main write may set: no server-owned metadata, no status where that is a subresource."""
    body = {k: deepcopy(v) for k, v in manifest.items() if k != "status" or not has_status(kind)}
    if kind is SECRET and (plain := body.pop("stringData", None)):
        # Write-only convenience of the API: stored as data.
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in plain.items()}
        body["data"] = {**(body.get("data") or {}), **encoded}
    meta = body.get("metadata") or {}
    body["metadata"] = {k: v for k, v in meta.items() if k not in _SERVER_OWNED}
    return body


def created(body: Manifest, kind: Kind, uid: str, now: str) -> Manifest:
    """`body` as a new object."""
    meta = {**body["metadata"], "uid": uid, "creationTimestamp": now}
    if kind in _WITH_GENERATION:
        meta["generation"] = 1
    return {**body, "apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta}


def updated(old: Manifest, body: Manifest, kind: Kind) -> Manifest:
    """`body` in place of `old`: server-owned metadata and status stay, generation counts changes of intent."""
    kept = {k: v for k, v in old["metadata"].items() if k in _SERVER_OWNED}
    new = {**body, "apiVersion": old["apiVersion"], "kind": old["kind"], "metadata": {**body["metadata"], **kept}}
    if has_status(kind) and "status" in old:
        new["status"] = old["status"]
    if kind in _WITH_GENERATION and _intent(new) != _intent(old):
        new["metadata"]["generation"] = kept.get("generation", 0) + 1
    return new


def _intent(manifest: Manifest) -> Mapping[str, Any]:
    return {k: v for k, v in manifest.items() if k not in ("metadata", "status", "apiVersion", "kind")}


def check(old: Manifest | None, new: Manifest, kind: Kind, validator: Validator | None) -> None:
    """Raises Invalid (422) with the object and the field."""
    title = f"{kind.kind} {new['metadata']['name']!r} is invalid"
    if kind in (DEPLOYMENT, DAEMON_SET):
        selector = (new.get("spec") or {}).get("selector")
        if old is not None and old["spec"].get("selector") != selector:
            raise Invalid(422, "Invalid", f"{title}: spec.selector: field is immutable")
        labels = (new.get("spec") or {}).get("template", {}).get("metadata", {}).get("labels") or {}
        wanted = (selector or {}).get("matchLabels") or {}
        if not wanted or any(labels.get(k) != v for k, v in wanted.items()):
            raise Invalid(
                422, "Invalid", f"{title}: spec.template.metadata.labels: selector must match the template's labels"
            )
    if validator is None or (old is not None and _intent(old) == _intent(new)):
        return
    try:
        validator(deepcopy(new))
    except ValueError as error:
        raise Invalid(422, "Invalid", f"{title}: {error}") from error
