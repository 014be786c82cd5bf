"""What every tier can do."""

from __future__ import annotations

from typing import Protocol

from paceline_kvstore.codec import Buffer
from paceline_kvstore.keys import ChunkKey


class Tier(Protocol):
    """A bounded place for chunks that may forget anything at any time. Safe to call from several threads."""

    def put(self, key: ChunkKey, payload: Buffer) -> bool:
        """Keep a copy of `payload`; False if it was not kept. A refused put changes nothing."""
        ...

    def get(self, key: ChunkKey) -> memoryview | None:
        """The verified payload, read-only, or None. A bad chunk is dropped and counted, and is a miss."""
        ...

    def delete(self, key: ChunkKey) -> bool:
        """Forget a chunk; False if it was not there."""
        ...

    @property
    def bytes_used(self) -> int:
        """Bytes of all chunks held, headers included. Never above `capacity`."""
        ...

    @property
    def capacity(self) -> int:
        """Bound on `bytes_used`, in bytes."""
        ...
