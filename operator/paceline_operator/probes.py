"""Answers the kubelet: `/health/live` and `/health/ready` on a port of their own. Reads state, changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Check = Callable[[], str | None]


class HealthServer:
    """Each check returns why it fails, or None. 200 or 503 with that line."""

    def __init__(self, host: str, port: int, live: Check, ready: Check) -> None:
        checks = {"/health/live": live, "/health/ready": ready}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                check = checks.get(self.path)
                problem = "no such path" if check is None else check()
                body = ((problem or "ok") + "\n").encode()
                self.send_response(404 if check is None else 503 if problem else 200)
                self.send_header("content-type", "text/plain")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
                """Probes come every few seconds; the kubelet reports the failed ones."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
