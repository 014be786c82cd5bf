"""Names of chunks that are not held: a bounded list, oldest forgotten first. Must not do I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class GhostList(Generic[K]):
    """The last `limit` names added. The limit may change; it takes effect at the next add."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._names: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: K) -> bool:
        return key in self._names

    def add(self, key: K) -> None:
        """Remember a name as the newest."""
        self._names.pop(key, None)
        self._names[key] = None
        while len(self._names) > max(0, self.limit):
            self._names.popitem(last=False)

    def discard(self, key: K) -> bool:
        """Forget a name; whether it was there."""
        return self._names.pop(key, self) is None
