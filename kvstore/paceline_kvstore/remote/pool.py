"""A bounded set of links that callers share, and when it is worth while to try to connect again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from threading import Condition

from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.remote.link import Link
from paceline_kvstore.wire.transport import Slow


class Unavailable(ConnectionError):
    """The server could not be reached a moment ago; nobody asks it until the pause is over."""


class Backoff:
    """Pauses that double from `first` to `last` seconds with each failure, less up to half of it by chance."""

    def __init__(self, first: float, last: float, chance: Callable[[], float] = random.random) -> None:
        self._first = first
        self._last = last
        self._chance = chance
        self._failures = 0
        self._until = 0.0

    def blocked(self, now: float) -> bool:
        return now < self._until

    def failed(self, now: float) -> None:
        pause = min(self._last, self._first * 2 ** min(self._failures, 32))
        self._failures += 1
        self._until = now + pause * (1 - self._chance() / 2)

    def succeeded(self) -> None:
        self._failures = 0
        self._until = 0.0


class LinkPool:
    """Up to `size` links. Safe to call from several threads."""

    def __init__(self, size: int, connect: Callable[[float], Link], backoff: Backoff) -> None:
        self._size = size
        self._connect = connect
        self._backoff = backoff
        self._changed = Condition()
        self._idle: list[Link] = []
        self._taken = 0
        self._closed = False

    def take(self, deadline: float) -> Link:
        """A link for this caller alone. Raises Unavailable, OSError (Slow at the deadline), Refused, ProtocolError."""
        with self._changed:
            if not self._changed.wait_for(self._free, deadline - time.monotonic()):
                raise Slow(f"all {self._size} connections are busy")
            if self._closed:
                raise Unavailable("the tier is closed")
            if not self._idle and self._backoff.blocked(time.monotonic()):
                raise Unavailable("the server could not be reached")
            self._taken += 1
            if self._idle:
                return self._idle.pop()
        try:
            link = self._connect(deadline)
        except BaseException:
            with self._changed:
                self._taken -= 1
                self._backoff.failed(time.monotonic())
                self._changed.notify()
            raise
        with self._changed:
            self._backoff.succeeded()
        return link

    def spare(self, deadline: float) -> Link | None:
        """A link for a second try beside one that is under way, or None if there is none without waiting for others.

        That it could not be made says nothing of the server that the first try doesn't.
        """
        with self._changed:
            if self._closed or not self._free():
                return None
            self._taken += 1
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect(deadline)
        except BaseException as error:
            with self._changed:
                self._taken -= 1
                self._changed.notify()
            if isinstance(error, (OSError, KVStoreError)):
                return None
            raise

    def discard(self, link: Link) -> None:
        """The caller's link is of no use any more, through no fault of the server."""
        with self._changed:
            self._taken -= 1
            self._changed.notify()
        link.close()

    def give_back(self, link: Link) -> None:
        """The caller is done with a link that works."""
        link.used = True
        with self._changed:
            self._taken -= 1
            if not self._closed:
                self._idle.append(link)
            self._changed.notify()
        if self._closed:
            link.close()

    def drop(self, link: Link) -> None:
        """The caller's link failed. The idle ones are of the same server and go with it."""
        with self._changed:
            self._taken -= 1
            stale, self._idle = self._idle, []
            self._changed.notify()
        for each in (link, *stale):
            each.close()

    def close(self) -> None:
        """Close the idle links now and the others when they come back. Idempotent."""
        with self._changed:
            self._closed = True
            stale, self._idle = self._idle, []
            self._changed.notify_all()
        for link in stale:
            link.close()

    def _free(self) -> bool:
        return self._closed or bool(self._idle) or self._taken < self._size
