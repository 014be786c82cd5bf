"""Asks engines of other software how busy they are, once a second, while they serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp

from paceline_api.runtimes import facts_of
from paceline_router.headers import Private
from paceline_router.inflight import InFlight
from paceline_router.load import ReportedLoad, total_of
from paceline_router.records import Endpoint
from paceline_router.snapshot import Snapshot
from paceline_router.token_file import TokenFile
from paceline_router.upstream import AttemptFailed, Upstreams, read_whole

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 1.0
AT_ONCE_MAX = 32
TEXT_BYTES_MAX = 4 * 1024 * 1024


class LoadPoll:
    """`run` until cancelled. An engine that does not answer is simply not known; health is not decided here."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        upstreams: Upstreams,
        in_flight: InFlight,
        reported: ReportedLoad,
        token: TokenFile | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshot = snapshot
        self._upstreams = upstreams
        self._in_flight = in_flight
        self._reported = reported
        self._token = token
        self._clock = clock
        self._slots = asyncio.Semaphore(AT_ONCE_MAX)

    async def run(self) -> None:
        while True:
            try:
                await self.once()
            except Exception:
                log.exception("A round of load reports failed; the next one is tried")
            await asyncio.sleep(INTERVAL_S)

    async def once(self) -> None:
        """One round over every serving endpoint whose software tells its load."""
        serving = [endpoint for model in self._snapshot().models.values() for endpoint in model.serving]
        asked = [endpoint for endpoint in serving if facts_of(endpoint.runtime).load is not None]
        self._reported.keep({endpoint.id for endpoint in asked})
        await asyncio.gather(*(self._ask(endpoint) for endpoint in asked))

    async def _ask(self, endpoint: Endpoint) -> None:
        facts = facts_of(endpoint.runtime)
        if facts.load is None:
            return
        headers = Private("", "", None if self._token is None else self._token.current()).for_runtime(facts)
        async with self._slots:
            before = self._in_flight.at(endpoint.id)
            text = await self._text(endpoint.base_url + facts.load.path, headers)
        reported = None if text is None else total_of(text.splitlines(), facts.load.names)
        if reported is not None:
            own = max(before, self._in_flight.at(endpoint.id))
            self._reported.record(endpoint.id, reported, own, self._clock())

    async def _text(self, url: str, headers: dict[str, str]) -> str | None:
        # Not over kept connections: an engine that drains waits until nobody is connected.
        try:
            async with asyncio.timeout(TIMEOUT_S), self._upstreams.fresh.get(url, headers=headers) as response:
                if response.status != 200:
                    return None
                return (await read_whole(response, TEXT_BYTES_MAX)).decode(errors="replace")
        except (AttemptFailed, aiohttp.ClientError, TimeoutError, OSError):
            return None
