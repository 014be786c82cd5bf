"""A tier that keeps payloads in a smaller form: encoded on the way in, decoded on the way out."""

from __future__ import annotations

from threading import Lock

from paceline_kvstore import codec, encoding
from paceline_kvstore.codec import Buffer
from paceline_kvstore.encoding import Element, Encoding
from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.quarantine import Quarantine
from paceline_kvstore.stats import TierStats
from paceline_kvstore.tiers.base import Lease, Tier
from paceline_kvstore.tiers.wrapper import Wrapper


class EncodedTier(Wrapper):
    """Implements `Tier` around one. What can't be decoded is a miss, dropped and counted; what has no such form is not
    kept.

    element: what payloads are made of.
    """

    def __init__(self, tier: Tier, form: Encoding, element: Element) -> None:
        super().__init__(tier)
        self.quarantine = Quarantine()
        self._form = form
        self._element = element
        self._lock = Lock()
        self._corrupt = self._refused = 0

    @property
    def stats(self) -> TierStats:
        """The tier's counts; those that were refused here are misses and refused puts."""
        stats = self.tier.stats
        with self._lock:
            stats.hits -= self._corrupt
            stats.misses += self._corrupt
            stats.corrupt += self._corrupt
            stats.refused += self._refused
        return stats

    def put(
        self,
        key: ChunkKey,
        payload: Buffer,
        *,
        parent: ChunkKey | None = None,
        tenant: str = "",
        durable: bool = False,
    ) -> bool:
        try:
            encoded = encoding.encode(payload, self._form, self._element)
        except ValueError:
            with self._lock:
                self._refused += 1
            return False
        return self.tier.put(key, encoded, parent=parent, tenant=tenant, durable=durable)

    def get(self, key: ChunkKey, *, deadline: float | None = None) -> memoryview | None:
        encoded = self.tier.get(key, deadline=deadline)
        return None if encoded is None else self._decode(key, encoded)

    def read_into(self, key: ChunkKey, target: bytearray | memoryview, *, deadline: float | None = None) -> int | None:
        payload = self.get(key, deadline=deadline)
        if payload is None:
            return None
        view = codec.as_bytes(target)
        if len(payload) > len(view):
            raise ValueError(f"the payload has {len(payload)} bytes, the buffer {len(view)}")
        view[: len(payload)] = payload
        return len(payload)

    def lease(self, key: ChunkKey, *, deadline: float | None = None) -> Lease | None:
        payload = self.get(key, deadline=deadline)
        return None if payload is None else Lease(payload)

    def _decode(self, key: ChunkKey, encoded: memoryview) -> memoryview | None:
        try:
            payload = bytearray(encoding.decoded_bytes(encoded))
            encoding.decode(encoded, payload)
        except KVStoreError as error:
            self.quarantine.add(key, "encoded", error)
            with self._lock:
                self._corrupt += 1
            self.tier.delete(key)
            return None
        return memoryview(payload).toreadonly()
