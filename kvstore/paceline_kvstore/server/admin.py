"""The HTTP side of the node server: health, metrics, and what an administrator may ask and do.

The standard library's server, with a bound on clients and on how long each may take. `/health` and `/metrics` are open;
`/admin` wants the token.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from paceline_kvstore.metrics import snapshot
from paceline_kvstore.server.admin_requests import (
    BadRequest,
    Invalidate,
    KeysRequest,
    PinRequest,
    UnpinRequest,
    read_json,
)
from paceline_kvstore.server.node_server import NodeServer
from paceline_kvstore.server.store import Removed
from paceline_kvstore.wire.tls import ServerTls

logger = logging.getLogger(__name__)

CLIENTS_MAX = 16
CLIENT_SECONDS = 15.0
WORK_SECONDS = 600.0
"""For what a request asks for: a purge of a large bucket takes its time."""
BODY_BYTES_MAX = 1 << 20
DISCARD_BYTES_MAX = 4 * BODY_BYTES_MAX
_PIECE_BYTES = 1 << 16
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    content_type: str = "application/json"


def _json(value: Any, status: int = 200) -> _Answer:
    return _Answer(status, json.dumps(value).encode() + b"\n")


def _removed(removed: Removed) -> _Answer:
    answer: dict[str, Any] = {"removed": removed.count}
    if not removed.incomplete:
        return _json(answer)
    names = ", ".join(removed.incomplete)
    message = f"tier {names} failed meanwhile and may still have some of it: ask again once it is well"
    return _json(answer | {"error": {"message": message, "field": None}}, HTTPStatus.SERVICE_UNAVAILABLE)


class Admin:
    """The routes, without HTTP: each takes a body and gives an answer, or raises BadRequest."""

    def __init__(self, server: NodeServer, registry: CollectorRegistry) -> None:
        self._server = server
        self._store = server.store
        self._registry = registry
        self.routes: dict[str, dict[str, Callable[[bytes], _Answer]]] = {
            "/health/live": {"GET": lambda _: _Answer(200, b"ok\n", "text/plain")},
            "/health/ready": {"GET": self._ready},
            "/metrics": {"GET": lambda _: _Answer(200, generate_latest(self._registry), CONTENT_TYPE_LATEST)},
            "/admin/stats": {"GET": self._stats},
            "/admin/lookup": {"POST": self._lookup},
            "/admin/pin": {"POST": self._pin},
            "/admin/unpin": {"POST": self._unpin},
            "/admin/invalidate": {"POST": self._invalidate},
        }

    def _ready(self, _: bytes) -> _Answer:
        if self._server.draining:
            return _Answer(503, b"draining\n", "text/plain")
        return _Answer(200, b"ok\n", "text/plain")

    def _stats(self, _: bytes) -> _Answer:
        tier, quarantine = self._store.tier, self._server.quarantine
        latest = [
            {"key": str(refusal.key), "reason": refusal.reason, "message": refusal.message}
            for refusal in quarantine.latest()
        ]
        return _json(
            {
                "tier": asdict(tier.stats),
                "levels": [asdict(level) for level in snapshot(self._store.tiered).levels],
                "bytes_used": tier.bytes_used,
                "capacity": tier.capacity,
                "pinned": asdict(self._store.pinned),
                "connections": self._server.num_connections,
                "draining": self._server.draining,
                "refused_on_arrival": {"counts": quarantine.counts, "latest": latest},
            }
        )

    def _lookup(self, body: bytes) -> _Answer:
        """How many leading keys are there, and of each which tiers have it and whether it is pinned."""
        keys = KeysRequest.parse(read_json(body)).keys
        each = [
            {"key": key.to_bytes().hex(), "tiers": list(tiers), "pinned": self._store.is_pinned(key)}
            for key, tiers in zip(keys, self._store.where(keys), strict=True)
        ]
        leading = next((index for index, found in enumerate(each) if not found["tiers"]), len(each))
        return _json({"leading": leading, "keys": each})

    def _pin(self, body: bytes) -> _Answer:
        asked = PinRequest.parse(read_json(body), self._store.pin_seconds_max)
        return _json({"pinned": self._store.pin(asked.holder, asked.keys, asked.seconds)})

    def _unpin(self, body: bytes) -> _Answer:
        return _json({"unpinned": self._store.unpin(UnpinRequest.parse(read_json(body)).holder)})

    def _invalidate(self, body: bytes) -> _Answer:
        asked = Invalidate.parse(read_json(body))
        if asked.chain is not None:
            return _removed(self._store.invalidate_chain(asked.chain))
        return _removed(self._store.clear(namespace=asked.namespace, tenant=asked.tenant))


class _HttpServer(ThreadingHTTPServer):
    """A thread a client, up to CLIENTS_MAX; who takes longer than CLIENT_SECONDS to ask, or to listen, is cut off."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, sock: socket.socket, admin: Admin, token: str | None, tls: ServerTls | None) -> None:
        super().__init__(sock.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock
        self.admin = admin
        self.token = token
        self._tls = tls
        self._clients: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next client; it shakes hands in its own thread, with its first read."""
        sock, address = super().get_request()
        if self._tls is None:
            return sock, address
        try:
            return self._tls.accept(sock), address
        except OSError as error:
            logger.warning("admin: no TLS for a client: %s", error)
            sock.close()
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more."""
        with self._lock:
            if len(self._clients) >= CLIENTS_MAX:
                return False
            self._clients[request] = time.monotonic() + CLIENT_SECONDS
            return True

    def allow(self, request: socket.socket, seconds: float) -> None:
        """The client is served for so long from now."""
        with self._lock:
            if request in self._clients:
                self._clients[request] = time.monotonic() + seconds

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called ten times a second: cut off who is late."""
        now = time.monotonic()
        with self._lock:
            late = [sock for sock, end in self._clients.items() if end < now]
        for sock in late:
            try:
                # The plain socket's: a TLS socket's own would read on without TLS.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("an admin client failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request a connection."""

    timeout = CLIENT_SECONDS
    server_version = "paceline-kvstore"
    sys_version = ""

    @property
    def _http(self) -> _HttpServer:
        assert isinstance(self.server, _HttpServer)
        return self.server

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the base class's name
        logger.debug(format, *args)

    def _answer(self, method: str) -> None:
        try:
            # First: bytes that nobody reads would make the kernel reset the connection before the answer is read.
            body = self._body()
            self._http.allow(self.connection, WORK_SECONDS)
            answer = self._route(method, self.path.partition("?")[0], body)
        except BadRequest as error:
            answer = _json({"error": {"message": str(error), "field": error.field}}, error.status)
        except Exception:
            logger.exception("%s %s failed", method, self.path)
            answer = _json({"error": {"message": "the server failed; its log says why", "field": None}}, 500)
        self._http.allow(self.connection, CLIENT_SECONDS)
        self.send_response(answer.status)
        self.send_header("content-type", answer.content_type)
        self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def _route(self, method: str, path: str, body: bytes) -> _Answer:
        methods = self._http.admin.routes.get(path)
        if methods is None:
            raise BadRequest(None, f"there is no {path[:100]}", HTTPStatus.NOT_FOUND)
        if path.startswith("/admin/"):
            self._check_token()
        if method not in methods:
            raise BadRequest(None, f"{path} takes {', '.join(methods)}", HTTPStatus.METHOD_NOT_ALLOWED)
        return methods[method](body)

    def _check_token(self) -> None:
        token = self._http.token
        given = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            what = "wrong" if given else "missing"
            raise BadRequest(
                "authorization",
                f"header authorization: the token is {what}: send `Bearer TOKEN` with the server's --token-file",
                HTTPStatus.UNAUTHORIZED,
            )

    def _body(self) -> bytes:
        text = self.headers.get("content-length", "0")
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise BadRequest("content-length", f"header content-length: {text[:40]!r} is not a number of bytes")
        if int(text) > BODY_BYTES_MAX:
            left = min(int(text), DISCARD_BYTES_MAX)
            while left and (piece := self.rfile.read(min(left, _PIECE_BYTES))):
                left -= len(piece)
            message = f"the body is larger than {BODY_BYTES_MAX} bytes: send fewer keys at a time"
            raise BadRequest(None, message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return self.rfile.read(int(text))


class AdminServer:
    """Serves the routes on a listening socket, in a thread of its own."""

    def __init__(
        self,
        sock: socket.socket,
        server: NodeServer,
        registry: CollectorRegistry,
        token: str | None,
        tls: ServerTls | None = None,
    ) -> None:
        self._http = _HttpServer(sock, Admin(server, registry), token, tls)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(_POLL_S,), daemon=True, name="admin")

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting and close the socket."""
        if self._thread.is_alive():
            self._http.shutdown()
        self._http.server_close()
