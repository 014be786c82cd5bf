"""What a tier around another passes on as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiers.base import Tier


class Wrapper:
    """The part of `Tier` that payloads have no share in. `tier`: the one inside."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    @property
    def bytes_used(self) -> int:
        return self.tier.bytes_used

    @property
    def capacity(self) -> int:
        return self.tier.capacity

    def contains(self, keys: Sequence[ChunkKey], *, deadline: float | None = None) -> int:
        return self.tier.contains(keys, deadline=deadline)

    def delete(self, key: ChunkKey) -> bool:
        return self.tier.delete(key)

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> int:
        return self.tier.clear(namespace=namespace, tenant=tenant)

    def keys(self) -> Iterator[ChunkKey]:
        return self.tier.keys()

    def flush(self) -> bool:
        return self.tier.flush()

    def close(self) -> None:
        self.tier.close()
