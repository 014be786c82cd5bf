"""Where each chunk lies on disk: about 130 bytes a key, a lookup in microseconds. Must not do I/O.

A slot is a small number that stands for one chunk for as long as it is indexed. Its attributes lie in flat arrays,
one element a slot; keys are found through a table of slots with linear probing. Children of a chunk form a ring-free
list through the slots, so that a chunk's whole subtree can go with it. Python objects per key would take 5x the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import xxhash

from paceline_kvstore.keys import DIGEST_BYTES, KEY_BYTES

NONE = 0
"""No slot: slots count from 1."""

_FIRST_TABLE = 64
_LOAD_MAX = (2, 3)
USES_MAX = 3


class Index:
    """Keys (wire form) -> slots, and the slots' attributes. Not thread-safe: the tier's lock covers it.

    segment, block, payload_bytes: where the record is; segment 0 marks a free slot. born: seconds on a clock of the
    caller's. tenant: a small number of the caller's. uses: touches since the slot was made or moved, up to USES_MAX.
    parent: the slot before it in its chain, or NONE.
    """

    def __init__(self) -> None:
        self._table = array("I", bytes(4 * _FIRST_TABLE))
        self._count = 0
        self._free = array("I")
        # Slot 0 is never used, so that NONE needs no test in the arrays.
        self._keys = bytearray(KEY_BYTES)
        self._hashes = array("Q", [0])
        self.segment = array("I", [0])
        self.block = array("I", [0])
        self.payload_bytes = array("I", [0])
        self.born = array("i", [0])
        self.tenant = array("I", [0])
        self.uses = array("B", [0])
        self.parent = array("I", [NONE])
        self._first_child = array("I", [NONE])
        self._next = array("I", [NONE])
        self._previous = array("I", [NONE])

    def __len__(self) -> int:
        return self._count

    @property
    def num_slots(self) -> int:
        """Slots run from 1 to this number; some may be free."""
        return len(self.segment) - 1

    @property
    def memory_bytes(self) -> int:
        """Bytes of all arrays, spare room included."""
        arrays = (
            *(self._table, self._free, self._keys, self._hashes, self.segment, self.block, self.payload_bytes),
            *(self.born, self.tenant, self.uses, self.parent, self._first_child, self._next, self._previous),
        )
        return sum(part.__sizeof__() for part in arrays)

    def find(self, key: bytes) -> int:
        """The slot of a key, or NONE."""
        digest = xxhash.xxh3_64_intdigest(key)
        table, hashes = self._table, self._hashes
        mask = len(table) - 1
        at = digest & mask
        while slot := table[at]:
            if hashes[slot] == digest and self.key(slot) == key:
                return slot
            at = (at + 1) & mask
        return NONE

    def key(self, slot: int) -> bytes:
        """The key's wire form."""
        return bytes(self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])

    def add(
        self,
        key: bytes,
        segment: int,
        block: int,
        payload_bytes: int,
        *,
        born: int = 0,
        tenant: int = 0,
        parent: int = NONE,
    ) -> int:
        """A slot for a key that is not there."""
        digest = xxhash.xxh3_64_intdigest(key)
        slot = self._free.pop() if self._free else self._new_slot()
        self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = key
        self._hashes[slot] = digest
        self.segment[slot], self.block[slot], self.payload_bytes[slot] = segment, block, payload_bytes
        self.born[slot], self.tenant[slot], self.uses[slot] = born, tenant, 0
        self._count += 1
        if self._count * _LOAD_MAX[1] > len(self._table) * _LOAD_MAX[0]:
            self._rebuild(2 * len(self._table))
        else:
            self._enter(slot, digest)
        if parent:
            self.link(slot, parent)
        return slot

    def link(self, slot: int, parent: int) -> None:
        """Hang a slot without a parent on one. Ignored if that would close a ring, which only forged keys can."""
        above = parent if self._first_child[slot] else NONE
        while above:
            if above == slot:
                return
            above = self.parent[above]
        self.parent[slot] = parent
        first = self._first_child[parent]
        self._next[slot] = first
        if first:
            self._previous[first] = slot
        self._first_child[parent] = slot

    def move(self, slot: int, segment: int, block: int) -> None:
        """The record was copied elsewhere: its uses start anew."""
        self.segment[slot], self.block[slot], self.uses[slot] = segment, block, 0

    def touch(self, slot: int) -> None:
        if self.uses[slot] < USES_MAX:
            self.uses[slot] += 1

    def age(self, slot: int) -> None:
        """Another round: one use is spent."""
        if self.uses[slot]:
            self.uses[slot] -= 1

    def remove(self, slot: int) -> None:
        """Forget a chunk. Its children stay, without a parent."""
        for child in self.children(slot):
            self.parent[child] = self._next[child] = self._previous[child] = NONE
        before, after = self._previous[slot], self._next[slot]
        if before:
            self._next[before] = after
        elif self.parent[slot]:
            self._first_child[self.parent[slot]] = after
        if after:
            self._previous[after] = before
        self.parent[slot] = self._first_child[slot] = self._next[slot] = self._previous[slot] = NONE
        self._leave(slot)
        self.segment[slot] = 0
        self._free.append(slot)
        self._count -= 1

    def children(self, slot: int) -> list[int]:
        found: list[int] = []
        child = self._first_child[slot]
        while child:
            found.append(child)
            child = self._next[child]
        return found

    def subtree(self, slot: int) -> Iterator[int]:
        """The slot and all that follow it, parents before their children. Nothing may change meanwhile."""
        waiting = [slot]
        while waiting:
            slot = waiting.pop()
            yield slot
            waiting += self.children(slot)

    def lineage(self, key: bytes) -> Iterator[int]:
        """The slot of a key and those of all before it, last first."""
        slot = self.find(key)
        while slot:
            yield slot
            slot = self.parent[slot]

    def select(self, *, namespace: bytes | None = None, tenant: int | None = None) -> list[int]:
        """Slots of that namespace and tenant (None: any)."""
        chosen = np.frombuffer(self.segment, dtype=np.uint32) != 0
        if tenant is not None:
            chosen &= np.frombuffer(self.tenant, dtype=np.uint32) == tenant
        if namespace is not None:
            keys = np.frombuffer(self._keys, dtype=np.uint8).reshape(-1, KEY_BYTES)
            chosen &= (keys[:, :DIGEST_BYTES] == np.frombuffer(namespace, dtype=np.uint8)).all(axis=1)
        return [int(slot) for slot in np.flatnonzero(chosen)]

    def check_integrity(self) -> None:
        """Raise ValueError unless each slot is found by its key and hangs on its parent."""
        held = [slot for slot in range(1, self.num_slots + 1) if self.segment[slot]]
        if len(held) != self._count or len(self._free) != self.num_slots - self._count:
            raise ValueError(f"{len(held)} slots are in use, {self._count} are counted")
        for slot in held:
            if self.find(self.key(slot)) != slot:
                raise ValueError(f"slot {slot} is not found by its key")
            parent = self.parent[slot]
            if parent and slot not in self.children(parent):
                raise ValueError(f"slot {slot} is no child of its parent {parent}")

    def _new_slot(self) -> int:
        self._keys.extend(bytes(KEY_BYTES))
        self._hashes.append(0)
        for numbers in (self.segment, self.block, self.payload_bytes, self.born, self.tenant, self.uses):
            numbers.append(0)
        for links in (self.parent, self._first_child, self._next, self._previous):
            links.append(NONE)
        return len(self.segment) - 1

    def _enter(self, slot: int, digest: int) -> None:
        mask = len(self._table) - 1
        at = digest & mask
        while self._table[at]:
            at = (at + 1) & mask
        self._table[at] = slot

    def _leave(self, slot: int) -> None:
        """Take a slot out of the table; entries behind it close the gap (Knuth 6.4, algorithm R)."""
        table, hashes = self._table, self._hashes
        mask = len(table) - 1
        gap = hashes[slot] & mask
        while table[gap] != slot:
            gap = (gap + 1) & mask
        at = gap
        while True:
            at = (at + 1) & mask
            other = table[at]
            if not other:
                break
            # An entry may move into the gap unless its home lies behind the gap.
            if (at - hashes[other]) & mask >= (at - gap) & mask:
                table[gap] = other
                gap = at
        table[gap] = NONE

    def _rebuild(self, size: int) -> None:
        """A larger table, all slots at once: a loop over a million keys would stop readers for a second."""
        table = np.zeros(size, dtype=np.uint32)
        waiting = np.flatnonzero(np.frombuffer(self.segment, dtype=np.uint32)).astype(np.uint32)
        mask = np.uint64(size - 1)
        at = np.frombuffer(self._hashes, dtype=np.uint64)[waiting] & mask
        while len(waiting):
            # Of those that want the same free cell one gets it; the others look further.
            free = table[at] == NONE
            table[at[free]] = waiting[free]
            left = table[at] != waiting
            waiting, at = waiting[left], (at[left] + np.uint64(1)) & mask
        self._table = array("I", table.tobytes())
