"""A bound on the chunks that are being received, over all connections, and memory for those that a tier copies."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from threading import Condition

from paceline_kvstore.arena import Arena, pages


class BufferPool:
    """Room for `size` bytes. Safe to call from several threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arena = Arena(pages(size))
        self._changed = Condition()
        self._bytes_used = 0

    @property
    def bytes_used(self) -> int:
        """Bytes that are being received."""
        return self._bytes_used

    @contextmanager
    def room(self, num_bytes: int, timeout: float) -> Generator[bool]:
        """Count the bytes as being received during the block; False if others have the room for `timeout` seconds."""
        end = time.monotonic() + timeout
        with self._changed:
            granted = self._changed.wait_for(lambda: self._bytes_used + num_bytes <= self._size, end - time.monotonic())
            self._bytes_used += num_bytes if granted else 0
        try:
            yield granted
        finally:
            if granted:
                with self._changed:
                    self._bytes_used -= num_bytes
                    self._changed.notify_all()

    def take(self, num_bytes: int) -> memoryview | None:
        """Memory that is used again when the last view of it is gone, or None if no piece is long enough."""
        extent = self._arena.take(num_bytes)
        return None if extent is None else extent.data
