"""Pins: what is held is held until its time, whoever dies, and never a moment longer; and never more than may be."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline_kvstore.policy.holds import Holds

KEYS_MAX, BYTES_MAX = 12, 40
HOLDERS = st.sampled_from("abcde")
KEYS = st.lists(st.integers(0, 9), max_size=6, unique=True)
SECONDS = st.integers(-2, 10)


class HoldsAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.holds: Holds[int] = Holds(KEYS_MAX, BYTES_MAX)
        self.model: dict[str, tuple[list[int], float]] = {}
        self.sizes: dict[int, int] = {}
        self.now = 0.0

    @rule(holder=HOLDERS, keys=KEYS, seconds=SECONDS, size=st.integers(0, 9))
    def hold(self, holder: str, keys: list[int], seconds: int, size: int) -> None:
        self.model.pop(holder, None)
        self.settle()
        kept: list[int] = []
        for key in keys if seconds > 0 else ():
            sizes = self.sizes | {key: max(size, self.sizes.get(key, 0))}
            count = sum(len(held) for held, _ in self.model.values()) + len(kept)
            if count >= KEYS_MAX or sum(sizes.values()) > BYTES_MAX:
                break
            self.sizes = sizes
            kept.append(key)
        assert self.holds.hold(holder, dict.fromkeys(keys, size), self.now, self.now + seconds) == len(kept)
        if kept:
            self.model[holder] = kept, self.now + seconds

    @rule(holder=HOLDERS, seconds=SECONDS)
    def extend(self, holder: str, seconds: int) -> None:
        assert self.holds.extend(holder, self.now, self.now + seconds) is (holder in self.model)
        if holder in self.model:
            self.model[holder] = self.model[holder][0], self.now + seconds
            self.settle()

    @rule(holder=HOLDERS)
    def release(self, holder: str) -> None:
        assert self.holds.release(holder) is (self.model.pop(holder, None) is not None)
        self.settle()

    @rule(key=st.integers(0, 9), size=st.integers(0, 30))
    def arrived(self, key: int, size: int) -> None:
        self.holds.arrived(key, size)
        if key in self.sizes and sum(self.sizes.values()) - self.sizes[key] + size > BYTES_MAX:
            self.drop([key])
        elif key in self.sizes:
            self.sizes[key] = size

    @rule(keys=KEYS)
    def discard(self, keys: list[int]) -> None:
        self.holds.discard(keys)
        self.drop(keys)

    @rule(seconds=st.integers(0, 5))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.settle()
        # Holds end when they are next looked at.
        self.holds.num_holders(self.now)

    def drop(self, keys: list[int]) -> None:
        left = {name: ([key for key in held if key not in keys], end) for name, (held, end) in self.model.items()}
        self.model = {name: hold for name, hold in left.items() if hold[0]}
        self.settle()

    def settle(self) -> None:
        self.model = {name: hold for name, hold in self.model.items() if hold[1] > self.now}
        held = {key for keys, _ in self.model.values() for key in keys}
        self.sizes = {key: size for key, size in self.sizes.items() if key in held}

    @invariant()
    def same(self) -> None:
        held = frozenset[int]().union(*(keys for keys, _ in self.model.values()))
        assert {key for key in range(10) if self.holds.is_held(key, self.now)} == held == set(self.holds.keys(self.now))
        assert self.holds.num_holders(self.now) == len(self.model)
        assert self.holds.num_keys(self.now) == len(held)
        assert self.holds.num_bytes(self.now) == sum(self.sizes.values()) <= BYTES_MAX
        for name in "abcde":
            found = self.holds.of(name, self.now)
            assert (None if found is None else (list(found.keys), found.until)) == self.model.get(name)


TestHoldsAgainstDict = HoldsAgainstDict.TestCase
TestHoldsAgainstDict.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_storm_of_aborted_requests_leaves_nothing():
    holds: Holds[int] = Holds(1_000_000)
    for request in range(20_000):
        sizes = dict.fromkeys(range(request, request + 3), 7)
        assert holds.hold(f"request-{request}", sizes, now=request, until=request + 10) == 3
        if request % 2:
            holds.extend(f"request-{request}", now=request, until=request + 5)
    assert len(holds._ends) < 100, "ended holds take no memory"
    assert holds.num_holders(20_010) == holds.num_keys(20_010) == holds.num_bytes(20_010) == 0
    assert holds._num_held == 0
