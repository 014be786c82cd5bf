"""The stable port of a Service: turns between ready endpoints, skips dead ones, passes both ends of a connection on."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

from paceline_cli.local.service_proxy import ServiceProxy
from paceline_cli.local.store import ObjectStore
from paceline_cli.node.host import port_is_free

LIMIT_S = 10.0


class World:
    """A store with one Service's EndpointSlices, and TCP servers that say their name and then echo."""

    def __init__(self) -> None:
        ids = itertools.count()
        self.store = ObjectStore(
            now=lambda: "2026-01-01T00:00:00Z", new_uid=lambda: f"u{next(ids)}", monotonic=time.monotonic
        )
        self.proxy = ServiceProxy(self.store, "ns", "web", "http", host="127.0.0.1", port=0)
        self.closed = asyncio.Event()
        self.servers: list[asyncio.Server] = []

    async def server(self, name: str) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(f"{name}\n".encode())
            while line := await reader.readline():
                writer.write(line)
            self.closed.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.servers.append(server)
        return server.sockets[0].getsockname()[1]

    def publish(self, *endpoints: tuple[int, bool, bool]) -> None:
        """(port, ready, serving) of each endpoint; one slice a port."""
        for number, (port, ready, serving) in enumerate(endpoints):
            conditions = {"ready": ready, "serving": serving, "terminating": not ready}
            meta = {"name": f"web-{number}", "namespace": "ns", "labels": {"kubernetes.io/service-name": "web"}}
            manifest = {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": meta,
                "addressType": "IPv4",
                "ports": [{"name": "http", "protocol": "TCP", "port": port}],
                "endpoints": [{"addresses": ["127.0.0.1"], "conditions": conditions}],
            }
            self.store.apply(manifest, field_manager="test")

    async def ask(self) -> bytes:
        """Who answers on the Service's port; b"" if the connection is closed at once."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy.port)
        name = await reader.readline()
        writer.close()
        return name.strip()


def run(main: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        world = World()
        await world.proxy.start()
        try:
            await main(world)
        finally:
            await world.proxy.stop()
            for server in world.servers:
                server.close()
                await server.wait_closed()

    asyncio.run(asyncio.wait_for(whole(), LIMIT_S))


def test_ready_endpoints_take_turns_and_dead_ones_are_skipped() -> None:
    async def main(world: World) -> None:
        dead = await world.server("dead")
        world.servers.pop().close()
        a, b = await world.server("a"), await world.server("b")
        world.publish((a, True, True), (b, True, True), (dead, True, True))
        assert {await world.ask() for _ in range(6)} == {b"a", b"b"}

    run(main)


def test_a_terminating_endpoint_serves_only_while_no_other_is_ready() -> None:
    async def main(world: World) -> None:
        assert await world.ask() == b""
        old, new = await world.server("old"), await world.server("new")
        world.publish((old, False, True), (new, False, False))
        assert await world.ask() == b"old"
        world.publish((old, False, True), (new, True, True))
        assert {await world.ask() for _ in range(4)} == {b"new"}

    run(main)


def test_bytes_go_both_ways_and_a_disconnect_reaches_the_server() -> None:
    async def main(world: World) -> None:
        world.publish((await world.server("a"), True, True))
        reader, writer = await asyncio.open_connection("127.0.0.1", world.proxy.port)
        assert await reader.readline() == b"a\n"
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()
        await asyncio.wait_for(world.closed.wait(), 30)

    run(main)


def test_stopping_frees_the_port_and_cuts_open_connections() -> None:
    async def main(world: World) -> None:
        world.publish((await world.server("a"), True, True))
        port = world.proxy.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readline()
        await world.proxy.stop()
        assert await reader.read() == b""
        writer.close()
        assert port_is_free(port)

    run(main)
