"""Leases and pins: what is held is held until its time, whoever dies, and never a moment longer."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline_kvstore.policy.holds import Holds

KEYS_MAX = 12
HOLDERS = st.sampled_from("abcde")
KEYS = st.frozensets(st.integers(0, 9), max_size=6)
SECONDS = st.integers(-2, 10)


class HoldsAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.holds: Holds[int] = Holds(KEYS_MAX)
        self.model: dict[str, tuple[frozenset[int], float]] = {}
        self.now = 0.0

    @rule(holder=HOLDERS, keys=KEYS, seconds=SECONDS)
    def hold(self, holder: str, keys: frozenset[int], seconds: int) -> None:
        others = sum(len(held) for name, (held, _) in self.model.items() if name != holder)
        fits = others + len(keys) <= KEYS_MAX
        assert self.holds.hold(holder, keys, self.now, self.now + seconds) is fits
        if fits:
            self.model.pop(holder, None)
            if seconds > 0:
                self.model[holder] = keys, self.now + seconds

    @rule(holder=HOLDERS, seconds=SECONDS)
    def extend(self, holder: str, seconds: int) -> None:
        assert self.holds.extend(holder, self.now, self.now + seconds) is (holder in self.model)
        if holder in self.model:
            self.model[holder] = self.model[holder][0], self.now + seconds
            self.drop_ended()

    @rule(holder=HOLDERS)
    def release(self, holder: str) -> None:
        assert self.holds.release(holder) is (self.model.pop(holder, None) is not None)

    @rule(seconds=st.integers(0, 5))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.drop_ended()
        # Holds end when they are next looked at.
        self.holds.num_holders(self.now)

    def drop_ended(self) -> None:
        self.model = {name: hold for name, hold in self.model.items() if hold[1] > self.now}

    @invariant()
    def same(self) -> None:
        held = frozenset[int]().union(*(keys for keys, _ in self.model.values()))
        assert {key for key in range(10) if self.holds.is_held(key, self.now)} == held
        assert self.holds.num_holders(self.now) == len(self.model)
        assert self.holds.num_keys(self.now) == len(held)


TestHoldsAgainstDict = HoldsAgainstDict.TestCase
TestHoldsAgainstDict.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_storm_of_aborted_requests_leaves_nothing():
    holds: Holds[int] = Holds(1_000_000)
    for request in range(20_000):
        assert holds.hold(f"request-{request}", range(request, request + 3), now=request, until=request + 10)
        if request % 2:
            holds.extend(f"request-{request}", now=request, until=request + 5)
    assert len(holds._ends) < 100, "ended holds take no memory"
    assert holds.num_holders(20_010) == holds.num_keys(20_010) == 0
    assert holds._num_held == 0
