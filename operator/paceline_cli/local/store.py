"""The in-memory object store: `KubeClient` in one process, with the API semantics that the product relies on.

resourceVersion and generation, server-side apply with field ownership, status apart, graceful deletion of Pods,
background garbage collection by ownerReferences, watches with bounded history. Thread-safe; every call holds one lock
and none waits, but `watch`. Stored objects are never changed in place, so readers outside the lock are safe.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy

from paceline_api.kube import (
    EVENT,
    KINDS,
    POD,
    Conflict,
    Kind,
    KubeError,
    Manifest,
    ObjectList,
    WatchEvent,
    kind_of,
)
from paceline_cli.local import rules, ssa
from paceline_cli.local.history import HISTORY_MAX, Change, History
from paceline_cli.local.selectors import matcher

EVENTS_MAX = 500
"""Event objects kept; a real API server lets them expire after an hour."""
DEFAULT_MANAGER = "paceline-local"

_Key = tuple[str, str]
Watcher = Callable[[Kind], None]


class ObjectStore:
    """`now` gives RFC 3339 time, `new_uid` an id, `monotonic` seconds for watch timeouts."""

    def __init__(
        self,
        *,
        now: Callable[[], str],
        new_uid: Callable[[], str],
        monotonic: Callable[[], float],
        validators: Mapping[Kind, rules.Validator] | None = None,
        history_max: int = HISTORY_MAX,
    ) -> None:
        self._now = now
        self._new_uid = new_uid
        self._monotonic = monotonic
        self._validators = dict(validators or {})
        self._objects: dict[Kind, dict[_Key, Manifest]] = {kind: {} for kind in KINDS}
        self._owners: dict[tuple[Kind, _Key], ssa.Owners] = {}
        self._uids: dict[str, tuple[Kind, _Key]] = {}
        self._history = History(history_max)
        self._version = 0
        self._changed = threading.Condition(threading.RLock())
        self._watchers: list[Watcher] = []
        self._closed = False
        self.writes: Counter[Kind] = Counter()
        """Mutations by kind since the start, deletions included."""

    # Reads.

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """A copy, or None."""
        with self._changed:
            return deepcopy(self._objects[kind].get((namespace, name)))

    def list(
        self, kind: Kind, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
    ) -> ObjectList:
        """Copies, sorted by namespace and name."""
        match = matcher(label_selector, field_selector)
        with self._changed:
            found = [
                deepcopy(manifest)
                for (ns, _), manifest in sorted(self._objects[kind].items())
                if namespace in (None, ns) and match(manifest)
            ]
            return ObjectList(found, str(self._version))

    def events(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
    ) -> tuple[Sequence[WatchEvent], str]:
        """Changes after `resource_version` and the version to go on from; Expired where they are forgotten."""
        match = matcher(label_selector, field_selector)
        with self._changed:
            found = self._history.events(kind, namespace, int(resource_version or self._version), match)
            return [WatchEvent(event.type, deepcopy(event.object)) for event, _ in found], str(self._version)

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
        """Blocks the calling thread between changes; ends after `timeout_s` or when the store is closed."""
        deadline = self._monotonic() + timeout_s
        version = resource_version
        while not self._closed:
            found, version = self.events(
                kind,
                namespace,
                resource_version=version,
                label_selector=label_selector,
                field_selector=field_selector,
            )
            yield from found
            with self._changed:
                left = deadline - self._monotonic()
                if left <= 0:
                    return
                if str(self._version) == version and not self._closed:
                    self._changed.wait(left)

    def subscribe(self, watcher: Watcher) -> Callable[[], None]:
        """`watcher(kind)` after each write, under the lock: it may only set a flag. Returns the way to unsubscribe."""
        with self._changed:
            self._watchers.append(watcher)

        def unsubscribe() -> None:
            with self._changed:
                self._watchers.remove(watcher)

        return unsubscribe

    def close(self) -> None:
        """Ends every watch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # Writes.

    def apply(self, manifest: Manifest, *, field_manager: str, force: bool = True) -> Manifest:
        """Server-side apply of complete intent; unforced it is a Conflict where it would take another's field."""
        kind = kind_of(manifest)
        key = rules.key_of(manifest, kind)
        body = ssa.without_nulls(rules.body_of(manifest, kind))
        with self._changed:
            old = self._objects[kind].get(key)
            if old is not None:
                self._precondition(manifest, old)
            live = rules.body_of(old, kind) if old is not None else {"metadata": {"name": key[1], "namespace": key[0]}}
            owners = self._owners.get((kind, key), {})
            if not force and (found := ssa.conflicts(live, owners, field_manager, _managed(body))):
                raise Conflict(409, "Conflict", _conflict_message(found))
            merged, owners = ssa.apply(live, owners, field_manager, _managed(body))
            return self._save(kind, key, merged, owners)

    def apply_status(self, manifest: Manifest, *, field_manager: str) -> Manifest:
        """Forced server-side apply of `status` alone; 404 where the object is not there."""
        kind = kind_of(manifest)
        key = rules.key_of(manifest, kind)
        intent = {"status": ssa.without_nulls(manifest.get("status") or {})}
        with self._changed:
            old = self._existing(kind, key)
            self._precondition(manifest, old)
            owners = self._owners.get((kind, key), {})
            live = {"status": deepcopy(old.get("status") or {})}
            merged, owners = ssa.apply(live, owners, f"{field_manager}/status", intent)
            return self._write(kind, key, {**old, "status": merged.get("status") or {}}, owners)

    def create(self, manifest: Manifest) -> Manifest:
        """Conflict if it exists."""
        kind = kind_of(manifest)
        key = rules.key_of(manifest, kind)
        with self._changed:
            if key in self._objects[kind]:
                raise Conflict(409, "AlreadyExists", f"{kind.plural} {key[1]!r} already exists")
            body = ssa.without_nulls(rules.body_of(manifest, kind))
            owners = ssa.changed_by_update({}, DEFAULT_MANAGER, {}, _managed(body))
            return self._save(kind, key, body, owners)

    def replace(self, manifest: Manifest) -> Manifest:
        """PUT; 404 where the object is not there, Conflict for another resourceVersion or uid."""
        kind = kind_of(manifest)
        key = rules.key_of(manifest, kind)
        body = ssa.without_nulls(rules.body_of(manifest, kind))
        with self._changed:
            old = self._existing(kind, key)
            self._precondition(manifest, old)
            before = _managed(rules.body_of(old, kind))
            owners = self._owners.get((kind, key), {})
            return self._save(kind, key, body, ssa.changed_by_update(owners, DEFAULT_MANAGER, before, _managed(body)))

    def replace_status(self, manifest: Manifest) -> Manifest:
        """PUT of `status` alone."""
        kind = kind_of(manifest)
        key = rules.key_of(manifest, kind)
        with self._changed:
            old = self._existing(kind, key)
            self._precondition(manifest, old)
            status = ssa.without_nulls(manifest.get("status") or {})
            before, after = {"status": old.get("status") or {}}, {"status": status}
            owners = ssa.changed_by_update(
                self._owners.get((kind, key), {}), f"{DEFAULT_MANAGER}/status", before, after
            )
            return self._write(kind, key, {**old, "status": status}, owners)

    def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str | None = None, grace_s: int | None = None
    ) -> bool:
        """Background deletion; a bound Pod stays until its node deletes it with `grace_s` 0."""
        key = (namespace, name)
        with self._changed:
            old = self._objects[kind].get(key)
            if old is None:
                return False
            if uid is not None and old["metadata"]["uid"] != uid:
                raise Conflict(409, "Conflict", f"{kind.plural} {name!r}: the uid in the precondition is not {uid}")
            wait = self._node_grace(kind, old, grace_s)
            if not wait and not old["metadata"].get("finalizers"):
                self._remove(kind, key, old)
                return True
            meta = dict(old["metadata"])
            meta.setdefault("deletionTimestamp", self._now())
            if wait:
                before = meta.get("deletionGracePeriodSeconds", wait)
                meta["deletionGracePeriodSeconds"] = min(before, wait)
            self._write(kind, key, {**old, "metadata": meta}, self._owners.get((kind, key), {}))
            return True

    # Inside the lock.

    def _node_grace(self, kind: Kind, manifest: Manifest, grace_s: int | None) -> int:
        spec = manifest.get("spec") or {}
        if kind is not POD or not spec.get("nodeName"):
            return 0
        return spec.get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s

    def _existing(self, kind: Kind, key: _Key) -> Manifest:
        old = self._objects[kind].get(key)
        if old is None:
            raise KubeError(404, "NotFound", f"{kind.plural} {key[1]!r} not found")
        return old

    def _precondition(self, manifest: Manifest, old: Manifest) -> None:
        for field in ("resourceVersion", "uid"):
            wanted, found = manifest["metadata"].get(field), old["metadata"][field]
            if wanted and wanted != found:
                name = f"{old['kind']} {old['metadata']['name']!r}"
                raise Conflict(409, "Conflict", f"{name}: {field} is {found}, not {wanted}: read it again")

    def _save(self, kind: Kind, key: _Key, body: Manifest, owners: ssa.Owners) -> Manifest:
        old = self._objects[kind].get(key)
        uid, now = self._new_uid(), self._now()
        new = rules.created(body, kind, uid, now) if old is None else rules.updated(old, body, kind)
        rules.check(old, new, kind, self._validators.get(kind))
        return self._write(kind, key, new, owners)

    def _write(self, kind: Kind, key: _Key, new: Manifest, owners: ssa.Owners) -> Manifest:
        old = self._objects[kind].get(key)
        if old is not None and old == new and self._owners.get((kind, key), {}) == owners:
            return deepcopy(old)
        self._version += 1
        new = deepcopy({**new, "metadata": {**new["metadata"], "resourceVersion": str(self._version)}})
        self._objects[kind][key] = new
        self._owners[kind, key] = owners
        self._uids[new["metadata"]["uid"]] = (kind, key)
        self._publish(Change(self._version, kind, old, new))
        self._after_write(kind, key, new)
        return deepcopy(new)

    def _after_write(self, kind: Kind, key: _Key, new: Manifest) -> None:
        meta = new["metadata"]
        if meta.get("deletionTimestamp") and not meta.get("finalizers") and not self._node_grace(kind, new, None):
            self._remove(kind, key, new)
        elif meta.get("ownerReferences"):
            self._collect(kind, key)
        if kind is EVENT and len(self._objects[EVENT]) > EVENTS_MAX:
            oldest = min(self._objects[EVENT].items(), key=lambda item: int(item[1]["metadata"]["resourceVersion"]))
            self._remove(EVENT, *oldest)

    def _remove(self, kind: Kind, key: _Key, old: Manifest) -> None:
        self._version += 1
        del self._objects[kind][key]
        self._owners.pop((kind, key), None)
        uid = old["metadata"]["uid"]
        del self._uids[uid]
        self._publish(Change(self._version, kind, old, None))
        dependents = [
            (other, where)
            for other, table in self._objects.items()
            for where, manifest in table.items()
            if any(ref.get("uid") == uid for ref in manifest["metadata"].get("ownerReferences") or [])
        ]
        for other, where in dependents:
            self._collect(other, where)

    def _collect(self, kind: Kind, key: _Key) -> None:
        """Deletes an object whose owners are all gone; takes references to absent owners out of the others."""
        manifest = self._objects[kind].get(key)
        if manifest is None:
            return
        refs = manifest["metadata"].get("ownerReferences") or []
        present = [ref for ref in refs if ref.get("uid") in self._uids]
        if refs and not present:
            if not manifest["metadata"].get("deletionTimestamp"):
                self.delete(kind, *key)
        elif len(present) < len(refs):
            meta = {**manifest["metadata"], "ownerReferences": present}
            self._write(kind, key, {**manifest, "metadata": meta}, self._owners.get((kind, key), {}))

    def _publish(self, change: Change) -> None:
        self._history.add(change)
        self.writes[change.kind] += 1
        self._changed.notify_all()
        for watcher in tuple(self._watchers):
            watcher(change.kind)


def _managed(body: Manifest) -> Manifest:
    """What field ownership is about: not the object's address."""
    meta = {k: v for k, v in body["metadata"].items() if k not in ("name", "namespace")}
    rest = {k: v for k, v in body.items() if k not in ("apiVersion", "kind", "metadata")}
    return rest | ({"metadata": meta} if meta else {})


def _conflict_message(found: list[tuple[str, str]]) -> str:
    fields = "; ".join(f'conflict with "{manager}": {field}' for manager, field in found)
    return f"Apply failed with {len(found)} conflict{'s' if len(found) > 1 else ''}: {fields}"
