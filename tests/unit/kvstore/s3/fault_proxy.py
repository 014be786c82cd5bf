"""A proxy before a real S3 server that misbehaves as told."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """One request as the proxy saw it. `nth` counts from 0."""

    nth: int
    method: str
    path: str
    headers: dict[str, str]

    @property
    def is_get(self) -> bool:
        return self.method == "GET" and "list-type" not in self.path

    @property
    def is_put(self) -> bool:
        return self.method == "PUT"


@dataclass(frozen=True)
class Fault:
    """What happens to a request. `status` and `code`: that answer. `refuse`: a reset at once. `hang`: no answer.

    `cut`: the answer's body ends after so many bytes, by a reset if `reset`. `stall`: it stops there. `flip`: that byte
    of the body is changed. `pause`: seconds before each KiB of the body. `swallow`: the server gets the request, its
    answer is lost.
    """

    status: int = 0
    code: str = "InternalError"
    headers: str = ""
    refuse: bool = False
    hang: bool = False
    cut: int | None = None
    reset: bool = False
    stall: int | None = None
    flip: int | None = None
    pause: float = 0.0
    swallow: bool = False


@dataclass
class FaultProxy:
    """HTTP/1.1, or with `tls` HTTPS, one request a connection, in an event loop on a thread of its own."""

    upstream: tuple[str, int]
    tls: ssl.SSLContext | None = None
    plan: Callable[[Request], Fault | None] = lambda request: None
    requests: list[Request] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        # The loop holds tasks weakly: one whose connection is lost would be collected while it waits.
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._over = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        assert started.wait(10)

    def heal(self) -> None:
        self.plan = lambda request: None

    def count(self, method: str) -> int:
        return sum(request.method == method for request in self.requests)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20, ssl=self.tls)
            self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            started.set()
            await self._over.wait()
            server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._loop.run_until_complete(serve())
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin1").split("\r\n")
            method, path, _ = first.split(" ")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
            request = Request(next(self._numbers), method, path, headers)
            self.requests.append(request)
            fault = self.plan(request) or Fault()
            if fault.hang:
                await self._over.wait()
            if fault.refuse:
                return self._reset(writer)
            if fault.status:
                return await self._answer(fault, reader, writer, headers)
            await self._forward(fault, head, headers, reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            with suppress(OSError, RuntimeError):
                writer.close()

    async def _answer(
        self, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]
    ) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
        body = b"" if fault.status == 200 else body
        if "expect" not in headers:
            await reader.readexactly(int(headers.get("content-length", 0)))
        head = f"HTTP/1.1 {fault.status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{fault.headers}\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    async def _forward(
        self,
        fault: Fault,
        head: bytes,
        headers: dict[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self.upstream, limit=1 << 20)
        try:
            up_writer.write(head[:-2] + b"Connection: close\r\n\r\n")
            body = asyncio.create_task(self._body(int(headers.get("content-length", 0)), reader, up_writer))
            try:
                await self._response(fault, up_reader, writer)
            finally:
                body.cancel()
        finally:
            up_writer.close()

    async def _body(self, left: int, reader: asyncio.StreamReader, up_writer: asyncio.StreamWriter) -> None:
        while left and (data := await reader.read(min(left, 1 << 16))):
            left -= len(data)
            up_writer.write(data)
            await up_writer.drain()

    async def _response(self, fault: Fault, up_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await up_reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100"):
            writer.write(head)
            await writer.drain()
        if fault.swallow:
            await up_reader.read()
            return self._reset(writer)
        writer.write(head)
        at = 0
        while data := bytearray(await up_reader.read(1024 if fault.pause else 1 << 16)):
            await asyncio.sleep(fault.pause)
            if fault.flip is not None and at <= fault.flip < at + len(data):
                data[fault.flip - at] ^= 1
            if fault.cut is not None and at + len(data) > fault.cut:
                writer.write(data[: fault.cut - at])
                await writer.drain()
                return self._reset(writer) if fault.reset else None
            if fault.stall is not None and at + len(data) > fault.stall:
                writer.write(data[: fault.stall - at])
                await self._over.wait()
            writer.write(data)
            await writer.drain()
            at += len(data)
        return None

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
