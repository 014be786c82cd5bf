"""Memory for the chunks that are being received: mapped once, bounded over all connections."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from threading import Condition

from paceline_kvstore.arena import Arena


class BufferPool:
    """Buffers out of one arena. Safe to call from several threads."""

    def __init__(self, size: int) -> None:
        self._arena = Arena(size)
        self._returned = Condition()

    @property
    def bytes_used(self) -> int:
        """Bytes that are lent."""
        return self._arena.bytes_used

    @contextmanager
    def lend(self, num_bytes: int, timeout: float) -> Generator[memoryview | None]:
        """A writable buffer of that size for the block, or None if none came free within `timeout` seconds.

        A view of it must not outlive the block.
        """
        view = self._take(num_bytes, timeout)
        try:
            yield view
        finally:
            if view is not None:
                view.release()
                with self._returned:
                    self._returned.notify_all()

    def _take(self, num_bytes: int, timeout: float) -> memoryview | None:
        end = time.monotonic() + timeout
        with self._returned:
            while (extent := self._arena.take(num_bytes)) is None:
                if not self._returned.wait(end - time.monotonic()):
                    return None
            return extent.data
