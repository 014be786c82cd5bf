"""Routing policies, retry bounds and in-flight accounting: small, pure, exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_router.inflight import InFlight
from paceline_router.policy import choose
from paceline_router.records import EndpointId
from paceline_router.retry import CoolDown, RetryBudget

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=8)
ONE, TWO = EndpointId("a", "10.0.0.1", 8000), EndpointId("b", "10.0.0.2", 8000)


@given(COUNTS, st.integers(0, 100))
def test_least_loaded_takes_a_minimum(counts: list[int], turn: int):
    assert counts[choose("leastLoaded", counts, turn)] == min(counts)


@given(st.integers(1, 8), st.integers(0, 100))
def test_both_policies_visit_every_equal_candidate_in_turn(count: int, turn: int):
    for policy in ("leastLoaded", "roundRobin"):
        visited = {choose(policy, [3] * count, turn + step) for step in range(count)}
        assert visited == set(range(count))


def test_round_robin_does_not_look_at_load():
    assert [choose("roundRobin", [9, 0, 0], turn) for turn in range(4)] == [0, 1, 2, 0]


def test_ties_rotate_among_the_least_loaded_only():
    assert [choose("leastLoaded", [1, 0, 0], turn) for turn in range(3)] == [1, 1, 2]


def test_no_candidate_is_an_error():
    with pytest.raises(ValueError, match="no candidate"):
        choose("leastLoaded", [], 0)


def test_counts_live_exactly_as_long_as_their_context():
    in_flight = InFlight()

    def fail_while_three_are_open() -> None:
        with in_flight.track(ONE), in_flight.track(ONE), in_flight.track(TWO):
            assert (in_flight.at(ONE), in_flight.at(TWO), in_flight.total) == (2, 1, 3)
            in_flight.check_integrity()
            raise KeyError

    with pytest.raises(KeyError):
        fail_while_three_are_open()
    assert (in_flight.total, dict(in_flight.counts)) == (0, {})


@given(st.lists(st.booleans(), max_size=200))
def test_retries_never_exceed_the_budget(steps: list[bool]):
    budget = RetryBudget(ratio=0.25, burst=2.0)
    earned = spent = 0
    for retry in steps:
        if retry:
            spent += budget.spend()
        else:
            budget.earn()
            earned += 1
        assert spent <= 2 + 0.25 * earned


def test_the_budget_refills():
    budget = RetryBudget(ratio=0.5, burst=1.0)
    assert budget.spend()
    assert not budget.spend()
    budget.earn()
    budget.earn()
    assert budget.spend()


def test_a_failed_endpoint_rests_for_a_while():
    rest = CoolDown(pause_s=2.0)
    rest.add(ONE, now=10.0)
    assert rest.active(ONE, 11.9)
    assert not rest.active(ONE, 12.0)
    assert not rest.active(TWO, 11.0)


def test_the_table_of_resting_endpoints_is_bounded():
    rest = CoolDown(pause_s=2.0, limit=3)
    for number in range(10):
        rest.add(EndpointId(str(number), "10.0.0.1", 1), now=0.0)
    assert len(rest._until) == 3
    rest.add(ONE, now=5.0)
    assert rest.active(ONE, 5.0)
