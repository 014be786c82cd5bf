"""The latest readings of the engine's GPUs, for a server that must never wait on a driver.

A read runs in a thread of its own, one at a time: a call into the driver of a failing card can hang for good, and must
then neither hold up a scrape nor the end of this process. Readings are at least MAX_AGE_SECONDS apart, however often
they are asked for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from paceline_engine.telemetry.reading import GpuReader, NoTelemetry, Reading

MAX_AGE_SECONDS = 1.0
# Prometheus gives a scrape 10 s.
MAX_WAIT_SECONDS = 2.0

logger = logging.getLogger(__name__)


class GpuWatch:
    """Reads GPUs when asked to. `open_gpus` makes the reader, in the first read's thread."""

    def __init__(
        self,
        open_gpus: Callable[[Sequence[int]], GpuReader],
        *,
        clock: Callable[[], float] = time.monotonic,
        max_wait_seconds: float = MAX_WAIT_SECONDS,
    ) -> None:
        self.readings: tuple[Reading, ...] = ()
        self._open = open_gpus
        self._clock = clock
        self._max_wait = max_wait_seconds
        self._ordinals: tuple[int, ...] = ()
        self._reader: GpuReader | None = None
        self._last_read = -float("inf")
        self._in_flight: Future[None] | None = None

    def start(self, ordinals: Sequence[int]) -> None:
        """The engine runs on the GPUs that CUDA numbers so; on none, nothing is ever read."""
        self._ordinals = tuple(ordinals)
        if self._ordinals:
            self._begin()

    async def refresh(self) -> None:
        """Bring `readings` up to date; where that takes too long, they say that the GPUs don't answer."""
        if not self._ordinals:
            return
        if self._in_flight is None or self._in_flight.done():
            if self._clock() - self._last_read < MAX_AGE_SECONDS:
                return
            self._begin()
        assert self._in_flight is not None
        remaining = max(0.0, self._last_read + self._max_wait - self._clock())
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._in_flight), remaining)
        except TimeoutError:
            self.readings = tuple(reading.down() for reading in self.readings)

    def _begin(self) -> None:
        self._last_read = self._clock()
        self._in_flight = Future()
        # Running, it can't be cancelled by a waiter that gives up: there is never a second read beside it.
        self._in_flight.set_running_or_notify_cancel()
        threading.Thread(target=self._read, args=(self._in_flight,), name="gpu-telemetry", daemon=True).start()

    def _read(self, done: Future[None]) -> None:
        try:
            if self._reader is None:
                self._reader = self._open(self._ordinals)
            self.readings = tuple(self._reader.read())
        except NoTelemetry as error:
            logger.info("no GPU metrics: %s", error)
            self._ordinals = ()
        except Exception:
            logger.exception("GPU metrics end here: reading them failed")
            self.readings = tuple(reading.down() for reading in self.readings)
            self._ordinals = ()
        finally:
            done.set_result(None)
