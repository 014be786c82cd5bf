"""The watch cache of one store: bounded, ordered by resourceVersion, with selector transitions. Not thread-safe."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from paceline_api.kube import EventType, Expired, Kind, Manifest, WatchEvent

HISTORY_MAX = 4096
"""Events kept in all; a watch that falls further behind must list again (410)."""


@dataclass(frozen=True, slots=True)
class Change:
    """One write. `old` and `new` are the stored objects, never copied and never changed."""

    version: int
    kind: Kind
    old: Manifest | None
    new: Manifest | None


class History:
    """`events` answers what a watch from a version would have seen."""

    def __init__(self, size: int = HISTORY_MAX) -> None:
        self._changes: deque[Change] = deque(maxlen=size)
        self._forgotten = 0

    def add(self, change: Change) -> None:
        """Appends; the oldest change may be forgotten."""
        if len(self._changes) == self._changes.maxlen:
            self._forgotten = self._changes[0].version
        self._changes.append(change)

    def events(
        self, kind: Kind, namespace: str | None, version: int, match: Callable[[Manifest], bool]
    ) -> list[tuple[WatchEvent, int]]:
        """Events after `version`, each with its own version; raises Expired if some are forgotten."""
        if version < self._forgotten:
            raise Expired(410, "Expired", f"too old resource version: {version} ({self._forgotten}); list again")
        found = []
        for change in reversed(self._changes):
            if change.version <= version:
                break
            if change.kind == kind and (event := _event(change, namespace, match)) is not None:
                found.append((event, change.version))
        return found[::-1]


def _event(change: Change, namespace: str | None, match: Callable[[Manifest], bool]) -> WatchEvent | None:
    """As an API server does: an object that begins to match is ADDED, one that no longer matches is DELETED."""

    def seen(manifest: Manifest | None) -> bool:
        return manifest is not None and namespace in (None, manifest["metadata"]["namespace"]) and match(manifest)

    before, after = seen(change.old), seen(change.new)
    if after:
        kind: EventType = "MODIFIED" if before else "ADDED"
        assert change.new is not None
        return WatchEvent(kind, change.new)
    if not before:
        return None
    last = change.new or change.old
    assert last is not None
    gone = {**last, "metadata": {**last["metadata"], "resourceVersion": str(change.version)}}
    return WatchEvent("DELETED", gone)
