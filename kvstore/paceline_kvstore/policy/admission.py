"""Whether a chunk is worth writing to a slow tier: only when it is offered again. Must not do I/O.

Most chunks of one-shot prompts never come back; the second offer is the proof that this one did. The names of first
offers are kept in a bounded list, so a chunk that comes back too late starts anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from paceline_kvstore.policy.ghost import GhostList

K = TypeVar("K", bound=Hashable)


class SecondOffer(Generic[K]):
    """Remembers the last `limit` keys that were offered once; 0 admits everything. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"the number of remembered offers must not be negative, it is {limit}")
        self._offered: GhostList[K] = GhostList(limit)

    def offer(self, key: K) -> bool:
        """Whether to write the chunk now."""
        if not self._offered.limit or self._offered.discard(key):
            return True
        self._offered.add(key)
        return False
