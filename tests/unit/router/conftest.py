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


@pytest.fixture
def start_engine() -> Iterator[Callable[..., FakeEngine]]:
    """Starts upstreams: `start_engine(mode="whole")`."""
    thread = LoopThread()
    engines: list[FakeEngine] = []

    def start(**settings: object) -> FakeEngine:
        engine = FakeEngine(**settings).start(thread)  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()
    thread.close()


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
