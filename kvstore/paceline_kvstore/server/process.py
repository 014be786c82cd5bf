"""The life of the node server's process: bind, serve, drain, leave. Exit codes: 0 done, 1 failed, 2 bad input."""

from __future__ import annotations

import logging
import signal
import threading

from prometheus_client import CollectorRegistry, disable_created_metrics

from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.opening import open_store
from paceline_kvstore.server.admin import AdminServer
from paceline_kvstore.server.node_server import NodeServer
from paceline_kvstore.server.options import BadInput, ServeOptions, Sockets, bind_sockets, read_tls, read_token
from paceline_kvstore.server.store import NodeStore

logger = logging.getLogger(__name__)

_STOP = {signal.SIGTERM, signal.SIGINT}
_DRAINED = signal.SIGUSR1


def serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT, drain, and give the exit code; a second signal ends the drain.

    Raises BadInput with nothing left behind. To be called in the main thread.
    """
    settings = options.read_settings()
    limits, pinned_bytes, token = options.limits(settings), options.pinned_bytes(settings), read_token(options)
    tls = read_tls(options)
    sockets = bind_sockets(options)
    # Before there are threads: all of them inherit it, and this one takes the signals when it is ready for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOP, _DRAINED})
    try:
        disable_created_metrics()  # a second series for every counter that nobody queries
        registry = CollectorRegistry()
        try:
            tiered = open_store(settings, pinned_bytes=pinned_bytes)
        except KVStoreError as error:
            raise BadInput(str(error)) from error
        store = NodeStore(tiered, pin_seconds_max=options.max_pin_time)
        server = NodeServer(store, sockets.clients, registry, token=token, limits=limits, tls=tls)
        admin = AdminServer(sockets.admin, server, registry, token, tls)
        try:
            server.start()
            admin.start()
            _say_where(sockets)
            return _until_stopped(server, options.drain_timeout)
        finally:
            server.close()
            admin.close()
    finally:
        sockets.close()


def _until_stopped(server: NodeServer, drain_timeout: float) -> int:
    first = signal.Signals(signal.sigwait(_STOP))
    logger.info("%s: draining for at most %g s", first.name, drain_timeout)
    main, drained = threading.get_ident(), False

    def drain() -> None:
        nonlocal drained
        drained = server.drain(drain_timeout)
        signal.pthread_kill(main, _DRAINED)

    threading.Thread(target=drain, daemon=True, name="drain").start()
    second = signal.sigwait({*_STOP, _DRAINED})
    if second == _DRAINED:
        if not drained:
            logger.warning(
                "drain limit: ending %d connections that still work; chunks that only memory has are lost",
                server.num_connections,
            )
        return 0 if drained else 1
    logger.warning("%s again: stopping now", signal.Signals(second).name)
    return 1 if server.num_connections else 0


def _say_where(sockets: Sockets) -> None:
    for sock in sockets.clients:
        name = sock.getsockname()
        where = f"unix://{name}" if isinstance(name, str) else f"{name[0]} port {name[1]}"
        logger.info("clients: listens on %s", where)
    logger.info("admin: listens on %s port %d", *sockets.admin.getsockname()[:2])
