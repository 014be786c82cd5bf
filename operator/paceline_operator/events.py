"""Records the planner's few Events, each at most once in a while. Events explain; conditions are the record."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

from paceline_api.kube import EVENT, KubeClient, KubeError, Manifest
from paceline_api.names import FIELD_MANAGER, truncated
from paceline_operator.planner.manifests import text_hash
from paceline_operator.planner.model import EventNote

log = logging.getLogger(__name__)

QUIET_S = 600.0
REMEMBERED_MAX = 4096
_NAME_LENGTH_MAX = 200


class EventRecorder:
    """Drops an Event that was recorded with the same object, reason and message within `QUIET_S`."""

    def __init__(self, client: KubeClient, wall: Callable[[], float]) -> None:
        self._client = client
        self._wall = wall
        self._recorded: OrderedDict[str, float] = OrderedDict()

    def record(self, about: Manifest, note: EventNote) -> None:
        """Best effort: an Event that cannot be written is logged, never retried."""
        now = self._wall()
        metadata = about["metadata"]
        digest = text_hash([metadata.get("uid"), note.reason, note.message])
        if now - self._recorded.get(digest, float("-inf")) < QUIET_S:
            return
        self._recorded[digest] = now
        self._recorded.move_to_end(digest)
        if len(self._recorded) > REMEMBERED_MAX:
            self._recorded.popitem(last=False)
        name = f"{truncated(str(metadata['name']), _NAME_LENGTH_MAX)}.{digest}.{int(now):x}"
        try:
            self._client.create(_event(about, note, name, now))
        except KubeError as error:
            log.warning("Could not record event %s of %s: %s", note.reason, metadata["name"], error)


def _event(about: Manifest, note: EventNote, name: str, now: float) -> Manifest:
    metadata = about["metadata"]
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata.get("uid", ""),
        },
        "type": "Warning" if note.warning else "Normal",
        "reason": note.reason,
        "message": note.message,
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
