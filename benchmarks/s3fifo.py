"""S3-FIFO (Yang et al., SOSP 2023) with suffix before prefix: what the memory tier's order of eviction is beside.

New chunks enter a small queue; what was used twice or more when it reaches the end moves to the main queue, the rest
goes and leaves its name in a ghost list; a chunk whose name is there enters the main queue at once. The main queue
gives used chunks another round for each use, up to three. All chunks have one size here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from paceline_kvstore.policy.chains import Chains
from paceline_kvstore.policy.eviction import nothing_spared
from paceline_kvstore.policy.ghost import GhostList

SMALL_SHARE = 0.1
FREQUENCY_MAX = 3


class S3Fifo:
    """An `Eviction[int]`."""

    def __init__(self) -> None:
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        self._ghosts: GhostList[int] = GhostList(0)
        self._chains: Chains[int] = Chains()

    def __len__(self) -> int:
        return len(self._uses)

    def add(self, key: int, size: int, parent: int | None = None) -> None:
        del size
        (self._main if self._ghosts.discard(key) else self._small)[key] = None
        self._uses[key] = 0
        self._chains.add(key, parent)

    def touch(self, key: int) -> None:
        self._uses[key] = min(FREQUENCY_MAX, self._uses[key] + 1)

    def remove(self, key: int) -> None:
        del self._uses[key], (self._small if key in self._small else self._main)[key]
        self._chains.remove(key)

    def evict(self, spared: Callable[[int], bool] = nothing_spared, parent: int | None = None) -> int | None:
        lineage = self._chains.lineage(parent)

        def stays(key: int) -> bool:
            return key in lineage or spared(key)

        last = self._chains.first_end(self._passed_over(), stays)
        if last is None:
            # One queue may be all spared, or all be used: then anything that can go.
            last = self._chains.first_end(self._keys(), stays)
        return None if last is None else self._evicted(last)

    def _passed_over(self) -> Iterator[int]:
        """Each chunk as its turn comes; one that could not go waits for the next."""
        for _ in range(len(self._uses)):
            key = self._pass_over_used()
            yield key
            (self._small if key in self._small else self._main).move_to_end(key)

    def _keys(self) -> Iterator[int]:
        yield from self._small
        yield from self._main

    def _evicted(self, key: int) -> int:
        if key in self._small:
            self._ghosts.limit = len(self._uses)
            self._ghosts.add(key)
        self.remove(key)
        return key

    def _pass_over_used(self) -> int:
        """The first chunk at an end of a queue that was not used enough to stay. Needs at least one chunk."""
        while True:
            if self._small and (not self._main or len(self._small) >= SMALL_SHARE * len(self._uses)):
                key = next(iter(self._small))
                if self._uses[key] <= 1:
                    return key
                del self._small[key]
                self._main[key] = None
                self._uses[key] = 0
                continue
            key = next(iter(self._main))
            if not self._uses[key]:
                return key
            self._uses[key] -= 1
            self._main.move_to_end(key)
