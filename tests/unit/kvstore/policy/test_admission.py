"""Chunks enter a slow tier at their second offer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_kvstore.policy.admission import SecondOffer
from paceline_kvstore.policy.ghost import GhostList


def test_the_second_offer_is_taken_and_the_third_is_a_first():
    admission: SecondOffer[str] = SecondOffer(10)
    assert [admission.offer("a") for _ in range(4)] == [False, True, False, True]


def test_an_offer_that_was_forgotten_counts_as_the_first():
    admission: SecondOffer[int] = SecondOffer(3)
    assert not any(admission.offer(key) for key in (1, 2, 3, 4))
    assert not admission.offer(1)
    assert admission.offer(4)


def test_without_memory_everything_is_taken():
    assert all(SecondOffer[int](0).offer(1) for _ in range(3))
    with pytest.raises(ValueError, match="must not be negative"):
        SecondOffer(-1)


@given(st.lists(st.integers(0, 20)), st.integers(0, 8))
def test_the_list_holds_the_latest_names(names: list[int], limit: int):
    ghosts: GhostList[int] = GhostList(limit)
    for name in names:
        ghosts.add(name)
        assert len(ghosts) <= limit
    latest = list(dict.fromkeys(reversed(names)))[:limit]
    assert all(name in ghosts for name in latest)
    assert len(ghosts) == len(latest)
