"""The router process: sockets first, then watches, then traffic; and the way back on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from paceline_api.kube import KubeClient
from paceline_router.app import admin_app, metrics_app, public_app
from paceline_router.auth import Authenticator
from paceline_router.discovery import Discovery
from paceline_router.ledger import Ledger
from paceline_router.load_poll import LoadPoll
from paceline_router.proxy import Proxy
from paceline_router.settings import Limits
from paceline_router.token_file import TokenFile
from paceline_router.upstream import open_upstreams

log = logging.getLogger(__name__)

BACKLOG = 2048
# Above the 60 s that load balancers keep an idle connection, so that they let go of it first.
CLIENT_KEEPALIVE_S = 75


class CannotListen(Exception):
    """A port cannot be had. The message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything the process is told at its start. Port 0 takes any free port."""

    namespace: str
    name: str = "default"
    host: str = "127.0.0.1"
    port: int = 8080
    admin_port: int = 8081
    metrics_port: int = 8082
    internal_token_file: Path | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Listeners:
    """The three listening sockets."""

    http: socket.socket
    admin: socket.socket
    metrics: socket.socket

    def close(self) -> None:
        for listener in (self.http, self.admin, self.metrics):
            listener.close()


def listen(config: RouterConfig) -> Listeners:
    """All sockets or none. Raises CannotListen."""
    taken: list[socket.socket] = []
    options = (("--port", config.port), ("--admin-port", config.admin_port), ("--metrics-port", config.metrics_port))
    try:
        for option, port in options:
            taken.append(_listen(config.host, port, option))
    except CannotListen:
        for listener in taken:
            listener.close()
        raise
    return Listeners(*taken)


def _listen(host: str, port: int, option: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # The protocol is named because asyncio sets TCP_NODELAY only where it is.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use: stop what listens there, or choose another with {option}"
        else:
            message = f"cannot listen on {host} port {port} ({option}): {error.strerror or error}"
        raise CannotListen(message) from error


class _Server(uvicorn.Server):
    """One of several servers in one process, which therefore leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RouterProcess:
    """The composed router. `run` returns when it has stopped; `stop` asks it to."""

    def __init__(self, config: RouterConfig, client: KubeClient, token: TokenFile | None) -> None:
        self._config = config
        self._token = token
        self._stopping = asyncio.Event()
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._ledger = Ledger(self._registry)
        self._key_prefix = os.urandom(16)
        self._fallback_secret = os.urandom(32)
        self.discovery = Discovery(
            client,
            config.namespace,
            config.name,
            key_prefix=self._key_prefix,
            on_restart=self._ledger.watch_restarted,
        )

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, listeners: Listeners) -> None:
        """Serve until `stop`, then finish running requests within the drain timeout."""
        async with open_upstreams(self._config.limits) as upstreams:
            proxy = self.proxy = Proxy(
                snapshot=self._snapshot,
                upstreams=upstreams,
                authenticator=Authenticator(self._key_prefix),
                ledger=self._ledger,
                limits=self._config.limits,
                token=self._token,
                salt_secret=self._salt_secret,
            )
            poll = LoadPoll(self._snapshot, upstreams, proxy.in_flight, proxy.reported, self._token)
            public = public_app(proxy, self._snapshot, live=self._live, ready=self._ready)
            admin = admin_app(self._snapshot, proxy.in_flight, self._ledger, self._token)
            metrics = metrics_app(self._registry, self._sample)
            self.discovery.start()
            polling = asyncio.create_task(poll.run())
            try:
                await self._serve(listeners, public, admin, metrics)
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
                self.discovery.stop()

    async def _serve(self, listeners: Listeners, public: Any, admin: Any, metrics: Any) -> None:
        drain_s = max(1, round(self._config.limits.drain_timeout_s))
        front = _Server(_uvicorn_config(public, drain_s))
        back = [_Server(_uvicorn_config(app, 1)) for app in (admin, metrics)]
        front_task = asyncio.create_task(front.serve(sockets=[listeners.http]))
        back_tasks = [
            asyncio.create_task(server.serve(sockets=[listener]))
            for server, listener in zip(back, (listeners.admin, listeners.metrics), strict=True)
        ]
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((stopping, front_task, *back_tasks), return_when=asyncio.FIRST_COMPLETED)
        log.info("Stopping: %d requests are running, they have %d s", self.proxy.open_requests, drain_s)
        self._stopping.set()
        front.should_exit = True
        await asyncio.gather(front_task, stopping)
        for server in back:
            server.should_exit = True
        await asyncio.gather(*back_tasks)

    def _snapshot(self) -> Any:
        return self.discovery.snapshot

    def _salt_secret(self) -> bytes:
        """The namespace's internal token; without one, a secret of this process, so that salts stay unguessable."""
        return self._fallback_secret if self._token is None else self._token.current().encode()

    def _live(self) -> bool:
        return self.discovery.alive

    def _ready(self) -> bool:
        return self.discovery.snapshot.complete and not self._stopping.is_set()

    def _sample(self) -> None:
        self._ledger.sample(self.discovery.snapshot, self.proxy.in_flight)


def _uvicorn_config(app: Any, graceful_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        # The peer's address decides who is anonymous; no header may stand in for it.
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=CLIENT_KEEPALIVE_S,
        timeout_graceful_shutdown=graceful_s,
    )


async def serve(config: RouterConfig, client: KubeClient, token: TokenFile | None, listeners: Listeners) -> None:
    """Run a router until SIGTERM or SIGINT."""
    process = RouterProcess(config, client, token)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stop)
    for name, listener in (("http", listeners.http), ("admin", listeners.admin), ("metrics", listeners.metrics)):
        log.info("%s listens on %s port %d", name, *listener.getsockname()[:2])
    log.info("Router %s serves namespace %s", config.name, config.namespace)
    await process.run(listeners)
