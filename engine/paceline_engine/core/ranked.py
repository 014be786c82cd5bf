"""Requests without blocks, best first.

Under "priority" the order is (priority, arrival), lower first, under "fcfs" arrival alone. A preempted request keeps
its place in that order, which is ahead of everything that came later, so nobody can be overtaken for ever by equals.
Imports neither tensors nor I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal

from paceline_engine.core.request import Request

SchedulingPolicy = Literal["fcfs", "priority"]
Rank = tuple[int, int]


def rank_of(request: Request, policy: SchedulingPolicy) -> Rank:
    """What requests are ordered by; unique, because arrivals are."""
    return (request.priority if policy == "priority" else 0, request.arrival)


class RankedRequests:
    """Requests in order of rank. Bounded by its owner; O(log n) to find a place, a memory move to make room."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy: SchedulingPolicy = policy
        self._ranks: list[Rank] = []
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __getitem__(self, index: int) -> Request:
        return self.requests[index]

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        rank = rank_of(request, self.policy)
        index = bisect_left(self._ranks, rank)
        self._ranks.insert(index, rank)
        self.requests.insert(index, request)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it isn't in."""
        index = bisect_left(self._ranks, rank_of(request, self.policy))
        if index == len(self.requests) or self.requests[index] is not request:
            raise KeyError(request.request_id)
        del self._ranks[index]
        del self.requests[index]

    def pop(self, index: int = -1) -> Request:
        """Take out the request at `index`: 0 is the best, -1 the worst."""
        del self._ranks[index]
        return self.requests.pop(index)

    def is_before(self, one: Request, other: Request) -> bool:
        """Whether one request ranks ahead of another."""
        return rank_of(one, self.policy) < rank_of(other, self.policy)

    def before(self, request: Request) -> list[Request]:
        """Those that rank ahead of a request, which need not be in."""
        return self.requests[: bisect_left(self._ranks, rank_of(request, self.policy))]

    def after(self, request: Request) -> list[Request]:
        """Those that rank behind a request, which must not be in."""
        return self.requests[bisect_left(self._ranks, rank_of(request, self.policy)) :]
