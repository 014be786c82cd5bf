"""Which chunk goes when a tier is full: an adaptive order or LRU, either with suffix before prefix. Must not do I/O.

A chunk of a conversation is of use only while every chunk before it is there. So whatever chunk an order picks, the
end of the chain that hangs on it goes first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from paceline_kvstore.policy.chains import Chains

K = TypeVar("K", bound=Hashable)

WEIGHT_MAX = 1000.0
"""How much faster a chunk that was used once may age than one that was used again."""
STEP = 4.0
"""How much a return changes the logarithm of the weight, times the number of chunks held."""
GHOSTS = 4
"""Names remembered for each chunk held."""
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
        last = self._chains.first_end(self._order, lambda key: key in lineage or spared(key))
        if last is not None:
            self.remove(last)
        return last


class AdaptiveLru(Generic[K]):
    """The oldest first, where a chunk that was used once ages faster than one that was used again; how much is learnt.

    With a weight of 1 this is LRU, which is best where everything comes again soon; with a large one it resists scans,
    as small caches must. The names of chunks that went are kept for a while. When one returns that had been used once,
    the weight falls; had it been used again, the weight rises: the balance of ARC (Megiddo and Modha, FAST 2003), here
    of ages instead of queue lengths. What returns counts as used again. Ages count uses of the tier.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self._clock = 0
        # When each was used last, oldest first.
        self._once: OrderedDict[K, int] = OrderedDict()
        self._again: OrderedDict[K, int] = OrderedDict()
        # Hashes instead of keys: a tenth of the memory, and a collision merely makes a new chunk look familiar.
        self._ghosts: OrderedDict[int, bool] = OrderedDict()
        self._again_ghosts = 0
        self._chains: Chains[K] = Chains()

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def add(self, key: K, size: int, parent: K | None = None) -> None:
        if key in self._once or key in self._again:
            raise ValueError(f"{key} is there already: touch it, or remove it first")
        self._clock += 1
        again = self._ghosts.get(hash(key))
        if again is None:
            self._once[key] = self._clock
        else:
            self._learn(again)
            self._forget(hash(key))
            self._again[key] = self._clock
        self._chains.add(key, parent)

    def touch(self, key: K) -> None:
        self._clock += 1
        if key in self._again:
            self._again[key] = self._clock
            self._again.move_to_end(key)
        elif key in self._once:
            del self._once[key]
            self._again[key] = self._clock

    def remove(self, key: K) -> None:
        if self._once.pop(key, None) is None and self._again.pop(key, None) is None:
            return
        self._chains.remove(key)

    def evict(self, spared: Callable[[K], bool] = nothing_spared, parent: K | None = None) -> K | None:
        lineage = self._chains.lineage(parent)
        last = self._chains.first_end(self._by_age(), lambda key: key in lineage or spared(key))
        if last is not None:
            self._remember(hash(last), again=last in self._again)
            self.remove(last)
        return last

    def _by_age(self) -> Iterator[K]:
        """Each chunk, those of the queue whose oldest goes first before those of the other."""
        first, second = self._once, self._again
        if first and second:
            once, again = (self._clock + 1 - next(iter(queue.values())) for queue in (first, second))
            if once * self.weight < again:
                first, second = second, first
        yield from first
        yield from second

    def _learn(self, again: bool) -> None:
        """A chunk that went returned. The rarer kind of name moves the weight more: fewer of them can return."""
        mine = self._again_ghosts if again else len(self._ghosts) - self._again_ghosts
        share = STEP * max(1.0, (len(self._ghosts) - mine) / mine) / (len(self) + 1)
        self.weight = min(WEIGHT_MAX, max(1.0, self.weight * math.exp(share if again else -share)))

    def _remember(self, name: int, *, again: bool) -> None:
        self._forget(name)
        self._ghosts[name] = again
        self._again_ghosts += again
        while len(self._ghosts) > max(GHOSTS_MIN, GHOSTS * len(self)):
            self._forget(next(iter(self._ghosts)))

    def _forget(self, name: int) -> None:
        self._again_ghosts -= self._ghosts.pop(name, False)
