"""The disk index against a dict: whatever is added, moved and removed, each key is found where it is."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline_kvstore import ChunkKey
from paceline_kvstore.disk.index import NONE, USES_MAX, Index


def wire(number: int) -> bytes:
    return ChunkKey(bytes([number % 3]) * 32, number.to_bytes(32, "big"), 16).to_bytes()


class IndexAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.slots: dict[int, int] = {}
        self.parent: dict[int, int | None] = {}

    def descendants(self, number: int) -> set[int]:
        below = {number}
        while more := {child for child, parent in self.parent.items() if parent in below} - below:
            below |= more
        return below

    @rule(number=st.integers(0, 200), parent=st.none() | st.integers(0, 200), place=st.integers(1, 1000))
    def add(self, number: int, parent: int | None, place: int) -> None:
        if number in self.slots:
            return
        above = parent if parent in self.slots else None
        slot = NONE if above is None else self.slots[above]
        self.slots[number] = self.index.add(wire(number), place, place + 1, place + 2, tenant=number % 5, parent=slot)
        self.parent[number] = above

    @rule(number=st.integers(0, 200))
    def remove(self, number: int) -> None:
        if number in self.slots:
            self.index.remove(self.slots.pop(number))
            del self.parent[number]
            self.parent = {child: None if above == number else above for child, above in self.parent.items()}

    @rule(number=st.integers(0, 200), parent=st.integers(0, 200))
    def link(self, number: int, parent: int) -> None:
        if number in self.slots and parent in self.slots and self.parent[number] is None and number != parent:
            ring = parent in self.descendants(number)
            self.index.link(self.slots[number], self.slots[parent])
            if not ring:
                self.parent[number] = parent

    @invariant()
    def same_as_the_dict(self) -> None:
        self.index.check_integrity()
        assert len(self.index) == len(self.slots)
        for number in range(0, 200, 7):
            assert self.index.find(wire(number)) == self.slots.get(number, NONE)
        for number, slot in self.slots.items():
            below = {self.slots[member] for member in self.descendants(number)}
            assert set(self.index.subtree(slot)) == below

    @invariant()
    def selections(self) -> None:
        chosen = {slot for number, slot in self.slots.items() if number % 5 == 2 and number % 3 == 1}
        assert set(self.index.select(namespace=bytes([1]) * 32, tenant=2)) == chosen


TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


def test_many_keys_come_and_go():
    index, rng, held = Index(), random.Random(1), {}
    for number in range(5_000):
        held[number] = index.add(wire(number), 1, number, 0)
        if rng.random() < 0.5:
            gone = rng.choice(range(number + 1))
            if gone in held:
                index.remove(held.pop(gone))
    assert all(index.block[index.find(wire(number))] == number for number in held)
    assert sum(1 for number in range(5_000) if index.find(wire(number))) == len(held)


def test_a_key_costs_less_than_200_bytes():
    index = Index()
    for number in range(50_000):
        index.add(wire(number), 1, number, 0)
    assert index.memory_bytes / len(index) < 200


def test_uses_stop_at_their_most_and_start_anew_after_a_move():
    index = Index()
    slot = index.add(wire(1), 1, 1, 0)
    for _ in range(USES_MAX + 5):
        index.touch(slot)
    assert index.uses[slot] == USES_MAX
    index.move(slot, 2, 7)
    assert (index.segment[slot], index.block[slot], index.uses[slot]) == (2, 7, 0)
