"""kopf as an informer and nothing else: every event goes to the sink.

Only `on.event` handlers are registered. They store nothing on objects, whereas change handlers, timers and daemons
would put annotations and finalizers on users' objects. kopf has a thread and an event loop of its own, because at its
end it cancels every task of its loop. Must not plan or write.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import kopf
from kubernetes import client as official
from kubernetes import config as official_config

from paceline_api.kube import Kind
from paceline_operator.feed import WATCHED_KINDS, field_selector, label_selector
from paceline_operator.informer import Sink

log = logging.getLogger(__name__)

_TLS_CLOSE_S = 0.25
PRIVATE_PREFIX = "paceline.dev"


def registry_for(sink: Sink, kubeconfig: Path | None) -> kopf.OperatorRegistry:
    """One event handler a watched kind, and the login."""
    registry = kopf.OperatorRegistry()
    for kind in WATCHED_KINDS:
        decorate = kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)
        decorate(_handler(sink, kind))

    def login(**_: Any) -> kopf.ConnectionInfo:
        return _connection(kubeconfig)

    kopf.on.login(id="login", registry=registry)(login)
    return registry


def _handler(sink: Sink, kind: Kind) -> Callable[..., Awaitable[None]]:
    async def handle(event: Any, **_: Any) -> None:
        # kopf reports the objects of a list with type None.
        manifest = {**event["object"], "apiVersion": kind.api_version, "kind": kind.kind}
        sink(kind, event["type"] or "ADDED", manifest)

    return handle


def _connection(kubeconfig: Path | None) -> kopf.ConnectionInfo:
    """As the operator's own client connects. kopf asks again when the credentials have expired."""
    found = official.Configuration()
    if kubeconfig is None:
        official_config.load_config(client_configuration=found)
    else:
        official_config.load_kube_config(config_file=str(kubeconfig), client_configuration=found)
    header = found.get_api_key_with_prefix("BearerToken") or found.get_api_key_with_prefix("authorization")
    return kopf.ConnectionInfo(
        server=found.host,
        ca_path=found.ssl_ca_cert,
        insecure=not found.verify_ssl,
        username=found.username or None,
        password=found.password or None,
        scheme="Bearer" if header else None,
        token=header.split(" ", 1)[-1] if header else None,
        certificate_path=found.cert_file,
        private_key_path=found.key_file,
    )


def kopf_settings() -> kopf.OperatorSettings:
    """Bounded watches and requests; no peering, no posted events; names of our own in what it could ever store."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    # Without it kopf lists namespaces and CRDs of the whole cluster first, and waits for ever without that right.
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1.0
    settings.watching.chunk_size = 500
    for kind in WATCHED_KINDS:
        if selector := label_selector(kind):
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
        if selector := field_selector(kind):
            settings.watching.field_selectors[kind.group, kind.version, kind.plural] = selector
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.posting.enabled = False
    # A limit below the number of objects deadlocks kopf's start.
    settings.queueing.worker_limit = None
    settings.persistence.finalizer = f"{PRIVATE_PREFIX}/unused"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PRIVATE_PREFIX)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=PRIVATE_PREFIX)
    # kopf would kill this whole process, without a word; our own watchdog ends it, says why, and exits with 1.
    settings.process.ultimate_exiting_timeout = None
    return settings


class KopfInformer:
    """Runs kopf in a daemon thread. Once one of kopf's tasks has ended, it only tries to stop, perhaps for ever."""

    def __init__(self, namespace: str | None, sink: Sink, kubeconfig: Path | None = None) -> None:
        self._namespace = namespace
        self._registry = registry_for(sink, kubeconfig)
        self._stop = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stop.set()
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._ending.is_set()

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception:
            log.exception("The informer ended; the process must be started again")

    async def _watch(self) -> None:
        before = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=self._registry,
            settings=kopf_settings(),
            clusterwide=self._namespace is None,
            namespaces=() if self._namespace is None else [self._namespace],
            stop_flag=self._stop,
            # kopf's own default asks for the user's name, which a container's numeric user does not have.
            identity=cast(Any, PRIVATE_PREFIX),
        )
        for task in tasks:
            task.add_done_callback(lambda _: self._ending.set())
        await kopf.run_tasks(tasks, ignored=before)
        # aiohttp closes TLS connections in later turns of the loop.
        await asyncio.sleep(_TLS_CLOSE_S)
