"""A flag that wakes every thread that waits for a socket."""

from __future__ import annotations

import os
import select
from threading import Lock


class DrainFlag:
    """Set once. Threads wait for it and a socket at the same time."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._lock = Lock()
        self.is_set = False

    def set(self) -> None:
        """From now on no wait takes time. Calling it again does nothing."""
        with self._lock:
            if not self.is_set:
                self.is_set = True
                os.close(self._write)

    def poll(self, descriptor: int) -> Waiter:
        """Waits for that socket or this flag."""
        return Waiter(descriptor, self._read)

    def close(self) -> None:
        """Give the descriptors back; nobody may wait any more. Idempotent."""
        self.set()
        with self._lock:
            if self._read >= 0:
                os.close(self._read)
                self._read = -1


class Waiter:
    """Waits for one socket or the flag."""

    def __init__(self, descriptor: int, flag: int) -> None:
        self._sock = descriptor
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._poll.register(flag, select.POLLIN)

    def readable(self, timeout: float) -> bool:
        """True once the socket has something (or has ended); False if the time is over or the flag is set."""
        return any(descriptor == self._sock for descriptor, _ in self._poll.poll(timeout * 1000))
