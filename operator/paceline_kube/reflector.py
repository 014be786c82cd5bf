"""A reflector: lists a kind, then follows it by watch, and hands every change to one handler.

After a gap (410 Gone, broken connection) it lists again and hands over the difference, so that an object deleted during
the gap arrives as DELETED: the handler never sees a ghost. One daemon thread each; the handler runs on that thread.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from paceline_api.kube import EventType, Expired, Kind, KubeClient, KubeError, Manifest

log = logging.getLogger(__name__)

Handler = Callable[[EventType, Manifest], None]
Key = tuple[str, str]

BACKOFF_S = (0.2, 10.0)
WATCH_TIMEOUT_S = 300


class Reflector:
    """Follows one kind in one namespace (or all, for None) from `start()` until `stop()`."""

    def __init__(
        self,
        client: KubeClient,
        kind: Kind,
        namespace: str | None,
        handler: Handler,
        *,
        label_selector: str = "",
        field_selector: str = "",
        on_restart: Callable[[], None] | None = None,
        watch_timeout_s: int = WATCH_TIMEOUT_S,
    ) -> None:
        self._client = client
        self._kind = kind
        self._namespace = namespace
        self._handler = handler
        self._label_selector = label_selector
        self._field_selector = field_selector
        self._on_restart = on_restart
        self._watch_timeout_s = watch_timeout_s
        self._known: dict[Key, Manifest] = {}
        self._synced = threading.Event()
        self._stopped = threading.Event()
        self._contact_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"watch-{kind.plural}", daemon=True)

    def start(self) -> Reflector:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Asks the thread to end; it does at its next event, or when the watch times out."""
        self._stopped.set()

    def wait_synced(self, timeout_s: float) -> bool:
        """Whether the first list was handed over completely, waiting up to `timeout_s`."""
        return self._synced.wait(timeout_s)

    @property
    def synced(self) -> bool:
        return self._synced.is_set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def silent_s(self) -> float:
        """Seconds since the API last answered this reflector."""
        return time.monotonic() - self._contact_s

    def _run(self) -> None:
        backoff_s = BACKOFF_S[0]
        while not self._stopped.is_set():
            try:
                version = self._relist()
                backoff_s = BACKOFF_S[0]
                self._follow(version)
            except Expired:
                log.info("Watch of %s is too old, listing again", self._kind.plural)
            except KubeError as error:
                log.warning("Watch of %s failed, again in %.1f s: %s", self._kind.plural, backoff_s, error)
                self._stopped.wait(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, BACKOFF_S[1])
            except Exception:
                log.exception("Handler of %s failed, listing again", self._kind.plural)
                self._stopped.wait(backoff_s)
                backoff_s = min(backoff_s * 2, BACKOFF_S[1])
            if self._on_restart is not None:
                self._on_restart()

    def _relist(self) -> str:
        listed = self._client.list(
            self._kind,
            self._namespace,
            label_selector=self._label_selector,
            field_selector=self._field_selector,
        )
        self._contact_s = time.monotonic()
        fresh = {_key(item): item for item in listed.items}
        for key in [key for key in self._known if key not in fresh]:
            self._handler("DELETED", self._known.pop(key))
        for key, item in fresh.items():
            self._update(key, item)
        self._synced.set()
        return listed.resource_version

    def _update(self, key: Key, item: Manifest) -> None:
        before = self._known.get(key)
        if before is not None and _version(before) == _version(item):
            return
        # Remembered only once handled: a handler that failed gets the object again with the next list.
        self._handler("ADDED" if before is None else "MODIFIED", item)
        self._known[key] = item

    def _follow(self, version: str) -> None:
        while not self._stopped.is_set():
            for event in self._client.watch(
                self._kind,
                self._namespace,
                resource_version=version,
                label_selector=self._label_selector,
                field_selector=self._field_selector,
                timeout_s=self._watch_timeout_s,
            ):
                if self._stopped.is_set():
                    return
                self._contact_s = time.monotonic()
                version = _version(event.object) or version
                key = _key(event.object)
                if event.type == "DELETED":
                    self._handler("DELETED", event.object)
                    self._known.pop(key, None)
                else:
                    self._update(key, event.object)
            self._contact_s = time.monotonic()


def _key(item: Manifest) -> Key:
    metadata = item["metadata"]
    return str(metadata.get("namespace", "")), str(metadata["name"])


def _version(item: Manifest) -> str:
    return str(item["metadata"].get("resourceVersion", ""))
