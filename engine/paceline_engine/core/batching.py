"""When waiting requests may join the running ones: at any step, or only as a new batch.

"continuous" (Orca, OSDI 2022): a place is refilled in the step after it became free. "static": a batch is made of what
waits when nothing runs, and runs until all of it has ended. "dynamic": like static, but the batch is first given a
short time to fill. The last two are how servers batched before; they are here so that the difference can be measured.
Takes times; reads no clock.
"""

from __future__ import annotations

from typing import Literal

from paceline_engine.core.ranked import RankedRequests
from paceline_engine.core.request import Request

Batching = Literal["static", "dynamic", "continuous"]


class BatchGate:
    """Says whether a waiting request may be admitted. wait_s: how long a dynamic batch may take to fill, seconds."""

    def __init__(self, policy: Batching, max_num_seqs: int, wait_s: float) -> None:
        self.policy: Batching = policy
        self._max_num_seqs = max_num_seqs
        self._wait_s = wait_s
        # Of the batch that runs: the last arrival that may belong to it, and how many may still join.
        self.newest_arrival = 0
        self.num_places = 0

    def begin_step(self, num_running: int, waiting: RankedRequests, newest_arrival: int, now: float) -> None:
        """Begin a new batch if nothing runs and it is time."""
        if self.policy == "continuous" or num_running or not waiting:
            return
        if self.seconds_to_wait(waiting, now) <= 0.0:
            self.newest_arrival, self.num_places = newest_arrival, self._max_num_seqs

    def seconds_to_wait(self, waiting: RankedRequests, now: float) -> float:
        """Until a batch of what waits would begin, were nothing running."""
        if self.policy != "dynamic" or not waiting or len(waiting) >= self._max_num_seqs:
            return 0.0
        # One that ran before belongs to a batch that has begun.
        if any(request.num_preemptions for request in waiting):
            return 0.0
        return min(request.arrived_at for request in waiting) + self._wait_s - now

    def admits(self, request: Request) -> bool:
        """Whether the request belongs to the batch that runs."""
        if self.policy == "continuous" or request.num_preemptions:
            return True
        return self.num_places > 0 and request.arrival <= self.newest_arrival

    def admitted(self, request: Request) -> None:
        """The request took its place, or came back to it."""
        if request.num_preemptions == 0:
            self.num_places -= 1
