"""Chunks that stay for a while because somebody asked for it. A pin is a lease that the server holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiers.base import Lease


@dataclass(frozen=True, slots=True)
class PinLimits:
    """Bounds over all owners: how many pins, how many bytes, and for how many seconds one holds."""

    count: int = 65536
    bytes: int = 1 << 30
    seconds: float = 600.0


@dataclass(slots=True)
class _Pin:
    lease: Lease
    num_bytes: int
    until: float


class Pins:
    """Pins by owner and key, times in seconds. Not safe for threads: whoever owns one has a lock around it."""

    def __init__(self, limits: PinLimits) -> None:
        self.limits = limits
        self.num_bytes = 0
        self._owners: dict[bytes, dict[ChunkKey, _Pin]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, owner: bytes, key: ChunkKey, until: float) -> bool:
        """Make the owner's pin last until then; False if there is none."""
        pin = self._owners.get(owner, {}).get(key)
        if pin is None:
            return False
        pin.until = max(pin.until, until)
        return True

    def add(self, owner: bytes, key: ChunkKey, lease: Lease, until: float) -> bool:
        """Hold the chunk by that lease until then. False if there is no room: the lease stays the caller's."""
        num_bytes = len(lease.payload)
        if self._count >= self.limits.count or self.num_bytes + num_bytes > self.limits.bytes:
            return False
        if key in self._owners.get(owner, {}):
            self._drop(owner, key)
        self._owners.setdefault(owner, {})[key] = _Pin(lease, num_bytes, until)
        self._count += 1
        self.num_bytes += num_bytes
        return True

    def remove(self, owner: bytes, keys: Iterable[ChunkKey] | None = None) -> int:
        """Let go of the owner's pins on these chunks (None: on all); how many there were."""
        pins = self._owners.get(owner, {})
        wanted = list(pins) if keys is None else [key for key in dict.fromkeys(keys) if key in pins]
        for key in wanted:
            self._drop(owner, key)
        return len(wanted)

    def keep(self, wanted: Callable[[ChunkKey], bool]) -> None:
        """Let go of every pin on a chunk that isn't wanted."""
        self._drop_where(lambda key, _pin: not wanted(key))

    def expire(self, now: float) -> None:
        """Let go of the pins whose time is over."""
        self._drop_where(lambda _key, pin: pin.until <= now)

    def keys(self) -> set[ChunkKey]:
        """Chunks that anybody holds."""
        return {key for pins in self._owners.values() for key in pins}

    def holds(self, key: ChunkKey) -> bool:
        """True while anybody holds the chunk."""
        return any(key in pins for pins in self._owners.values())

    def _drop_where(self, doomed: Callable[[ChunkKey, _Pin], bool]) -> None:
        found = [(owner, key) for owner, pins in self._owners.items() for key, pin in pins.items() if doomed(key, pin)]
        for owner, key in found:
            self._drop(owner, key)

    def _drop(self, owner: bytes, key: ChunkKey) -> None:
        pins = self._owners[owner]
        pin = pins.pop(key)
        if not pins:
            del self._owners[owner]
        self._count -= 1
        self.num_bytes -= pin.num_bytes
        pin.lease.release()
