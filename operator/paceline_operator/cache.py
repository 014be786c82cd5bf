"""Index of trimmed API objects, fed by an informer and corrected by real lists.

Watches can lose a deletion (a re-list brings no event for what is gone), so every resync compares the index with a LIST
and drops the ghosts. Older versions never replace newer ones, nor does what is older than its deletion come back: the
answer to an apply may arrive after the event of the deletion that followed it. A younger version does: a watch with a
selector reports an object that loses its label as deleted, although it lives on. Does no I/O.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence

from paceline_api.kube import POD, SECRET, SERVICE, Kind, Manifest
from paceline_api.names import ANNOTATION_CONFIG_HASH, LABEL_ROLE, LABEL_ROUTER, LABEL_SERVICE, LABEL_STORE
from paceline_operator.planner.manifests import place
from paceline_operator.planner.token import without_data

INDEXED_LABELS = (LABEL_SERVICE, LABEL_ROUTER, LABEL_STORE)
TOMBSTONES_MAX = 4096
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_Name = tuple[str, str]
_Slot = tuple[Kind, str, str, str]


def trimmed(kind: Kind, manifest: Manifest) -> Manifest:
    """What the operator reads of an object, as a new dict."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "managedFields"}
    annotations = {key: value for key, value in (metadata.get("annotations") or {}).items() if key != _LAST_APPLIED}
    metadata["annotations"] = annotations
    if kind == POD:
        return _pod(manifest, metadata)
    kept: Manifest = {**manifest, "apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    if kind == SERVICE:
        kept["status"] = {"loadBalancer": (manifest.get("status") or {}).get("loadBalancer") or {}}
    if kind == SECRET:
        return without_data(kept)
    return kept


def _pod(manifest: Manifest, metadata: Manifest) -> Manifest:
    """Pods are many: only what tells their revision and why they do not run."""
    status = manifest.get("status") or {}
    labels = metadata.get("labels") or {}
    keys = ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp")
    small = {key: metadata[key] for key in keys if key in metadata}
    small["labels"] = {key: labels[key] for key in (*INDEXED_LABELS, LABEL_ROLE) if key in labels}
    small["annotations"] = {ANNOTATION_CONFIG_HASH: metadata["annotations"].get(ANNOTATION_CONFIG_HASH, "")}
    containers = [
        {key: item.get(key) for key in ("name", "state", "lastState", "restartCount")}
        for item in (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    ]
    conditions = [
        {key: item.get(key) for key in ("type", "status", "reason", "message")}
        for item in status.get("conditions") or []
        if item.get("type") in ("Ready", "PodScheduled")
    ]
    kept = {key: status[key] for key in ("phase", "reason", "message") if key in status}
    return {
        "apiVersion": POD.api_version,
        "kind": POD.kind,
        "metadata": small,
        "status": {**kept, "conditions": conditions, "containerStatuses": containers},
    }


class Cache:
    """Objects by kind, namespace and name, and by the owner labels. Thread-safe; stored dicts are never changed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._objects: dict[Kind, dict[_Name, Manifest]] = defaultdict(dict)
        self._by_label: dict[_Slot, set[str]] = defaultdict(set)
        # uid to the version of the last object reported as gone.
        self._tombstones: OrderedDict[str, str] = OrderedDict()

    def put(self, kind: Kind, manifest: Manifest) -> bool:
        """Stores an object; False if it is older than what is stored, or not younger than its deletion."""
        item = trimmed(kind, manifest)
        metadata, name = item["metadata"], place(item)
        with self._lock:
            gone = self._tombstones.get(metadata.get("uid"))
            if gone is not None and not _younger(_version(item), gone):
                return False
            self._tombstones.pop(metadata.get("uid"), None)
            before = self._objects[kind].get(name)
            if before is not None:
                if _older(item, before):
                    return False
                self._unlink(kind, name, before)
            self._objects[kind][name] = item
            for slot in _slots(kind, item):
                self._by_label[slot].add(name[1])
            return True

    def remove(self, kind: Kind, manifest: Manifest) -> None:
        """Drops the object with this uid; a later object of the same name stays."""
        name, uid = place(manifest), manifest["metadata"].get("uid")
        with self._lock:
            if uid is not None:
                self._tombstones[uid] = _version(manifest)
                self._tombstones.move_to_end(uid)
                if len(self._tombstones) > TOMBSTONES_MAX:
                    self._tombstones.popitem(last=False)
            before = self._objects[kind].get(name)
            if before is not None and (uid is None or before["metadata"].get("uid") == uid):
                del self._objects[kind][name]
                self._unlink(kind, name, before)

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        with self._lock:
            return self._objects[kind].get((namespace, name))

    def list(self, kind: Kind, namespace: str | None = None) -> Sequence[Manifest]:
        """Sorted by namespace and name; of every namespace for None."""
        with self._lock:
            names = sorted(name for name in self._objects[kind] if namespace in (None, name[0]))
            return [self._objects[kind][name] for name in names]

    def labelled(self, kind: Kind, namespace: str, label: str, value: str) -> Sequence[Manifest]:
        """Objects with one of the indexed labels, sorted by name."""
        with self._lock:
            names = sorted(self._by_label.get((kind, namespace, label, value), ()))
            return [self._objects[kind][(namespace, name)] for name in names]

    def label_values(self, kind: Kind, namespace: str | None, label: str) -> set[tuple[str, str]]:
        """(namespace, value) of an indexed label over all objects of a kind."""
        with self._lock:
            return {
                (slot[1], slot[3])
                for slot, names in self._by_label.items()
                if names and slot[0] == kind and slot[2] == label and namespace in (None, slot[1])
            }

    def correct(
        self,
        kind: Kind,
        namespace: str | None,
        listed: Iterable[Manifest],
        confirm: Callable[[str, str], Manifest | None],
    ) -> tuple[Sequence[Manifest], Sequence[Manifest]]:
        """Compares with a real LIST of the same scope; returns (objects that were new or changed, ghosts removed).

        An object that is indexed but not listed may be younger than the list: `confirm` (a GET) decides.
        """
        items = list(listed)
        names = {place(item) for item in items}
        suspects = [item for item in self.list(kind, namespace) if place(item) not in names]
        changed = [item for item in items if self._differs(kind, item) and self.put(kind, item)]
        ghosts: list[Manifest] = []
        for suspect in suspects:
            live = confirm(*place(suspect))
            if live is None or live["metadata"].get("uid") != suspect["metadata"].get("uid"):
                self.remove(kind, suspect)
                ghosts.append(suspect)
            if live is not None:
                self.put(kind, live)
        return changed, ghosts

    def _differs(self, kind: Kind, item: Manifest) -> bool:
        before = self.get(kind, *place(item))
        return before is None or _version(before) != _version(item)

    def _unlink(self, kind: Kind, name: _Name, item: Manifest) -> None:
        for slot in _slots(kind, item):
            names = self._by_label[slot]
            names.discard(name[1])
            if not names:
                del self._by_label[slot]


def _slots(kind: Kind, item: Manifest) -> list[_Slot]:
    labels = item["metadata"].get("labels") or {}
    namespace = str(item["metadata"]["namespace"])
    return [(kind, namespace, label, str(labels[label])) for label in INDEXED_LABELS if label in labels]


def _version(item: Manifest) -> str:
    return str(item["metadata"].get("resourceVersion", ""))


def _older(item: Manifest, before: Manifest) -> bool:
    # Versions of one object are comparable as numbers since Kubernetes 1.35 promises it, and always were in etcd.
    if item["metadata"].get("uid") != before["metadata"].get("uid"):
        return False
    return _younger(_version(before), _version(item))


def _younger(version: str, other: str) -> bool:
    return version.isdecimal() and other.isdecimal() and int(version) > int(other)
