"""Making room: which segment gives way, copies of what is worth keeping, the rest forgotten with what follows it.

Used chunks move to the head of the log. A chunk goes together with all that hang on it, or stays if one of them was
used or is spared: never the prefix before its suffix.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from paceline_kvstore.arena import Bytes
from paceline_kvstore.disk.catalog import Catalog, Place
from paceline_kvstore.disk.record import BLOCK, Record, record_bytes
from paceline_kvstore.disk.segment import Segment
from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.eviction import nothing_spared
from paceline_kvstore.policy.segments import ROUNDS, Candidate, Keepers, SegmentFacts, keepers, victims

SUBTREE_MAX = 64
"""How many followers are looked at before a chunk counts as used no more than they: bounds one look under the lock."""

Reserve = Callable[[int], tuple[Segment, int] | None]
"""Bytes of a record -> room for it at the head of the log."""


class Cleaner:
    """Frees one segment at a time. One thread at a time: the writers' lock covers it.

    A file of `spare_bytes` or more is kept as the spare if there is none: the next head of the log reuses it.
    """

    def __init__(
        self,
        catalog: Catalog,
        spared: Callable[[ChunkKey], bool],
        reserve: Reserve,
        buffer: Callable[[int], Bytes],
        *,
        spare_bytes: int,
    ) -> None:
        self._catalog = catalog
        self._spared = spared
        self._reserve = reserve
        self._buffer = buffer
        self._spare_bytes = spare_bytes

    def free_one(self, budget: int, before: bytes) -> int | None:
        """Remove a segment, copying at most `budget` bytes on; chunks lost with it, None if none could be removed.

        The chunk with the key `before` (wire form) stays, with all before it: room is made for what follows it.

        OSError if the file system fails; then nothing more is lost than was copied or forgotten so far.
        """
        with self._catalog.lock:
            lineage = set(self._catalog.index.lineage(before))
        passed_over: list[tuple[int, list[int]]] = []
        for facts in victims(self._facts()):
            chosen = self._choose(facts, budget, lineage)
            if chosen is None:
                continue
            if chosen.lost_used and len(passed_over) < ROUNDS:
                passed_over.append((facts.number, chosen.slots))
                self._another_round(facts.number)
            elif (segment := self._seal(facts.number)) is not None:
                return self._give_way(segment, chosen.slots)
        for number, slots in passed_over:
            if (segment := self._seal(number)) is not None:
                return self._give_way(segment, slots)
        return None

    def _facts(self) -> list[SegmentFacts]:
        catalog = self._catalog
        with catalog.lock:
            idle = [segment for segment in catalog.segments.values() if not segment.writers]
            # The head is young, and half empty is not half dead: it goes only when it is all there is.
            older = [segment for segment in idle if segment is not catalog.active] or idle
            return [SegmentFacts(one.number, one.turn, one.end - BLOCK, one.live) for one in older]

    def _choose(self, facts: SegmentFacts, budget: int, lineage: set[int]) -> Keepers | None:
        with self._catalog.lock:
            segment = self._catalog.segments[facts.number]
        return keepers(self._candidates(segment, lineage), min(budget, facts.budget), keep_unused=facts.mostly_dead)

    def _another_round(self, number: int) -> None:
        catalog = self._catalog
        with catalog.lock:
            segment = catalog.segments[number]
            segment.turn = 1 + max(other.turn for other in catalog.segments.values())
            for slot in catalog.slots_of(segment):
                catalog.index.age(slot)

    def _give_way(self, segment: Segment, slots: list[int]) -> int:
        self._copy_on(segment, slots)
        return self._remove(segment)

    def _seal(self, number: int) -> Segment | None:
        """No record is added to the segment from now on; None if somebody is writing one."""
        catalog = self._catalog
        with catalog.lock:
            segment = catalog.segments.get(number)
            if segment is None or segment.writers:
                return None
            if catalog.active is segment:
                catalog.active = None
            return segment

    def _candidates(self, segment: Segment, lineage: set[int]) -> list[Candidate]:
        catalog, index = self._catalog, self._catalog.index
        with catalog.lock:
            slots = catalog.slots_of(segment)
        found: list[Candidate] = []
        for slot in slots:
            # One lock hold a record: lookups must not wait for a whole segment.
            with catalog.lock:
                if index.segment[slot] != segment.number or catalog.is_expired(slot):
                    continue
                size = record_bytes(index.payload_bytes[slot])
                uses, keys = self._family(slot)
            found.append(Candidate(slot, size, uses, slot in lineage or any(map(self._spared, keys))))
        return found

    def _family(self, slot: int) -> tuple[int, list[ChunkKey]]:
        """Uses of a chunk, or else of what hangs on it, and the keys to ask about if any may be spared."""
        index = self._catalog.index
        uses = index.uses[slot]
        if uses and self._spared is nothing_spared:
            return uses, []
        family = list(islice(index.subtree(slot), SUBTREE_MAX))
        uses = uses or max(index.uses[member] for member in family)
        if self._spared is nothing_spared:
            return uses, []
        return uses, [ChunkKey.from_bytes(index.key(member)) for member in family]

    def _copy_on(self, segment: Segment, slots: list[int]) -> None:
        """Copies are on the device before the original goes, so a durable chunk stays durable. OSError."""
        catalog = self._catalog
        written: dict[int, Segment] = {}
        for slot in slots:
            with catalog.lock:
                if catalog.index.segment[slot] != segment.number:
                    continue
                place = catalog.place(slot)
                key = ChunkKey.from_bytes(catalog.index.key(slot))
            payload = self._buffer(place.payload_bytes)
            try:
                record = place.segment.read(place.offset, payload, key)
            except (OSError, KVStoreError):
                continue
            target = self._copy(slot, place, record, payload)
            if target is not None:
                written[target.number] = target
        for target in written.values():
            target.sync()

    def _copy(self, slot: int, place: Place, record: Record, payload: Bytes) -> Segment | None:
        catalog = self._catalog
        room = self._reserve(record.size)
        if room is None:
            return None
        target, offset = room
        try:
            target.write(offset, payload, lambda: record)
            with catalog.lock:
                counts = catalog.index.segment[slot] == place.segment.number and catalog.place(slot) == place
                if counts:
                    catalog.move(slot, target, offset)
            if not counts:
                # Dropped or replaced meanwhile: the copy must not bring it back after a restart.
                target.kill(offset, record.payload_bytes)
        finally:
            with catalog.lock:
                target.writers -= 1
        return target

    def _remove(self, segment: Segment) -> int:
        catalog = self._catalog
        lost: list[Place] = []
        with catalog.lock:
            for slot in catalog.slots_of(segment):
                # A subtree may have taken it along already.
                if catalog.index.segment[slot] == segment.number:
                    lost += catalog.forget_subtree(slot)
            catalog.remove_segment(segment)
            spare = catalog.spare is None and segment.size >= self._spare_bytes
        if spare and segment.retire():
            with catalog.lock:
                catalog.keep_spare(segment)
        else:
            segment.unlink()
        for place in lost:
            if place.segment is not segment:
                place.kill()
        return len(lost)
