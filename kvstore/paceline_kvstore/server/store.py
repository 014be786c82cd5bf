"""The tier that the node server shares, with what only a server adds: pins, a bound on age, and purges.

The protocol and the admin port both call this; neither touches the tier itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from paceline_kvstore.codec import Buffer
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.server.ledger import Ledger
from paceline_kvstore.server.pins import PinLimits, Pins
from paceline_kvstore.stats import TierStats
from paceline_kvstore.tiers.base import FillableTier, Filling, Lease, Tier

ADMIN = b"admin"
"""Owner of the pins that come from the admin port; they end only with their time."""
_PRUNE_AT = 1024


@dataclass(frozen=True, slots=True)
class Pinned:
    """What pins hold now."""

    count: int
    num_bytes: int


class NodeStore:
    """A tier for many clients. Safe to call from several threads. `clock` gives seconds and never goes back."""

    def __init__(
        self,
        tier: Tier,
        *,
        ttl: float | None = None,
        pin_limits: PinLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self._clock = clock
        self._lock = Lock()
        self._ledger = Ledger(ttl)
        self._prune_at = _PRUNE_AT
        self._pins = Pins(pin_limits or PinLimits())
        self._sessions: Counter[bytes] = Counter()
        self._expired = 0

    @property
    def stats(self) -> TierStats:
        """The tier's counts, with what the server let expire."""
        stats = self.tier.stats
        stats.expired += self._expired
        return stats

    @property
    def pinned(self) -> Pinned:
        with self._lock:
            return Pinned(len(self._pins), self._pins.num_bytes)

    @property
    def pin_seconds_max(self) -> float:
        return self._pins.limits.seconds

    def open_session(self, session: bytes) -> None:
        """A connection of that session came."""
        with self._lock:
            self._sessions[session] += 1

    def close_session(self, session: bytes) -> None:
        """A connection of that session ended; the last one takes the session's pins with it."""
        with self._lock:
            self._sessions[session] -= 1
            if self._sessions[session] <= 0:
                del self._sessions[session]
                self._pins.remove(session)

    def lease(self, key: ChunkKey) -> Lease | None:
        """As `Tier.lease`, unless the chunk is too old."""
        self._expire_if_old(key)
        return self.tier.lease(key)

    def put(self, key: ChunkKey, payload: Buffer, *, parent: ChunkKey | None, tenant: str, durable: bool) -> bool:
        """As `Tier.put`. A chunk that is there already keeps its age."""
        self._expire_if_old(key)
        there = self.tier.contains([key]) == 1
        if not self.tier.put(key, payload, parent=parent, tenant=tenant, durable=durable):
            return False
        with self._lock:
            if not (there and self._ledger.knows(key)):
                self._ledger.add(key, parent, self._clock())
        return True

    def fill(self, key: ChunkKey, num_bytes: int, *, parent: ChunkKey | None, tenant: str) -> Filling | None:
        """The tier's own memory to receive a chunk into, or None: where the tier has no such thing, has the chunk
        already, or no room."""
        self._expire_if_old(key)
        if not isinstance(self.tier, FillableTier) or self.tier.contains([key]):
            return None
        filling = self.tier.fill(key, num_bytes, parent=parent, tenant=tenant)
        if filling is None:
            return None
        keep = filling.keep

        def keep_and_note(header: bytes) -> bool:
            kept = keep(header)
            with self._lock:
                self._ledger.add(key, parent, self._clock())
            return kept

        return Filling(filling.buffer, keep_and_note)

    def contains(self, keys: Sequence[ChunkKey]) -> int:
        """As `Tier.contains`; a chunk that is too old isn't there."""
        count = self.tier.contains(keys)
        with self._lock:
            if self._ledger.ttl is None:
                return count
            now = self._clock()
            return next((index for index in range(count) if self._ledger.is_expired(keys[index], now)), count)

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Forget these chunks, pinned or not; how many there were."""
        doomed = set(keys)
        # The ledger first: whoever stores one of them meanwhile gets an entry that is not taken away again.
        with self._lock:
            for key in doomed:
                self._ledger.forget(key)
        count = sum(self.tier.delete(key) for key in doomed)
        self._release_gone(doomed)
        return count

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> int:
        """Forget the chunks of that namespace and tenant (None: of any), pinned or not; how many there were."""
        count = self.tier.clear(namespace=namespace, tenant=tenant)
        with self._lock:
            pinned = self._pins.keys()
        self._release_gone(pinned)
        return count

    def invalidate_chain(self, prefix: str) -> int:
        """Forget the chunks whose chain hash, in hex, starts so, and all that follow them; how many there were."""
        held = self.tier.keys()
        found = [key for key in held if key.chain.hex().startswith(prefix)]
        with self._lock:
            doomed = self._ledger.with_descendants(found)
        return self.delete(doomed)

    def pin(self, owner: bytes, keys: Iterable[ChunkKey], seconds: float) -> int:
        """Hold the leading chunks that are there for so long, at most `pin_seconds_max`; how many those are."""
        held: list[ChunkKey] = []
        for key in keys:
            if not self._pin(owner, key, seconds):
                break
            held.append(key)
        # A purge between lease and entry must not be outlived.
        self._release_gone(set(held))
        return len(held)

    def unpin(self, owner: bytes, keys: Iterable[ChunkKey]) -> int:
        """Let go of the owner's pins on these; how many there were."""
        with self._lock:
            return self._pins.remove(owner, keys)

    def is_pinned(self, key: ChunkKey) -> bool:
        """True while anybody holds it."""
        with self._lock:
            return self._pins.holds(key)

    def sweep(self) -> None:
        """Drop what is too old, pins whose time is over, and memories of chunks that are gone. Call it now and then."""
        with self._lock:
            now = self._clock()
            self._pins.expire(now)
            expired = self._ledger.expired(now)
            crowded = len(self._ledger) >= self._prune_at
        self._expire(expired)
        if crowded:
            held = set(self.tier.keys())
            with self._lock:
                self._ledger.prune(held, now)
                self._prune_at = max(_PRUNE_AT, 2 * len(self._ledger))

    def flush(self) -> bool:
        return self.tier.flush()

    def close(self) -> None:
        """Let go of all pins and close the tier."""
        with self._lock:
            self._pins.keep(lambda _key: False)
        self.tier.close()

    def _pin(self, owner: bytes, key: ChunkKey, seconds: float) -> bool:
        self._expire_if_old(key)
        until = self._clock() + min(seconds, self._pins.limits.seconds)
        with self._lock:
            if self._pins.extend(owner, key, until):
                return True
        lease = self.tier.lease(key)
        if lease is None:
            return False
        with self._lock:
            # The pins of a session whose last connection has gone would stay until their time.
            if (owner == ADMIN or owner in self._sessions) and self._pins.add(owner, key, lease, until):
                return True
        lease.release()
        return False

    def _expire_if_old(self, key: ChunkKey) -> None:
        if self._ledger.ttl is None:
            return
        with self._lock:
            expired = self._ledger.is_expired(key, self._clock())
        if expired:
            self._expire([key])

    def _expire(self, keys: list[ChunkKey]) -> None:
        if keys:
            count = self.delete(keys)
            with self._lock:
                self._expired += count

    def _release_gone(self, keys: set[ChunkKey]) -> None:
        """Pins must not keep the bytes of chunks that were forgotten."""
        with self._lock:
            held = {key for key in keys if self._pins.holds(key)}
        gone = {key for key in held if self.tier.contains([key]) == 0}
        if gone:
            with self._lock:
                self._pins.keep(lambda key: key not in gone)
