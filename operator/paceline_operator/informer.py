"""Informers: what keeps the cache current. Two stand behind one Protocol.

`WatchInformer` runs one reflector a kind over a `KubeClient` and is what the local runtime uses; `KopfInformer` (in
`handlers`) lets kopf watch a cluster. Neither plans or writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline_api.kube import EventType, Kind, KubeClient, Manifest
from paceline_kube.reflector import WATCH_TIMEOUT_S, Handler, Reflector
from paceline_operator.feed import WATCHED_KINDS, field_selector, label_selector

Sink = Callable[[Kind, EventType, Manifest], None]


class Informer(Protocol):
    """Calls its sink for every change from `start` until `stop`. The sink may be called from several threads."""

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> None: ...

    @property
    def alive(self) -> bool:
        """False when it has ended by itself: the process should then end too and be started again."""
        ...


InformerFactory = Callable[[Sink], Informer]


class WatchInformer:
    """List and watch of every kind through the client."""

    def __init__(
        self, client: KubeClient, namespace: str | None, sink: Sink, *, watch_timeout_s: int = WATCH_TIMEOUT_S
    ) -> None:
        self._reflectors = [
            Reflector(
                client,
                kind,
                namespace,
                _bound(sink, kind),
                label_selector=label_selector(kind),
                field_selector=field_selector(kind),
                watch_timeout_s=watch_timeout_s,
            )
            for kind in WATCHED_KINDS
        ]

    def start(self) -> None:
        for reflector in self._reflectors:
            reflector.start()

    def stop(self, timeout_s: float) -> None:
        """Does not wait: a reflector's daemon thread ends at its next event."""
        del timeout_s
        for reflector in self._reflectors:
            reflector.stop()

    @property
    def alive(self) -> bool:
        return all(reflector.alive for reflector in self._reflectors)


def _bound(sink: Sink, kind: Kind) -> Handler:
    def handle(event_type: EventType, manifest: Manifest) -> None:
        sink(kind, event_type, manifest)

    return handle
