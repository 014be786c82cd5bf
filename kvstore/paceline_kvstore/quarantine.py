"""What a tier refused to serve: counts by reason for good, the latest cases with their reason. Must not do I/O."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from threading import Lock

from paceline_kvstore.errors import ForeignChunk, KVStoreError, UnsupportedVersion
from paceline_kvstore.keys import ChunkKey

REASONS = ("corrupt", "foreign", "version")


@dataclass(frozen=True, slots=True)
class Refusal:
    """One bad chunk: asked for as `key` (None when found by a scan), at `place`, refused for `reason`."""

    key: ChunkKey | None
    place: str
    reason: str
    message: str


class Quarantine:
    """The record of bad chunks. Counts all, remembers the last `remembered`. Safe to call from several threads."""

    def __init__(self, remembered: int = 64) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._latest: deque[Refusal] = deque(maxlen=remembered)
        self._lock = Lock()

    def add(self, key: ChunkKey | None, place: str, error: KVStoreError) -> None:
        """Count a chunk that a decoder refused with `error`."""
        reason = reason_of(error)
        with self._lock:
            self._counts[reason] += 1
            self._latest.append(Refusal(key, place, reason, str(error)))

    @property
    def counts(self) -> dict[str, int]:
        """Chunks refused, by reason; every reason of REASONS is there."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        with self._lock:
            return self._counts.total()

    def latest(self) -> list[Refusal]:
        """The latest refusals, oldest first."""
        with self._lock:
            return list(self._latest)


def reason_of(error: KVStoreError) -> str:
    """The member of REASONS for a decoder's error."""
    if isinstance(error, ForeignChunk):
        return "foreign"
    return "version" if isinstance(error, UnsupportedVersion) else "corrupt"
