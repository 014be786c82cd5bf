"""Listens, gives each client a thread, and ends them all: at once or after what they are doing."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from threading import Condition, Event, Thread

from prometheus_client import CollectorRegistry

from paceline_kvstore.exposition import StoreCollector as LevelCollector
from paceline_kvstore.metrics import snapshot
from paceline_kvstore.quarantine import Quarantine
from paceline_kvstore.server.buffers import BufferPool
from paceline_kvstore.server.connection import Connection, Shared
from paceline_kvstore.server.drain import DrainFlag
from paceline_kvstore.server.limits import Limits
from paceline_kvstore.server.metrics import ServerMetrics, StoreCollector
from paceline_kvstore.server.store import NodeStore
from paceline_kvstore.wire.messages import Fail, Reason, encode_reply
from paceline_kvstore.wire.tls import ServerTls

logger = logging.getLogger(__name__)

SWEEP_S = 1.0
_STOP_S = 5.0
_PAUSE_S = 0.1
_WRITE_S = 1.0


class NodeServer:
    """Serves a store on listening sockets, which it closes. Without a token every client is let in.

    tls: for clients over TCP; over a Unix socket there is none.
    """

    def __init__(
        self,
        store: NodeStore,
        sockets: Sequence[socket.socket],
        registry: CollectorRegistry,
        *,
        token: str | None = None,
        limits: Limits | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        self.store = store
        self.limits = limits or Limits()
        self.quarantine = Quarantine()
        self._drain = DrainFlag()
        buffers = BufferPool(self.limits.inflight_bytes)
        metrics = ServerMetrics(registry)
        registry.register(StoreCollector(store, buffers, self.quarantine))
        registry.register(LevelCollector(lambda: snapshot(store.tiered)))
        self._shared = Shared(store, self.limits, token, buffers, self.quarantine, metrics, self._drain)
        self._tls = tls
        self._connections: set[Connection] = set()
        self._changed = Condition()
        self._swept = Event()
        self._threads = [Thread(target=self._accept, args=(sock,), daemon=True, name="accept") for sock in sockets]
        self._threads.append(Thread(target=self._sweep, daemon=True, name="sweep"))

    @property
    def num_connections(self) -> int:
        with self._changed:
            return len(self._connections)

    @property
    def draining(self) -> bool:
        return self._drain.is_set

    def start(self) -> None:
        """Begin to accept."""
        for thread in self._threads:
            thread.start()

    def drain(self, seconds: float) -> bool:
        """Accept nobody, answer what was asked, then write down what only memory has, where there is a place for it.

        False if the time is over before that is done.
        """
        end = time.monotonic() + seconds
        self._drain.set()
        with self._changed:
            answered = self._changed.wait_for(lambda: not self._connections, seconds)
        left, done = max(_WRITE_S, end - time.monotonic()), Event()

        def write_down() -> None:
            if self.store.drain(left):
                done.set()

        # A thread of its own: a place that hangs must not keep the server from ending.
        writer = Thread(target=write_down, daemon=True, name="drain")
        writer.start()
        writer.join(left)
        return answered and done.is_set()

    def close(self) -> None:
        """End every connection now and close the store. Idempotent."""
        self._drain.set()
        self._swept.set()
        with self._changed:
            for connection in self._connections:
                connection.stop()
            gone = self._changed.wait_for(lambda: not self._connections, _STOP_S)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_STOP_S)
        if gone:
            self._drain.close()
        self.store.close()

    def _accept(self, listener: socket.socket) -> None:
        waiter = self._drain.poll(listener.fileno())
        listener.setblocking(False)
        with listener:
            while not self._drain.is_set:
                if not waiter.readable(3600):
                    continue
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    # Out of descriptors, as a rule: the clients there are go on.
                    logger.warning("can't accept a client: %s", error)
                    time.sleep(_PAUSE_S)
                    continue
                self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        connection = Connection(sock, self._shared, None if sock.family == socket.AF_UNIX else self._tls)
        with self._changed:
            full = len(self._connections) >= self.limits.connections
            if not full:
                self._connections.add(connection)
        if full:
            self._turn_away(sock)
            return
        self._shared.metrics.on_opened()
        try:
            Thread(target=self._run, args=(connection,), daemon=True, name="connection").start()
        except RuntimeError as error:
            logger.warning("can't serve a client: %s", error)
            self._forget(connection)
            self._shared.metrics.on_closed(Reason.FULL)
            sock.close()

    def _turn_away(self, sock: socket.socket) -> None:
        """Without waiting for the client: those who are in must not notice."""
        fail = Fail(Reason.FULL, f"the server has its limit of {self.limits.connections} connections")
        self._shared.metrics.on_refused(Reason.FULL)
        with sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(encode_reply(0, fail))

    def _run(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()

    def _sweep(self) -> None:
        while not self._swept.wait(SWEEP_S):
            try:
                self.store.sweep()
            except Exception:
                logger.exception("a sweep failed; the next one follows")
