"""The HTTP edge: bounded bodies, request ids, the internal token, and what a client's disconnect does.

Pure ASGI: nothing here buffers a stream, and a client that goes away cancels the work at once.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import uuid
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_api.wire import BODY_BYTES_MAX, HEADER_REQUEST_ID
from paceline_engine.server.errors import ApiError

# A body over the limit is read and dropped up to this much, so that the client can read the answer.
DISCARD_BYTES_MAX = 2 * BODY_BYTES_MAX
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def error_response(error: ApiError) -> Response:
    """The error as an HTTP answer."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


async def read_body(request: Request) -> bytes:
    """The whole body, also when it was read before. Raises ApiError (413) beyond BODY_BYTES_MAX, or ClientGone."""
    kept: bytes | None = getattr(request.state, "body", None)
    if kept is not None:
        return kept
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= BODY_BYTES_MAX:
                chunks.append(chunk)
            elif size > DISCARD_BYTES_MAX:
                break
            else:
                chunks.clear()
    except ClientDisconnect as error:
        raise ClientGone from error
    if size > BODY_BYTES_MAX:
        limit = BODY_BYTES_MAX // 2**20
        raise ApiError(413, f"the body is larger than {limit} MiB: send less", code="body_too_large")
    request.state.body = b"".join(chunks)
    return request.state.body


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone. To be called after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or cancel it and raise ClientGone when the client goes."""
    watcher = asyncio.ensure_future(disconnected(request.receive))
    worker = asyncio.ensure_future(work)
    try:
        await asyncio.wait({watcher, worker}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientGone
    finally:
        await _cancel(watcher, worker)


class EventStream(Response):
    """Server-sent events that end their source when the client goes, whatever the source is waiting for."""

    def __init__(self, events: AsyncGenerator[bytes, None], media_type: str = "text/event-stream") -> None:
        self._events = events
        self.media_type = media_type
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the source ends or the client is gone."""
        watcher = asyncio.ensure_future(disconnected(receive))
        sender = asyncio.ensure_future(self._send(send))
        try:
            await asyncio.wait({watcher, sender}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            await _cancel(watcher, sender)
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RequestIds:
    """ASGI middleware: every request has the client's x-request-id, or a new one, and its answer carries that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, adding the header to the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER_REQUEST_ID, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER_REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class InternalToken:
    """ASGI middleware: all but /health/* needs the bearer token, compared in constant time. No token: open."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        guarded = scope["type"] == "http" and not scope["path"].startswith("/health/")
        if guarded and self._expected is not None:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(
                    401, "this engine needs the internal bearer token", kind="authentication_error", code="unauthorized"
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
