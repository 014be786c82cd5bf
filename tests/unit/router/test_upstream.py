"""What one client's request, or a connection that an engine closed, does to the requests of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from router_harness import Cluster, LoopThread, Replica, RunningRouter, _Server, wait_until

from paceline_engine.server.routes import add_error_handlers

StartRouter = Callable[..., RunningRouter]
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def route_to(cluster: Cluster, start_router: StartRouter) -> Callable[[int], RunningRouter]:
    """Starts a router whose only endpoint listens on the port."""

    def start(port: int) -> RunningRouter:
        cluster.service("chat")
        cluster.tenant("alice", "sk-alice")
        cluster.endpoints("chat", Replica("engine-0", port))
        router = start_router()
        wait_until(lambda: router.process.discovery.snapshot.models["chat"].serving, "the endpoint is known")
        return router

    return start


class ClosingEngine:
    """Answers the first request of a connection and closes it, byteless, when the next comes. `gone`: closes all."""

    def __init__(self) -> None:
        self.gone = False
        self.first_bytes = b""
        self.port = 0
        self.connections = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()

    async def _request(self, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._request(reader)
            if not self.gone:
                writer.write(ANSWER)
                await self._request(reader)
            writer.write(self.first_bytes)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@pytest.fixture
def closing(loop: LoopThread) -> Iterator[ClosingEngine]:
    engine = ClosingEngine()
    loop.run(engine.start())
    yield engine
    loop.run(engine.stop())


def upstream_errors(router: RunningRouter, reason: str = "disconnected") -> float:
    return router.metric("paceline_router_upstream_errors_total", model_name="chat", reason=reason)


def test_a_kept_connection_that_the_engine_closed_costs_no_request(closing: ClosingEngine, route_to):
    router = route_to(closing.port)
    assert [router.ask(stream=False).status_code for _ in range(6)] == [200] * 6
    assert upstream_errors(router) == 0


def test_a_large_request_is_sent_again_whole(closing: ClosingEngine, route_to):
    router = route_to(closing.port)
    assert [router.ask(stream=False, padding="x" * 3_000_000).status_code for _ in range(3)] == [200] * 3


def test_an_engine_that_closes_new_connections_too_is_asked_twice_and_no_more(closing: ClosingEngine, route_to):
    router = route_to(closing.port)
    assert router.ask(stream=False).status_code == 200
    closing.gone = True
    before = closing.connections
    response = router.ask(stream=False)
    assert (response.status_code, closing.connections - before) == (502, 1)
    assert "disconnected" in response.json()["error"]["message"]
    assert upstream_errors(router) == 1


def test_an_answer_that_broke_off_in_its_head_is_no_stale_connection(closing: ClosingEngine, route_to):
    router = route_to(closing.port)
    closing.first_bytes = b"HTTP/1.1 200 OK\r\ncontent-"
    assert router.ask(stream=False).status_code == 200
    assert router.ask(stream=False).status_code == 502


@pytest.fixture
def buggy_port(loop: LoopThread) -> Iterator[int]:
    """A server with the engine's own error handling, on which one kind of request hits a bug."""
    app = FastAPI()
    add_error_handlers(app)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, bool]:
        if (await request.json()).get("bad"):
            raise OverflowError("a bug")
        return {"good": True}

    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off")
    server = _Server(config)
    done = loop.start(server.serve())
    wait_until(lambda: server.started, "it serves")
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    done.result(10)


def test_a_bug_in_the_engine_says_that_the_connection_ends(buggy_port: int):
    with httpx.Client(base_url=f"http://127.0.0.1:{buggy_port}") as client:
        response = client.post("/v1/chat/completions", json={"bad": True})
        assert (response.status_code, response.headers["connection"]) == (500, "close")
        assert response.json()["error"]["code"] == "engine_error"
        assert client.post("/v1/chat/completions", json={}).status_code == 200


def test_one_clients_bad_request_leaves_the_only_endpoint_to_the_others(buggy_port: int, route_to):
    router = route_to(buggy_port)
    for _ in range(5):
        assert router.ask(stream=False, bad=True).status_code == 500
        assert [router.ask(stream=False).status_code for _ in range(3)] == [200] * 3
    assert upstream_errors(router) == 0
