"""Fixtures of the router's tests: a cluster of objects, upstreams, and a running router."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from router_harness import TOKEN, Cluster, FakeEngine, LoopThread, RunningRouter, wait_until

from paceline_router.token_file import TokenFile


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.store.close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture(scope="session")
def engine_pool() -> Iterator[Callable[[], FakeEngine]]:
    """Upstreams outlive a test, since stopping a server takes longer than most tests."""
    thread = LoopThread()
    engines: list[FakeEngine] = []

    def take() -> FakeEngine:
        for engine in engines:
            if not engine.taken and engine.serving:
                break
        else:
            engine = FakeEngine().start(thread)
            engines.append(engine)
        engine.taken = True
        return engine

    yield take
    for engine in engines:
        engine.ask_to_stop()
    for engine in engines:
        engine.wait_stopped()
    thread.close()


@pytest.fixture
def start_engine(engine_pool: Callable[[], FakeEngine]) -> Iterator[Callable[..., FakeEngine]]:
    """Gives upstreams: `start_engine(mode="whole")`."""
    taken: list[FakeEngine] = []

    def start(mode: str = "stream") -> FakeEngine:
        engine = engine_pool()
        engine.mode = mode
        taken.append(engine)
        return engine

    yield start
    for engine in taken:
        engine.reset()


@pytest.fixture
def start_router(cluster: Cluster, token_file: Path) -> Iterator[Callable[..., RunningRouter]]:
    """Starts the router over `cluster`; keyword arguments are limits."""
    routers: list[RunningRouter] = []

    def start(**limits: object) -> RunningRouter:
        router = RunningRouter(cluster, TokenFile(token_file), **limits)
        routers.append(router)
        return router

    yield start
    for router in routers:
        router.stop()


@pytest.fixture
def engine(start_engine: Callable[..., FakeEngine]) -> FakeEngine:
    return start_engine()


@pytest.fixture
def router(cluster: Cluster, engine: FakeEngine, start_router: Callable[..., RunningRouter]) -> RunningRouter:
    """A router with one model, one engine and one tenant."""
    cluster.service("chat")
    cluster.tenant("alice", "sk-alice")
    cluster.endpoints("chat", engine.replica())
    router = start_router()
    wait_until(lambda: router.process.discovery.snapshot.models["chat"].serving, "the endpoint is known")
    return router
