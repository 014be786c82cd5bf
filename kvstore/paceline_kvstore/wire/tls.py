"""TLS under the frames, for TCP between machines. Files are read for each connection: a renewed certificate is used
without a restart."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline_kvstore.wire.transport import Slow

_RECORD_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's certificate, with those that lead to a known authority, and its private key, in PEM files."""

    cert_file: Path
    key_file: Path

    def context(self) -> ssl.SSLContext:
        """Raises OSError for files that can't be read, don't parse or don't belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert_file, self.key_file)
        return context

    def accept(self, sock: socket.socket) -> ssl.SSLSocket:
        """The socket, which it takes over, before its handshake. Raises OSError."""
        return self.context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The authorities that a client believes, in a PEM file. A server's certificate must be for the host asked for."""

    ca_file: Path

    def context(self) -> ssl.SSLContext:
        """Raises OSError for a file that can't be read or has no certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca_file)
        return context

    def connect(self, sock: socket.socket, host: str) -> ssl.SSLSocket:
        """The connected socket, which it takes over, before its handshake. Raises OSError."""
        return self.context().wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)


class TlsStream:
    """Implements `Stream`. A record of up to 16 KiB is taken at a time, and the deadline looked at in between."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def shake_hands(self, deadline: float) -> None:
        """To be called first. Raises OSError: Slow, SSLCertVerificationError for a server that it doesn't believe."""
        self._set_timeout(deadline)
        try:
            self._sock.do_handshake()
        except TimeoutError:
            raise Slow("the handshake didn't end in time") from None

    @property
    def has_bytes(self) -> bool:
        return self._sock.pending() > 0

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        for buffer in buffers:
            view = memoryview(buffer)
            while view:
                self._set_timeout(deadline)
                try:
                    view = view[self._sock.send(view[:_RECORD_BYTES]) :]
                except TimeoutError:
                    raise Slow("the peer takes no more bytes") from None

    def receive(self, target: memoryview, deadline: float, *, whole: bool = False) -> int:
        del whole  # A record at a time in any case.
        self._set_timeout(deadline)
        try:
            return self._sock.recv_into(target)
        except TimeoutError:
            raise Slow("nothing came in time") from None

    def fileno(self) -> int:
        return self._sock.fileno()

    def end(self) -> None:
        # The plain socket's: the TLS socket's own would read on without TLS.
        socket.socket.shutdown(self._sock, socket.SHUT_WR)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.stop()
        self._sock.close()

    def _set_timeout(self, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise Slow("the deadline has passed")
        self._sock.settimeout(seconds)
