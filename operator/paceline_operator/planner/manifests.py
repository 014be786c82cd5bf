"""Small questions about manifests: owner references, and whether a live object still says what an intent says.

Server-side apply is what enforces an intent; `covers` predicts whether it would change anything, so that the steady
state sends nothing. Values that the API server replaces as a whole (selectors, rules, arguments) are compared exactly:
an apply takes out what somebody added to them. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, cast

from paceline_api.kube import Kind, Manifest, kind_of
from paceline_api.names import MANAGED_BY, PART_OF
from paceline_api.quantity import parse_quantity
from paceline_operator.planner.additions import additions
from paceline_operator.planner.model import Action, Apply, Delete, Strip

ANNOTATION_INTENT = "paceline.dev/intent-hash"
OPERATOR = "paceline"

# Lists that the API server merges by key: entries of other field managers stay beside ours.
_MERGED_LISTS = frozenset(
    {
        "containers", "initContainers", "env", "volumes", "volumeMounts", "ports", "ownerReferences",
        "topologySpreadConstraints", "imagePullSecrets",
    }
)  # fmt: skip
# Mappings that the API server replaces as a whole, as it does every list that is not merged.
_ATOMIC = frozenset({"selector", "labelSelector", "roleRef"})
_QUANTITY_PARENTS = frozenset({"requests", "limits", "hard"})
_APPLY_ORDER = (
    "ServiceAccount", "Role", "RoleBinding", "Secret", "ConfigMap", "Service", "PodDisruptionBudget", "Deployment",
    "DaemonSet",
)  # fmt: skip


def dig(manifest: Manifest | None, *path: str) -> Any:
    """The value at a path of keys, or None where the path ends early."""
    node: Any = manifest
    for key in path:
        if not isinstance(node, dict):
            return None
        node = cast(Manifest, node).get(key)
    return node


def text_hash(value: Any) -> str:
    """Sixteen hex digits that change when the JSON form of `value` does."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def identity(manifest: Manifest) -> tuple[str, str]:
    """(kind, name): what tells the objects of one namespace apart."""
    return str(manifest["kind"]), str(manifest["metadata"]["name"])


def place(manifest: Manifest) -> tuple[str, str]:
    """(namespace, name)."""
    return str(manifest["metadata"]["namespace"]), str(manifest["metadata"]["name"])


def being_deleted(manifest: Manifest) -> bool:
    return dig(manifest, "metadata", "deletionTimestamp") is not None


def common_labels(name: str, instance: str, component: str) -> dict[str, str]:
    """The recommended labels. None of them is used in a selector."""
    return {
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/instance": instance,
        "app.kubernetes.io/component": component,
        PART_OF: "paceline",
        MANAGED_BY: OPERATOR,
    }


def owner_reference(owner: Manifest, *, controller: bool) -> Manifest:
    """Without blockOwnerDeletion, which needs rights on the owner's finalizers."""
    reference: Manifest = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    return reference | {"controller": True} if controller else reference


def child(
    kind: Kind, namespace: str, name: str, *, labels: dict[str, str], owners: Sequence[Manifest], **content: Any
) -> Manifest:
    """A child's intent, without the annotation that `sealed` adds."""
    metadata: Manifest = {"name": name, "namespace": namespace, "labels": labels}
    if owners:
        metadata["ownerReferences"] = list(owners)
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **content}


def sealed(intent: Manifest) -> Manifest:
    """The intent with its own hash as an annotation: a field that the intent drops changes the hash."""
    metadata = cast(Manifest, intent["metadata"])
    annotations: Manifest = {**metadata.get("annotations", {}), ANNOTATION_INTENT: text_hash(intent)}
    return {**intent, "metadata": {**metadata, "annotations": annotations}}


def covers(live: Any, intent: Any, under: str = "") -> bool:
    """Whether every field of `intent` has its value in `live`. `under` is the key that holds both."""
    if under in _ATOMIC:
        return live == intent
    if isinstance(intent, dict):
        wanted = cast(Manifest, intent)
        if not isinstance(live, dict):
            return not wanted and live is None
        found = cast(Manifest, live)
        return all(covers(found.get(key), value, _context(under, key)) for key, value in wanted.items())
    if isinstance(intent, list):
        items = cast("list[Any]", intent)
        return _covers_list(cast("list[Any]", live) if isinstance(live, list) else [], items, under)
    if live == intent:
        return True
    return under == "quantity" and _same_quantity(live, intent)


def _context(under: str, key: str) -> str:
    return "quantity" if under in _QUANTITY_PARENTS or key == "sizeLimit" else key


def _covers_list(live: list[Any], intent: list[Any], under: str) -> bool:
    if under in _MERGED_LISTS:
        return all(any(covers(item, wanted, "") for item in live) for wanted in intent)
    return live == intent


def _same_quantity(live: Any, intent: Any) -> bool:
    # The API server writes quantities in a canonical form: 1024Mi comes back as 1Gi.
    try:
        return parse_quantity(str(live)) == parse_quantity(str(intent))
    except ValueError:
        return False


def difference(desired: Iterable[Manifest], observed: Iterable[Manifest]) -> tuple[Action, ...]:
    """Deletes of children that are not wanted any more, then what makes the others as intended."""
    live = {identity(item): item for item in observed}
    wanted = [sealed(intent) for intent in desired]
    names = {identity(intent) for intent in wanted}
    extra = [item for key, item in sorted(live.items()) if key not in names and _deletable(item)]
    actions: list[Action] = [_delete(item) for item in extra]
    for intent in sorted(wanted, key=lambda item: _APPLY_ORDER.index(item["kind"])):
        found = live.get(identity(intent))
        if found is None or not covers(found, intent):
            actions.append(Apply(intent, known=found is not None))
        if found is not None and (added := additions(found, intent)):
            actions.append(Strip(intent, added))
    return tuple(actions)


def _deletable(item: Manifest) -> bool:
    # Only what an apply of ours has sealed: a user's object that borrows our labels is not ours to delete.
    return dig(item, "metadata", "annotations", ANNOTATION_INTENT) is not None and not being_deleted(item)


def _delete(item: Manifest) -> Delete:
    metadata = item["metadata"]
    return Delete(kind_of(item), str(metadata["namespace"]), str(metadata["name"]), str(metadata["uid"]))
