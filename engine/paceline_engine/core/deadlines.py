"""Which live requests have missed a deadline, without looking at all of them in every step.

A heap of (time, arrival, kind). Entries of requests that ended early stay until their time comes or they outnumber the
live ones. Times are the caller's clock, in seconds; reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Literal

from paceline_engine.core.request import Request

DeadlineKind = Literal["ttft", "e2e"]
_Entry = tuple[float, int, DeadlineKind, str]


class DeadlineQueue:
    """Deadlines of requests, soonest first."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request's deadlines, if it has any."""
        if request.ttft_deadline is not None:
            heappush(self._heap, (request.ttft_deadline, request.arrival, "ttft", request.request_id))
        if request.e2e_deadline is not None:
            heappush(self._heap, (request.e2e_deadline, request.arrival, "e2e", request.request_id))

    def expired(self, now: float, live: Mapping[str, Request]) -> list[tuple[Request, DeadlineKind]]:
        """Live requests whose time is over: without a first token in time, or without the last. Each is told once."""
        missed: dict[str, tuple[Request, DeadlineKind]] = {}
        while self._heap and self._heap[0][0] < now:
            entry = heappop(self._heap)
            request = live.get(entry[3])
            if request is not None and _is_open(entry, request):
                missed.setdefault(request.request_id, (request, entry[2]))
        if len(self._heap) > 4 * len(live) + 64:
            self._heap = [
                entry
                for entry in self._heap
                if (request := live.get(entry[3])) is not None and _is_open(entry, request)
            ]
            heapify(self._heap)
        return list(missed.values())

    def seconds_left(self, now: float, live: Mapping[str, Request]) -> float:
        """Until the next deadline that a live request can still miss."""
        while self._heap and not ((request := live.get(self._heap[0][3])) and _is_open(self._heap[0], request)):
            heappop(self._heap)
        return self._heap[0][0] - now if self._heap else math.inf


def _is_open(entry: _Entry, request: Request) -> bool:
    """Whether an entry is of this request, not of an earlier one with the same id, and can still be missed."""
    return entry[1] == request.arrival and (entry[2] == "e2e" or request.num_output_tokens == 0)


def missed_text(request: Request, kind: DeadlineKind) -> str:
    """One line for the client."""
    limit = request.ttft_deadline if kind == "ttft" else request.e2e_deadline
    seconds = (limit or 0.0) - request.arrived_at
    if request.embeds:
        return f"the deadline of {seconds:g} s for the embedding has passed"
    what = "first token" if kind == "ttft" else "last token"
    return f"the deadline of {seconds:g} s for the {what} has passed; {request.num_output_tokens} tokens were made"
