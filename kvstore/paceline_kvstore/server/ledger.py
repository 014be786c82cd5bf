"""What the node server remembers of each chunk beside its bytes: when it came, and what it follows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.chains import Chains


class Ledger:
    """Ages and chains of chunks, times in seconds. Not safe for threads: whoever owns one has a lock around it.

    It doesn't see evictions; `prune` forgets what the tier no longer has. `ttl` bounds a chunk's life from when it was
    stored (None: no bound). A chunk that the ledger doesn't know has no age.
    """

    def __init__(self, ttl: float | None = None) -> None:
        self.ttl = ttl
        self._stored: dict[ChunkKey, float] = {}  # oldest first: the clock never goes back
        self._chains: Chains[ChunkKey] = Chains()

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, key: ChunkKey, parent: ChunkKey | None, now: float) -> None:
        """The chunk was stored now."""
        self.forget(key)
        self._stored[key] = now
        self._chains.add(key, parent)

    def forget(self, key: ChunkKey) -> None:
        if self._stored.pop(key, None) is not None:
            self._chains.remove(key)

    def knows(self, key: ChunkKey) -> bool:
        return key in self._stored

    def is_expired(self, key: ChunkKey, now: float) -> bool:
        """True from the end of its life on."""
        stored = self._stored.get(key)
        return self.ttl is not None and stored is not None and now - stored >= self.ttl

    def expired(self, now: float) -> list[ChunkKey]:
        """Chunks whose life is over, oldest first."""
        found: list[ChunkKey] = []
        for key in self._stored:
            if not self.is_expired(key, now):
                break
            found.append(key)
        return found

    def with_descendants(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those chunks and all that follow them."""
        return self._chains.descendants(keys)

    def prune(self, held: Collection[ChunkKey], at: float) -> None:
        """Forget all but the chunks in `held`, which was true at that time; what came since stays."""
        for key in [key for key, stored in self._stored.items() if stored < at and key not in held]:
            self.forget(key)
