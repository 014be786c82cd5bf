"""The store that the node server shares, with what only a server adds: bounds on pins, where chunks are, purges.

The protocol and the admin port both call this. Chunks go in and out through `tier`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.chains import Chains
from paceline_kvstore.tiered.store import PROBE_SECONDS, TieredStore
from paceline_kvstore.tiered.tier import StoreTier

ADMIN = "admin"
"""Holder of the pins that come from the admin port, unless it names another."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What pins hold now."""

    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Copies that are gone, and the tiers that failed meanwhile: what they had may still be there."""

    count: int
    incomplete: tuple[str, ...] = ()


class NodeStore:
    """A tiered store for many clients. Safe to call from several threads.

    pin_seconds_max: longest that one pin holds without being made again.
    """

    def __init__(self, store: TieredStore, *, pin_seconds_max: float = 600.0) -> None:
        self.tiered = store
        self.tier = StoreTier(store)
        self.pin_seconds_max = pin_seconds_max

    @property
    def pinned(self) -> Pinned:
        now = self.tiered.clock()
        return Pinned(self.tiered.pins.num_keys(now), self.tiered.pins.num_bytes(now))

    def is_pinned(self, key: ChunkKey) -> bool:
        """True while anybody holds it."""
        return self.tiered.pins.is_held(key, self.tiered.clock())

    def pin(self, holder: str, keys: Sequence[ChunkKey], seconds: float) -> int:
        """Hold chunks, those that come later too, instead of what the holder held, for at most `pin_seconds_max`.

        How many leading ones are there and held.
        """
        held = self.tiered.pin(holder, keys, self._bounded(seconds))
        # Looked at after they are held: what is there now stays.
        return self.tier.contains(keys[:held])

    def extend(self, holder: str, seconds: float) -> bool:
        """Hold what the holder holds for so long from now; False if it holds nothing."""
        return self.tiered.extend(holder, self._bounded(seconds))

    def unpin(self, holder: str) -> bool:
        """Let go; False if the holder held nothing."""
        return self.tiered.unpin(holder)

    def where(self, keys: Sequence[ChunkKey]) -> list[tuple[str, ...]]:
        """The tiers that have each chunk. One that must be asked says how many leading keys it has."""
        names: list[list[str]] = [[] for _ in keys]
        for level in self.tiered.levels:
            if level.options.is_indexed:
                found = [level.has(key) for key in keys]
            else:
                count = level.probe(keys, PROBE_SECONDS)
                found = [index < count or level.has(key) for index, key in enumerate(keys)]
            for each, has in zip(names, found, strict=True):
                each.extend([level.name] if has else [])
        return [tuple(each) for each in names]

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> Removed:
        """Forget the chunks of that namespace and tenant (None: of any) in all tiers, pinned or not."""
        return self._removing(lambda: self.tier.clear(namespace=namespace, tenant=tenant))

    def invalidate_chain(self, prefix: str) -> Removed:
        """Forget the chunks whose chain hash, in hex, starts so, and all that are known to follow them.

        Memory and disk know what follows what; S3 and a node server forget what is named here.
        """
        return self._removing(lambda: sum(map(self.tiered.delete, self._with_descendants(prefix))))

    def drain(self, seconds: float) -> bool:
        """Write what only memory has to the first tier that outlives the process; whether all of it is there."""
        return self.tiered.drain(seconds)

    def sweep(self) -> None:
        """Drop what is too old. Call it now and then."""
        self.tiered.expire()

    def close(self) -> None:
        """Stop the store's threads and close its tiers."""
        self.tiered.close()

    def _bounded(self, seconds: float) -> float:
        return min(seconds, self.pin_seconds_max)

    def _with_descendants(self, prefix: str) -> Iterable[ChunkKey]:
        chains: Chains[ChunkKey] = Chains()
        for key in self.tiered.keys():  # noqa: SIM118 -- a store is no mapping
            parents = (level.parent(key) for level in self.tiered.levels)
            chains.add(key, next((parent for parent in parents if parent is not None), None))
        return chains.descendants(key for key in list(chains) if key.chain.hex().startswith(prefix))

    def _removing(self, remove: Callable[[], int]) -> Removed:
        before = [level.faults for level in self.tiered.levels]
        count = remove()
        # Another call's fault counts as well: better asked once more than left behind.
        levels = zip(self.tiered.levels, before, strict=True)
        return Removed(count, tuple(level.name for level, faults in levels if level.faults != faults))
