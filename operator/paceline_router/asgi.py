"""The little of ASGI that the streaming path speaks directly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RawHeader = tuple[bytes, bytes]


class ClientGone(Exception):
    """The client closed its connection, or stopped reading, before the answer was complete."""


class Answer:
    """The answer to one request. Knows whether it has started: before that, anything can still be said.

    A client that takes nothing for `timeout_s` counts as gone, so that it cannot hold an engine's memory for ever.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self.started = False
        self.status = 0

    async def start(self, status: int, headers: Iterable[RawHeader]) -> None:
        self.started = True
        self.status = status
        await self._sent({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def part(self, body: bytes) -> None:
        await self._sent({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        await self._sent({"type": "http.response.body", "body": body, "more_body": False})

    async def whole(self, status: int, headers: Iterable[RawHeader], body: bytes) -> None:
        """Status, headers with the content length, and the body."""
        await self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.end(body)

    async def _sent(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except OSError:  # TimeoutError is one
            raise ClientGone from None


async def wait_disconnect(receive: Receive) -> None:
    """Returns when the client is gone. Only after the request body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
