"""Where chunks lie that were seen lately: in which object, at which span. Bounded; what it forgets is looked up again.

Must not do I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.s3.pack import Span

PLACES_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Place:
    """A chunk's object and its span there."""

    name: str
    span: Span


class Places:
    """Latest seen last. Safe to call from several threads."""

    def __init__(self, limit: int = PLACES_MAX) -> None:
        self._limit = limit
        self._places: OrderedDict[ChunkKey, Place] = OrderedDict()
        self._lock = Lock()

    def add(self, name: str, spans: Mapping[ChunkKey, Span]) -> None:
        """Chunks were seen in that object."""
        with self._lock:
            for key, span in spans.items():
                self._places[key] = Place(name, span)
                self._places.move_to_end(key)
            while len(self._places) > self._limit:
                self._places.popitem(last=False)

    def find(self, key: ChunkKey) -> Place | None:
        """Where the chunk was seen last; it may be gone."""
        with self._lock:
            return self._places.get(key)

    def forget(self, key: ChunkKey) -> None:
        """It is not there."""
        with self._lock:
            self._places.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._places.clear()
