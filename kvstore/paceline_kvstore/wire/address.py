"""Where a node server is: `unix:///PATH` or `tcp://HOST:PORT`. Must not do I/O but `connect`."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from paceline_kvstore.wire.transport import tune


@dataclass(frozen=True, slots=True)
class Address:
    """A Unix socket's path, or host and port."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    def connect(self, timeout: float) -> socket.socket:
        """A tuned, connected socket. Raises OSError (TimeoutError after so many seconds)."""
        if self.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout)
                sock.connect(self.path)
            except OSError:
                sock.close()
                raise
        else:
            sock = socket.create_connection((self.host, self.port), timeout)
        tune(sock)
        return sock


def parse_address(text: str) -> Address:
    """Raises ValueError that says what is wrong with it."""
    scheme, found, rest = text.partition("://")
    if found and scheme == "unix" and rest.startswith("/") and len(rest.encode()) <= UNIX_PATH_BYTES_MAX:
        return Address(path=rest)
    host, found, port = rest.rpartition(":")
    if scheme == "tcp" and found and host and port.isdecimal() and 0 < int(port) < 65536:
        return Address(host=host.removeprefix("[").removesuffix("]"), port=int(port))
    raise ValueError(
        f"{text!r} is no address of a KV server: write tcp://HOST:PORT, or unix:///PATH with at most "
        f"{UNIX_PATH_BYTES_MAX} bytes of path"
    )


UNIX_PATH_BYTES_MAX = 107
"""What the kernel's address structure holds."""


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses; other names are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
