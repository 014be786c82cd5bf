"""Extents of one piece of memory: never overlapping, always merged, all of it usable again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_kvstore.arena import PAGE, Arena, Extents, pages

SIZES = st.integers(0, 20 * PAGE)


@given(st.lists(st.tuples(st.booleans(), SIZES), max_size=60))
def test_extents_tile_the_arena(steps: list[tuple[bool, int]]):
    arena = Extents(64 * PAGE)
    taken: list[int] = []
    for give, size in steps:
        if give and taken:
            arena.give_back(taken.pop(size % len(taken)))
        else:
            start = arena.take(size)
            if start is not None:
                taken.append(start)
        arena.check_integrity()
    for start in taken:
        arena.give_back(start)
    assert arena.bytes_used == 0
    assert arena.take(64 * PAGE) == 0, "all of it is one extent again"


def test_a_free_extent_of_the_right_size_is_always_found():
    arena = Extents(10 * PAGE)
    starts = [arena.take(PAGE) for _ in range(10)]
    assert arena.take(1) is None
    assert starts[4] is not None and starts[5] is not None
    arena.give_back(starts[4])
    arena.give_back(starts[5])
    assert arena.take(2 * PAGE + 1) is None
    assert arena.take(2 * PAGE) is not None


def test_an_extent_is_not_given_back_twice():
    arena = Extents(2 * PAGE)
    start = arena.take(1)
    assert start is not None
    arena.give_back(start)
    with pytest.raises(KeyError):
        arena.give_back(start)


@pytest.mark.parametrize(("size", "whole"), [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_whole_pages(size: int, whole: int):
    assert pages(size) == whole


def test_an_extent_returns_with_the_last_view_of_it():
    arena = Arena(2 * PAGE)
    extent = arena.take(PAGE + 1)
    assert extent is not None
    assert arena.take(PAGE + 1) is None
    view = memoryview(extent.data)[10:20]
    del extent
    assert arena.num_taken == 1
    del view
    assert arena.bytes_used == arena.num_taken == 0
    assert arena.take(2 * PAGE) is not None
    arena.check_integrity()


def test_extents_begin_on_pages():
    arena = Arena(8 * PAGE)
    extents = [arena.take(1), arena.take(PAGE + 1), arena.take(5)]
    for extent in extents:
        assert extent is not None
        assert extent.ctypes.data % PAGE == 0
