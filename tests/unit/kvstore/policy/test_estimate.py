"""Estimates of transfers against places whose speed is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_kvstore.policy.estimate import HALF_LIFE_S, Prior, Quantiles, TransferTime

MIB = 1 << 20
SLOW = Prior(latency_s=1.0, bandwidth=1e6)


def test_the_prior_speaks_until_something_was_seen() -> None:
    assert TransferTime(SLOW).seconds(4 * MIB, now=0.0) == pytest.approx(1.0 + 4 * MIB / 1e6)


def test_latency_and_bandwidth_are_found_from_reads_of_several_sizes() -> None:
    estimate, dice = TransferTime(Prior(0.02, 2e8)), random.Random(1)
    for _ in range(400):
        size = dice.choice((MIB, 8 * MIB, 32 * MIB))
        estimate.observe(size, 0.01 + size / 1e8, now=0.0)
    for size in (4 * MIB, 16 * MIB):
        assert estimate.seconds(size, 0.0) == pytest.approx(0.01 + size / 1e8, rel=0.05)


def test_reads_of_one_size_are_predicted_well_whatever_the_prior_said() -> None:
    estimate = TransferTime(Prior(0.0, 1e10))
    for _ in range(200):
        estimate.observe(8 * MIB, 0.1, now=0.0)
    assert estimate.seconds(8 * MIB, 0.0) == pytest.approx(0.1, rel=0.05)


def test_a_change_of_speed_is_followed_within_a_hundred_reads() -> None:
    estimate = TransferTime(Prior(0.01, 1e9))
    for _ in range(1000):
        estimate.observe(MIB, 0.01, now=0.0)
    for _ in range(100):
        estimate.observe(MIB, 0.5, now=0.0)
    assert estimate.seconds(MIB, 0.0) > 0.4


def test_a_place_that_was_slow_gets_another_chance_with_time() -> None:
    estimate = TransferTime(Prior(0.01, 1e9))
    for _ in range(1000):
        estimate.observe(MIB, 60.0, now=0.0)
    assert estimate.seconds(MIB, 0.0) > 50.0
    assert estimate.seconds(MIB, 20 * HALF_LIFE_S) == pytest.approx(0.01 + MIB / 1e9, rel=0.5)


@given(
    st.lists(st.tuples(st.integers(0, 1 << 28), st.floats(0, 100)), max_size=50),
    st.integers(0, 1 << 28),
    st.integers(0, 1 << 28),
)
def test_predictions_are_never_negative_and_grow_with_the_size(reads: list[tuple[int, float]], a: int, b: int) -> None:
    estimate = TransferTime(SLOW)
    for at, (size, seconds) in enumerate(reads):
        estimate.observe(size, seconds, float(at))
    small, large = sorted((a, b))
    assert 0 <= estimate.seconds(small, 50.0) <= estimate.seconds(large, 50.0)


@pytest.mark.parametrize("field", ["latency_s", "bandwidth"])
def test_a_senseless_prior_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="a prior needs"):
        Prior(**{"latency_s": 0.1, "bandwidth": 1.0} | {field: -1.0})


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=300), st.sampled_from([0.01, 0.5, 0.95, 1.0]))
def test_quantiles_are_within_their_accuracy(values: list[float], share: float) -> None:
    sketch = Quantiles()
    for value in values:
        sketch.add(value)
    exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    assert sketch.at(share) == pytest.approx(exact, rel=1.01 * Quantiles.ACCURACY)


def test_quantiles_forget_and_stay_small() -> None:
    sketch = Quantiles(remembered=100)
    assert sketch.at(0.5) is None
    for _ in range(1000):
        sketch.add(10.0)
    for number in range(1000):
        sketch.add(0.001 * (1 + number % 3))
    assert sketch.at(0.99) < 0.01  # type: ignore[operator]
    for number in range(100_000):
        sketch.add(10.0 ** (number % 20 - 10))
    assert len(sketch._counts) < 300
