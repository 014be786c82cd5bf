"""A tier whose place others can read or write: payloads are sealed on the way in and opened on the way out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from paceline_kvstore import codec, crypto
from paceline_kvstore.codec import Buffer
from paceline_kvstore.crypto import KeyRing, Suite
from paceline_kvstore.errors import ForeignChunk, KVStoreError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.quarantine import Quarantine
from paceline_kvstore.stats import TierStats
from paceline_kvstore.tiers.base import Lease, Tier
from paceline_kvstore.tiers.wrapper import Wrapper

CLOCK_SKEW_S = 300.0
"""A chunk sealed further ahead of this machine's clock counts as too old: its age is unknown."""


@dataclass(frozen=True, slots=True)
class SealOptions:
    """ttl_s: a chunk's life from when it was sealed, wherever it was since (None: no bound).

    wall_s: seconds since 1970. random_bytes: fresh randomness of that many bytes.
    """

    suite: Suite = Suite.ENCRYPTED
    ttl_s: float | None = None
    wall_s: Callable[[], float] = time.time
    random_bytes: Callable[[int], bytes] = os.urandom


class SealedTier(Wrapper):
    """Implements `Tier` around one. A forged, changed, foreign or outlived chunk is a miss and counted.

    One that is broken or too old is dropped. One sealed with a key that is not in the ring stays: while keys are being
    rotated others may have that key already.
    """

    def __init__(self, tier: Tier, ring: KeyRing, options: SealOptions | None = None) -> None:
        super().__init__(tier)
        self.quarantine = Quarantine()
        self._ring = ring
        self._options = options or SealOptions()
        self._lock = Lock()
        self._corrupt = self._expired = 0

    @property
    def stats(self) -> TierStats:
        """The tier's counts, in which chunks that were refused here are misses."""
        stats = self.tier.stats
        with self._lock:
            refused = self._corrupt + self._expired
            stats.hits -= refused
            stats.misses += refused
            stats.corrupt += self._corrupt
            stats.expired += self._expired
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
        options = self._options
        sealed = crypto.seal(
            self._ring,
            options.suite,
            key,
            payload,
            now_ms=max(0, int(options.wall_s() * 1000)),
            nonce=options.random_bytes(crypto.NONCE_BYTES),
        )
        return self.tier.put(key, sealed, parent=parent, tenant=tenant, durable=durable)

    def get(self, key: ChunkKey, *, deadline: float | None = None) -> memoryview | None:
        sealed = self.tier.get(key, deadline=deadline)
        return None if sealed is None else self._open(key, sealed, None)

    def read_into(self, key: ChunkKey, target: bytearray | memoryview, *, deadline: float | None = None) -> int | None:
        lease = self.tier.lease(key, deadline=deadline)
        if lease is None:
            return None
        view = codec.as_bytes(target)
        with lease as sealed:
            size = crypto.payload_size(self._options.suite, sealed)
            fits = size <= len(view)
            # What is too long may be a forgery, which is a miss and not the caller's mistake.
            if self._open(key, sealed, view if fits else None) is None:
                return None
        if not fits:
            raise ValueError(f"the payload has {size} bytes, the buffer {len(view)}")
        return size

    def lease(self, key: ChunkKey, *, deadline: float | None = None) -> Lease | None:
        lease = self.tier.lease(key, deadline=deadline)
        if lease is None:
            return None
        with lease as sealed:
            # A signed payload is a view into the lease's memory and keeps it.
            payload = self._open(key, sealed, None)
        return None if payload is None else Lease(payload)

    def _open(self, key: ChunkKey, sealed: memoryview, target: memoryview | None) -> memoryview | None:
        options = self._options
        try:
            unsealed = crypto.unseal(self._ring, options.suite, key, sealed, target)
        except KVStoreError as error:
            self.quarantine.add(key, "sealed", error)
            with self._lock:
                self._corrupt += 1
            if not isinstance(error, ForeignChunk):
                self.tier.delete(key)
            return None
        age = options.wall_s() - unsealed.sealed_ms / 1000
        if options.ttl_s is not None and not -CLOCK_SKEW_S <= age < options.ttl_s:
            with self._lock:
                self._expired += 1
            self.tier.delete(key)
            return None
        return unsealed.payload
