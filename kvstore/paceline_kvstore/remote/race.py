"""A get that takes long is asked for a second time over another link, and the first answer counts (`policy.hedge`)."""

from __future__ import annotations

import select
import time
from threading import Lock

from paceline_kvstore.policy.hedge import HedgePolicy
from paceline_kvstore.remote.link import Link
from paceline_kvstore.remote.pool import LinkPool
from paceline_kvstore.wire import messages as msg

LEAST_DELAY_S = 2e-3
"""A second get within that time costs more than it can win."""


class Race:
    """When to run one, and how they went. Safe to call from several threads.

    What is timed is the time to the first byte of the answer: what comes then is as fast as the socket.
    """

    def __init__(self, pool: LinkPool, share: float) -> None:
        self._pool = pool
        self._policy = HedgePolicy(share)
        self._lock = Lock()
        self.num_hedges = 0
        self.num_won = 0

    def ask(self, link: Link, request: msg.Get, end: float) -> Link:
        """Send the get and wait for its answer to begin: the link that has it, which may be another than the given one.

        Then the given one is marked as outrun, and the other must go back to the pool. Raises OSError.
        """
        begun = time.monotonic()
        link.post(request, end)
        with self._lock:
            delay = self._policy.begin(request.capacity)
        first = link
        if delay is not None and not link.answers_by(min(end, begun + max(delay, LEAST_DELAY_S))):
            second = self._second(request, end)
            first = link if second is None else self._first_of(link, second, end)
        try:
            answered = first.answers_by(end)
        except BaseException:
            if first is not link:
                self._pool.discard(first)
            raise
        if answered:
            with self._lock:
                self._policy.observe(request.capacity, time.monotonic() - begun)
        return first

    def _second(self, request: msg.Get, end: float) -> Link | None:
        with self._lock:
            if not self._policy.spend():
                return None
            self.num_hedges += 1
        second = self._pool.spare(end)
        if second is None:
            return None
        try:
            second.post(request, end)
        except OSError:
            self._pool.discard(second)
            return None
        return second

    def _first_of(self, link: Link, second: Link, end: float) -> Link:
        poll = select.poll()
        for each in (link, second):
            poll.register(each.fileno(), select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000)]
        if not ready or link.fileno() in ready:
            self._pool.discard(second)
            return link
        link.is_outrun = True
        with self._lock:
            self.num_won += 1
        return second
