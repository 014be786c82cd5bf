"""The breaker under any history of calls: it protects an ill place and comes back by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_kvstore.breaker import Breaker, BreakerLimits, Outcome, State

LIMITS = BreakerLimits()
BAD = (Outcome.ERROR, Outcome.TIMEOUT, Outcome.DENIED)


def call(breaker: Breaker, now: float, outcome: Outcome, seconds: float = 0.0) -> bool:
    """One call from beginning to end; False if it was refused."""
    ticket = breaker.admit(now)
    if ticket is None:
        return False
    breaker.record(ticket, outcome, seconds, now)
    return True


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "lose"]),
        st.sampled_from(list(Outcome)),
        st.floats(0, 40),
        st.floats(0, 10),
    ),
    max_size=120,
)


@given(EVENTS)
def test_whatever_happened_it_is_back_within_a_minute(events: list[tuple[str, Outcome, float, float]]):
    breaker = Breaker(LIMITS)
    now = 0.0
    tickets = []
    for what, outcome, pause, seconds in events:
        now += pause
        if what == "begin":
            if (ticket := breaker.admit(now)) is not None:
                tickets.append(ticket)
        elif tickets:
            ticket = tickets.pop(0)
            if what == "end":
                breaker.record(ticket, outcome, seconds, now)
            else:  # The caller died: its place in the count of calls comes back when it is buried.
                breaker.in_flight -= 1
        breaker.check_integrity()
        assert breaker.in_flight == len(tickets) <= LIMITS.concurrency
    for ticket in tickets:  # What was under way ends badly, and then the place is well.
        breaker.record(ticket, Outcome.ERROR, 0.0, now)
    healed = now
    while breaker.state is not State.CLOSED:
        assert now - healed < 60
        call(breaker, now, Outcome.OK)
        now += 1
    for _ in range(400):
        assert call(breaker, now, Outcome.OK)
    assert breaker.limit == LIMITS.concurrency


@given(EVENTS)
def test_while_it_is_open_no_call_is_made(events: list[tuple[str, Outcome, float, float]]):
    breaker = Breaker(LIMITS)
    now = 0.0
    for _, outcome, pause, seconds in events:
        now += pause
        wait = breaker.retry_in(now)
        assert call(breaker, now, outcome, seconds) is (wait == 0)
        if breaker.state is State.OPEN and breaker.retry_in(now):
            assert breaker.retry_in(now) <= LIMITS.open_seconds_max


def test_errors_open_it_and_a_few_among_many_do_not():
    breaker = Breaker(LIMITS)
    for n in range(60):
        assert call(breaker, n, Outcome.ERROR if n % 4 == 0 else Outcome.OK)
    assert breaker.state is State.CLOSED
    for n in range(60, 80):
        call(breaker, n, Outcome.ERROR)
    assert breaker.state is State.OPEN


def test_a_first_error_opens_nothing():
    breaker = Breaker(LIMITS)
    for _ in range(LIMITS.least - 1):
        call(breaker, 0.0, Outcome.ERROR)
    assert breaker.state is State.CLOSED


def test_old_errors_are_forgotten():
    breaker = Breaker(LIMITS)
    for n in range(40):  # Never `least` of them within the window of time.
        call(breaker, n * LIMITS.window_seconds, Outcome.ERROR)
    assert breaker.state is State.CLOSED


def test_one_denial_opens_it_at_once():
    breaker = Breaker(LIMITS)
    call(breaker, 0.0, Outcome.DENIED)
    assert breaker.state is State.OPEN
    assert not call(breaker, LIMITS.open_seconds * 0.9, Outcome.OK)


def test_slow_answers_open_it():
    breaker = Breaker(LIMITS)
    for _ in range(LIMITS.least):
        call(breaker, 0.0, Outcome.OK, LIMITS.slow_seconds)
    assert breaker.state is State.OPEN


def test_throttling_halves_the_calls_under_way_once_a_wave():
    breaker = Breaker(LIMITS)
    wave = [breaker.admit(0.0) for _ in range(LIMITS.concurrency)]
    assert breaker.admit(0.0) is None
    for ticket in wave:
        assert ticket is not None
        breaker.record(ticket, Outcome.THROTTLED, 0.0, 0.0)
    assert (breaker.state, breaker.limit) == (State.CLOSED, LIMITS.concurrency // 2)
    assert sum(breaker.admit(0.0) is not None for _ in range(LIMITS.concurrency)) == LIMITS.concurrency // 2


def test_a_place_that_throttles_single_calls_is_left_alone():
    breaker = Breaker(LIMITS)
    now = 0.0
    while breaker.state is State.CLOSED:
        call(breaker, now, Outcome.THROTTLED)
        now += LIMITS.open_seconds
        assert now < 30
    assert breaker.limit == 1


def test_half_open_lets_one_probe_at_a_time_and_closes_after_good_ones():
    breaker = Breaker(LIMITS)
    call(breaker, 0.0, Outcome.DENIED)
    probe = breaker.admit(1.0)
    assert probe is not None and probe.is_probe
    assert breaker.admit(1.0) is None
    breaker.record(probe, Outcome.OK, 0.0, 1.0)
    assert breaker.state is State.HALF_OPEN
    assert call(breaker, 1.0, Outcome.OK)
    assert breaker.state is State.CLOSED


def test_failed_probes_come_at_growing_pauses_up_to_a_bound():
    breaker = Breaker(LIMITS)
    call(breaker, 0.0, Outcome.DENIED)
    now = 0.0
    pauses = []
    for _ in range(8):
        pauses.append(breaker.retry_in(now))
        now += pauses[-1]
        assert call(breaker, now, Outcome.TIMEOUT)
    assert pauses == [1, 2, 4, 8, 16, 20, 20, 20]


def test_a_probe_that_never_ends_is_given_up():
    breaker = Breaker(LIMITS)
    call(breaker, 0.0, Outcome.DENIED)
    assert breaker.admit(1.0) is not None
    assert breaker.admit(1.0 + LIMITS.open_seconds_max) is None  # Open again,
    assert breaker.admit(1.0 + 2 * LIMITS.open_seconds_max) is not None  # and then probed again.


def test_a_call_from_before_it_opened_decides_nothing():
    breaker = Breaker(LIMITS)
    early = breaker.admit(0.0)
    assert early is not None
    call(breaker, 0.0, Outcome.DENIED)
    call(breaker, 1.0, Outcome.OK)
    breaker.record(early, Outcome.DENIED, 0.0, 1.0)
    assert breaker.state is State.HALF_OPEN
    assert breaker.in_flight == 0


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"concurrency": 0}, "concurrency must be 1 or more"),
        ({"open_seconds": 0}, "open_seconds must be more than 0"),
        ({"open_seconds": 30}, "open_seconds must be more than 0"),
        ({"failed_share": 1.5}, r"failed_share must be in \(0, 1\]"),
    ],
)
def test_limits_that_cannot_be_are_refused(limits: dict, says: str):
    with pytest.raises(ValueError, match=says):
        BreakerLimits(**limits)
