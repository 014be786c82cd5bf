"""Routing policies: which candidate endpoint gets the next request. Pure; imports no I/O, clock or randomness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

Policy = Literal["leastLoaded", "roundRobin"]


def choose(policy: Policy, in_flight: Sequence[int], turn: int) -> int:
    """Index of the chosen candidate.

    in_flight: requests at each candidate as far as known, in a stable order. turn: how many choices were made for the
    model before; it rotates the choice, so that ties spread over the fleet and the same arguments give the same answer.
    Raises ValueError without candidates.
    """
    count = len(in_flight)
    if count == 0:
        raise ValueError("there is no candidate to choose from")
    match policy:
        case "roundRobin":
            return turn % count
        case "leastLoaded":
            return min(range(count), key=lambda index: (in_flight[index], (index - turn) % count))
        case _:
            assert_never(policy)
