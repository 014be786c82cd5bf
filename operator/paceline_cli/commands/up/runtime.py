"""Composes one `paceline up`: local runtime, the unchanged operator on its store, and a stable port for each router.

Everything but the operator's threads lives on the event loop of the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.handlers
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from paceline_api.kube import (
    ENDPOINT_SLICE,
    INFERENCE_SERVICE,
    KV_STORE,
    POD,
    ROUTER,
    TENANT,
    Manifest,
)
from paceline_api.names import KV_DISK_VOLUME, MODEL_CACHE_DIR, PORT_HTTP, router_name
from paceline_api.validation import parse
from paceline_cli.commands.up.claim import HOST, Claim
from paceline_cli.commands.up.load_balancer import LoadBalancer
from paceline_cli.commands.up.view import Log, View, view_of
from paceline_cli.local.controllers.base import ControllerManager
from paceline_cli.local.runtime import LocalRuntime, RuntimeConfig
from paceline_cli.local.service_proxy import ServiceProxy
from paceline_cli.node.logs import tail
from paceline_cli.node.pod import PodKey
from paceline_operator.app import Operator, new_token
from paceline_operator.settings import Settings

# As kubectl calls itself: applying an edited file then goes on from here, without a conflict.
FIELD_MANAGER = "kubectl"
_SHOWN = (INFERENCE_SERVICE, ROUTER, TENANT, KV_STORE)
_LOOKED_AT = (*_SHOWN, POD, ENDPOINT_SLICE)
_LOG_BYTES, _LOG_FILES = 1024 * 1024, 2
_CACHE_ENV = "PACELINE_CACHE_DIR"


class Runtime:
    """`await start(manifests)`, then `view()` at any time, and `await stop()` once. `changed` is called on the loop."""

    def __init__(self, claim: Claim, namespace: str, routers: Sequence[str], changed: Callable[[], None]) -> None:
        self.log_dir = claim.state_dir / "logs"
        self._namespace = namespace
        self._changed = changed
        self._log_handler = _log_to(self.log_dir / f"up-{claim.port}.log")
        self._local = LocalRuntime(
            RuntimeConfig(
                state_dir=claim.state_dir,
                namespace=namespace,
                validators=dict.fromkeys(_SHOWN, parse),
                stand_ins={MODEL_CACHE_DIR: cache_dir(os.environ)},
                kept_volumes=frozenset({KV_DISK_VOLUME}),
            )
        )
        # Only the first router has the port that the user chose; nobody else's port is known beforehand.
        store, services = self._local.store, [router_name(name) for name in routers]
        self._proxies = [
            ServiceProxy(store, namespace, service, PORT_HTTP, host=HOST, port=0 if index else claim.port)
            for index, service in enumerate(services)
        ]
        balancer = LoadBalancer(store, namespace, HOST, list(zip(services, self._proxies, strict=True)))
        self._controllers = ControllerManager(store, [balancer])
        token = kept_token(claim.state_dir)
        self._operator = Operator(self._local.store, Settings(namespace=namespace), token_source=lambda: token)
        self._operator_started = False
        self._hurried = False

    @property
    def kubeconfig(self) -> Path:
        """For kubectl; gone after `stop`."""
        return self._local.kubeconfig

    @property
    def pods(self) -> set[PodKey]:
        """Pods that still have a process."""
        return self._local.node.pods

    async def start(self, manifests: Sequence[Manifest]) -> None:
        """Raises OSError where a port was taken in the meantime; `stop` must be called in any case."""
        for proxy in self._proxies:
            await proxy.start()
        loop = asyncio.get_running_loop()
        store = self._local.store
        store.subscribe(lambda kind: _call_soon(loop, self._changed) if kind in _LOOKED_AT else None)
        for manifest in manifests:
            store.apply(manifest, field_manager=FIELD_MANAGER)
        self._controllers.start()
        await self._local.start()
        self._operator.start()
        self._operator_started = True

    def view(self) -> View:
        """What is going on now."""
        objects = [item for kind in _SHOWN for item in self._local.store.list(kind, self._namespace).items]
        pods = self._local.store.list(POD, self._namespace).items
        # A condition may be ahead of the EndpointSlices by a moment; the URL is not shown before it leads somewhere.
        reachable = all(proxy.targets() for proxy in self._proxies)
        return view_of(
            objects,
            pods,
            now=datetime.now(UTC),
            port_of=self._port_of,
            log_of=self._log_of,
            reachable=reachable,
        )

    def hurry(self) -> None:
        """Cuts the grace of a `stop` that waits."""
        if not self._hurried:
            self._hurried = True
            asyncio.get_running_loop().create_task(self._local.kill())

    async def stop(self) -> None:
        """Pods first, each within its grace period; proxies last, so that streams in flight can end."""
        try:
            await self._controllers.stop()
            await asyncio.gather(self._local.stop(0.0 if self._hurried else None), self._stop_operator())
        finally:
            for proxy in self._proxies:
                await proxy.stop()
            logging.getLogger().removeHandler(self._log_handler)
            self._log_handler.close()

    async def _stop_operator(self) -> None:
        if self._operator_started:
            await asyncio.to_thread(self._operator.stop)

    def _port_of(self, pod: Manifest) -> int | None:
        """The pod's own HTTP port, once the node has given it one."""
        if not (pod.get("status") or {}).get("podIP"):
            return None
        ports = [port for container in pod["spec"]["containers"] for port in container.get("ports") or []]
        return next((port["containerPort"] for port in ports if port.get("name") == PORT_HTTP), None)

    def _log_of(self, pod: Manifest) -> Log:
        metadata = pod["metadata"]
        container = pod["spec"]["containers"][0]["name"]
        path = self._local.node.log_path(metadata["namespace"], metadata["name"], container)
        return Log(str(path), tail(path))


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where converted models are kept between runs: the engine's own default."""
    if environ.get(_CACHE_ENV):
        return Path(environ[_CACHE_ENV])
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "paceline"


def kept_token(state_dir: Path) -> str:
    """What the operator makes internal tokens of: the same in each run, as in a cluster.

    Tenants' salts come from it, and stored KV is found under a tenant's salt only.
    """
    path = state_dir / "internal-token"
    with contextlib.suppress(FileExistsError):
        with tempfile.NamedTemporaryFile("w", dir=state_dir, prefix=".internal-token-", delete=False) as file:
            file.write(new_token())
        try:
            # All or nothing, for runs that start at the same time.
            os.link(file.name, path)
        finally:
            Path(file.name).unlink()
    return path.read_text()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    # Writes come from the operator's threads too; after the loop's end nobody looks any more.
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)


def _log_to(path: Path) -> logging.Handler:
    """The operator's and the node's own log goes to a bounded file: the terminal shows the table."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler
