"""The last changes of the prefix cache, for readers that follow them: a bounded log, and its lines as NDJSON.

A reader that fell behind what is kept is told so by `complete: false` and must forget what it knew. Readers share the
log, so a slow one costs nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from paceline_engine.messages import KVEvent

MAX_EVENTS = 16384
HEARTBEAT_SECONDS = 5.0
VERSION = 1


class EventLog:
    """Events of one core, whose life is the `epoch`."""

    def __init__(self, epoch: str, max_events: int = MAX_EVENTS) -> None:
        self.epoch = epoch
        self._events: deque[KVEvent] = deque(maxlen=max_events)
        self._next = 0
        self._news = asyncio.Event()

    @property
    def first(self) -> int:
        """Sequence number of the oldest event that is kept."""
        return self._events[0].sequence if self._events else self._next

    def add(self, events: Sequence[KVEvent]) -> None:
        """Events as they come from the core."""
        self._events.extend(events)
        self._next = events[-1].sequence + 1
        self._news.set()
        self._news = asyncio.Event()

    def since(self, sequence: int) -> list[KVEvent]:
        """Kept events from a number on."""
        skip = max(0, sequence - self.first)
        return [event for index, event in enumerate(self._events) if index >= skip]

    async def lines(
        self, epoch: str | None, sequence: int, about: dict[str, Any], heartbeat: float = HEARTBEAT_SECONDS
    ) -> AsyncGenerator[bytes, None]:
        """A header, then one line an event; an empty object where nothing happened for `heartbeat` seconds.

        epoch: the reader's; another one, or none, starts it anew from what is kept. Ends when the reader falls behind.
        """
        known = epoch == self.epoch and self.first <= sequence <= self._next
        at = sequence if known else self.first
        complete = known or (at == 0 and sequence == 0)
        yield _line({"v": VERSION, "epoch": self.epoch, "from": at, "complete": complete} | about)
        while at >= self.first:
            news = self._news
            for event in self.since(at):
                yield _line(_payload(event))
                at = event.sequence + 1
            if at == self._next:
                try:
                    await asyncio.wait_for(news.wait(), heartbeat)
                except TimeoutError:
                    yield _line({})


def _payload(event: KVEvent) -> dict[str, Any]:
    made: dict[str, Any] = {"sequence": event.sequence, "kind": event.kind}
    if event.block_hashes:
        made["block_hashes"] = [value.hex() for value in event.block_hashes]
    if event.kind == "stored":
        made |= {
            "parent_hash": None if event.parent_hash is None else event.parent_hash.hex(),
            "token_ids": event.token_ids,
        }
    return made


def _line(payload: dict[str, Any]) -> bytes:
    return msgspec.json.encode(payload) + b"\n"
