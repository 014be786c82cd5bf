"""One stable loopback port for a Service, as kube-proxy gives one address: TCP connections go to its ready endpoints.

Pods come and go with ports of their own; what a user typed into curl must outlive a rollout. Bytes are copied, nothing
is parsed. Must not know what the Service speaks.
"""

import asyncio
import contextlib
import itertools
import logging

from paceline_api.kube import ENDPOINT_SLICE
from paceline_api.names import LABEL_SLICE_SERVICE
from paceline_cli.local.store import ObjectStore

_CHUNK = 65536
_CONNECT_S = 5.0
_BACKLOG = 512
_log = logging.getLogger(__name__)


class ServiceProxy:
    """`await start()` raises OSError where the port is taken; `await stop()` cuts open connections."""

    def __init__(
        self, store: ObjectStore, namespace: str, service: str, port_name: str, *, host: str, port: int
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._service = service
        self._port_name = port_name
        self._host = host
        self._port = port
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.sockets[0].getsockname()[1] if self._server and self._server.sockets else self._port

    async def start(self) -> int:
        """Listens; returns the port."""
        self._server = await asyncio.start_server(self._accept, self._host, self._port, backlog=_BACKLOG)
        return self.port

    async def stop(self) -> None:
        """No more connections."""
        if self._server is not None:
            self._server.close()
            for task in tuple(self._open):
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
            await self._server.wait_closed()

    def targets(self) -> list[tuple[str, int]]:
        """Ready endpoints; where none is ready, those that still serve while they terminate (as kube-proxy does)."""
        ready, serving = [], []
        selector = f"{LABEL_SLICE_SERVICE}={self._service}"
        for item in self._store.list(ENDPOINT_SLICE, self._namespace, label_selector=selector).items:
            port = next((p["port"] for p in item["ports"] if p["name"] == self._port_name), None)
            for endpoint in item["endpoints"] if port else []:
                conditions, target = endpoint["conditions"], (endpoint["addresses"][0], port)
                if conditions["ready"]:
                    ready.append(target)
                elif conditions["serving"]:
                    serving.append(target)
        return ready or serving

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except OSError as error:
            _log.debug("connection to service %s broke: %s", self._service, error)
        finally:
            self._open.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await self._connect()
        if upstream is None:
            return
        there, back = upstream
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, back))
                group.create_task(_copy(there, writer))
        except* OSError:
            # One side is gone: both are closed below.
            pass
        finally:
            back.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The next endpoint in turn that accepts; None closes the client's connection, as a refused one would be."""
        targets = self.targets()
        first = next(self._turn)
        for offset in range(len(targets)):
            host, port = targets[(first + offset) % len(targets)]
            with contextlib.suppress(OSError, TimeoutError):
                return await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_S)
        return None


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Until end of input, which is passed on; an error on either side ends both directions through the group."""
    while chunk := await source.read(_CHUNK):
        target.write(chunk)
        await target.drain()
    with contextlib.suppress(OSError, RuntimeError):
        target.write_eof()
