"""Orders of eviction: what goes is held, not spared, the end of its chain; scans do not push out what is used."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline_kvstore.policy.eviction import GHOSTS, AdaptiveLru, Eviction, Lru

ORDERS = {"lru": Lru, "adaptive": AdaptiveLru}


class OrderAgainstForest(RuleBasedStateMachine):
    """Keys are 0..19; key k may hang on any smaller one, so the forest has no rings."""

    @initialize(order=st.sampled_from(sorted(ORDERS)))
    def make(self, order: str) -> None:
        self.order: Eviction[int] = ORDERS[order]()
        self.parent: dict[int, int | None] = {}

    def lineage(self, key: int | None) -> set[int]:
        found: set[int] = set()
        while key is not None and key in self.parent:
            found.add(key)
            key = self.parent[key]
        return found

    @rule(key=st.integers(0, 19), size=st.integers(1, 50), data=st.data())
    def add(self, key: int, size: int, data: st.DataObject) -> None:
        if key in self.parent:
            with pytest.raises(ValueError, match="there already"):
                self.order.add(key, size)
            return
        parent = data.draw(st.none() | st.integers(0, key - 1)) if key else None
        self.order.add(key, size, parent)
        self.parent[key] = parent

    @rule(key=st.integers(0, 19))
    def touch(self, key: int) -> None:
        self.order.touch(key)

    @rule(key=st.integers(0, 19))
    def remove(self, key: int) -> None:
        self.order.remove(key)
        self.parent.pop(key, None)

    @rule(spared=st.frozensets(st.integers(0, 19)), parent=st.none() | st.integers(0, 19))
    def evict(self, spared: frozenset[int], parent: int | None) -> None:
        kept = spared | self.lineage(parent)
        held = set(self.parent)
        leaves = held - set(self.parent.values())
        victim = self.order.evict(spared.__contains__, parent)
        if victim is None:
            assert leaves <= kept, "something could have gone"
        else:
            assert victim in leaves - kept
            del self.parent[victim]

    @invariant()
    def same_size(self) -> None:
        assert len(self.order) == len(self.parent)


TestOrderAgainstForest = OrderAgainstForest.TestCase
TestOrderAgainstForest.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def hits(order: Eviction[int], trace: list[int], capacity: int) -> int:
    held: set[int] = set()
    found = 0
    for key in trace:
        if key in held:
            found += 1
            order.touch(key)
            continue
        if len(held) == capacity:
            victim = order.evict()
            assert victim is not None
            held.remove(victim)
        order.add(key, 1)
        held.add(key)
    return found


def test_least_recently_used_goes_first():
    order: Lru[int] = Lru()
    for key in (1, 2, 3):
        order.add(key, 1)
    order.touch(1)
    assert [order.evict() for _ in range(4)] == [2, 3, 1, None]


def test_what_is_used_survives_a_scan_of_what_is_not():
    hot = list(range(50))
    trace = hot * 3
    for start in range(1000, 21000, 200):
        trace += [*range(start, start + 200), *hot]
    assert hits(AdaptiveLru(), trace, 100) > 0.9 * 100 * len(hot)
    assert hits(Lru(), trace, 100) < 0.1 * 100 * len(hot)


def test_where_everything_comes_again_soon_and_then_never_it_is_lru():
    # Ten prompts at a time, each asked four times: what was used often is what comes no more.
    trace = [10 * at + number for at in range(2000) for _ in range(4) for number in (at, at + 3, at + 7)]
    assert hits(AdaptiveLru(), trace, 12) >= hits(Lru(), trace, 12) > 0


def test_the_weight_is_learnt_in_both_directions():
    order: AdaptiveLru[int] = AdaptiveLru()
    scans = [key for start in range(1000, 21000, 200) for key in (*range(start, start + 200), *range(50))]
    hits(order, scans, 100)
    resisting = order.weight
    assert resisting > 2, "used chunks came back after they had gone"
    for _ in range(len(order)):
        order.evict()
    twice = [key for at in range(50_000, 53_000) for key in (at, at - 150)]
    hits(order, twice, 100)
    assert order.weight < resisting / 2, "chunks that had been used once came back after they had gone"


def test_a_chunk_that_comes_back_soon_counts_as_used_again():
    order: AdaptiveLru[int] = AdaptiveLru()
    order.weight = 5.0
    for key in range(10):
        order.add(key, 1)
    assert order.evict() == 0
    order.add(0, 1)
    assert order.evict() == 1
    for key in range(10, 14):
        order.add(key, 1)
        order.touch(0)
    assert [order.evict() for _ in range(13)] == [*range(2, 14), 0]


def test_a_ring_of_forged_parents_ends():
    for make in ORDERS.values():
        order: Eviction[int] = make()
        order.add(1, 1, parent=2)
        order.add(2, 1, parent=1)
        order.add(3, 1, parent=3)
        assert {order.evict(parent=None) for _ in range(3)} == {1, 2, 3}


def test_names_of_what_went_are_bounded_by_what_is_held():
    order: AdaptiveLru[int] = AdaptiveLru()
    for key in range(5000):
        if key >= 100:
            order.evict()
        order.add(key, 1)
    assert len(order._ghosts) <= GHOSTS * 100


def test_room_beside_a_long_prefix_is_found_in_one_pass():
    # Every chunk of the prefix leads to its end, which must stay.
    for make in ORDERS.values():
        order: Eviction[int] = make()
        looks = 0

        def spared(key: int) -> bool:
            nonlocal looks
            looks += 1
            return key == 2999

        for key in range(3000):
            order.add(key, 1, key - 1 if key else None)
        order.add(5000, 1)
        assert order.evict(spared) == 5000
        assert looks == 2


@pytest.mark.parametrize("skew", [0.8, 1.0, 1.2])
def test_the_adaptive_order_beats_lru_on_skewed_traffic(skew: float):
    rng = random.Random(3)
    weights = [1 / (rank + 1) ** skew for rank in range(20_000)]
    trace = rng.choices(range(20_000), weights, k=60_000)
    assert hits(AdaptiveLru(), trace, 500) > 1.03 * hits(Lru(), trace, 500)
