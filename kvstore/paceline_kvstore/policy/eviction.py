"""Which chunk goes when a tier is full: S3-FIFO or LRU, either with suffix before prefix. Must not do I/O.

A chunk of a conversation is of use only while every chunk before it is there. So whatever chunk an order picks, the
end of the chain that hangs on it goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from paceline_kvstore.policy.chains import Chains
from paceline_kvstore.policy.ghost import GhostList

K = TypeVar("K", bound=Hashable)

SMALL_SHARE = 0.1
"""Share of the bytes held that new chunks may take before one of them must go (S3-FIFO's small queue)."""
FREQUENCY_MAX = 3
GHOSTS_MIN = 64


def nothing_spared(_: object) -> bool:
    return False


class Eviction(Protocol[K]):
    """The order in which a tier's chunks go. Not thread-safe: the tier's lock covers it."""

    def __len__(self) -> int: ...

    def add(self, key: K, size: int, parent: K | None = None) -> None:
        """A chunk of `size` bytes came in, after `parent` in its chain. ValueError if it is there already."""
        ...

    def touch(self, key: K) -> None:
        """The chunk was used. Unknown keys are ignored."""
        ...

    def remove(self, key: K) -> None:
        """The chunk is gone for another reason. Unknown keys are ignored."""
        ...

    def evict(self, spared: Callable[[K], bool] = nothing_spared, parent: K | None = None) -> K | None:
        """Choose a chunk, forget it, return it; None if all are spared.

        Besides what `spared` names, `parent` and all before it stay: room is being made for the chunk after it.
        """
        ...


class Lru(Generic[K]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()
        self._chains: Chains[K] = Chains()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, key: K, size: int, parent: K | None = None) -> None:
        if key in self._order:
            raise ValueError(f"{key} is there already: touch it, or remove it first")
        self._order[key] = None
        self._chains.add(key, parent)

    def touch(self, key: K) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        if key in self._order:
            del self._order[key]
            self._chains.remove(key)

    def evict(self, spared: Callable[[K], bool] = nothing_spared, parent: K | None = None) -> K | None:
        lineage = self._chains.lineage(parent)
        for key in self._order:
            last = self._chains.last(key)
            if last not in lineage and not spared(last):
                self.remove(last)
                return last
        return None


class S3Fifo(Generic[K]):
    """Three FIFO queues (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

    New chunks enter a small queue; what was used twice or more when it reaches the end moves to the main queue, the
    rest goes and leaves its name in a ghost list; a chunk whose name is there enters the main queue at once. The main
    queue gives used chunks another round for each use, up to three. Queues are measured in bytes, the ghost list in
    names: as many as chunks are held.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[K, int] = OrderedDict()
        self._main: OrderedDict[K, int] = OrderedDict()
        self._small_bytes = 0
        self._bytes = 0
        self._uses: dict[K, int] = {}
        self._ghosts: GhostList[K] = GhostList(GHOSTS_MIN)
        self._chains: Chains[K] = Chains()

    def __len__(self) -> int:
        return len(self._uses)

    def keys(self) -> Iterator[K]:
        yield from self._small
        yield from self._main

    def add(self, key: K, size: int, parent: K | None = None) -> None:
        if key in self._uses:
            raise ValueError(f"{key} is there already: touch it, or remove it first")
        if self._ghosts.discard(key):
            self._main[key] = size
        else:
            self._small[key] = size
            self._small_bytes += size
        self._bytes += size
        self._uses[key] = 0
        self._chains.add(key, parent)

    def touch(self, key: K) -> None:
        uses = self._uses.get(key)
        if uses is not None and uses < FREQUENCY_MAX:
            self._uses[key] = uses + 1

    def remove(self, key: K) -> None:
        if self._uses.pop(key, None) is None:
            return
        size = self._small.pop(key, None)
        if size is None:
            size = self._main.pop(key)
        else:
            self._small_bytes -= size
        self._bytes -= size
        self._chains.remove(key)

    def evict(self, spared: Callable[[K], bool] = nothing_spared, parent: K | None = None) -> K | None:
        lineage = self._chains.lineage(parent)

        def stays(key: K) -> bool:
            return key in lineage or spared(key)

        for _ in range(len(self._uses)):
            key = self._pass_over_used()
            last = self._chains.last(key)
            if not stays(last):
                return self._evicted(last)
            (self._small if key in self._small else self._main).move_to_end(key)
        # One queue may be all spared, or all be used: then anything that can go.
        last = next((last for key in self.keys() if not stays(last := self._chains.last(key))), None)
        return None if last is None else self._evicted(last)

    def _evicted(self, key: K) -> K:
        if key in self._small:
            self._ghosts.limit = max(GHOSTS_MIN, len(self._uses))
            self._ghosts.add(key)
        self.remove(key)
        return key

    def _pass_over_used(self) -> K:
        """The first chunk at an end of a queue that was not used enough to stay. Needs at least one chunk."""
        while True:
            if self._small and (not self._main or self._small_bytes >= SMALL_SHARE * self._bytes):
                key = next(iter(self._small))
                if self._uses[key] <= 1:
                    return key
                size = self._small.pop(key)
                self._small_bytes -= size
                self._main[key] = size
                self._uses[key] = 0
                continue
            key = next(iter(self._main))
            if not self._uses[key]:
                return key
            self._uses[key] -= 1
            self._main.move_to_end(key)
