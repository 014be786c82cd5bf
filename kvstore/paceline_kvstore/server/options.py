"""What `paceline-kvstore serve` was asked to do, and the errors that end it before it serves."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from paceline_kvstore.config import CAPACITY_MIN, BadSettings, StoreSettings, parse_settings
from paceline_kvstore.opening import pinned_bytes_default
from paceline_kvstore.server.limits import Limits
from paceline_kvstore.tiered.store import PIN_SECONDS_MAX
from paceline_kvstore.wire.address import UNIX_PATH_BYTES_MAX, is_loopback
from paceline_kvstore.wire.tls import ServerTls

BACKLOG = 512
MEMORY_DEFAULT = 1 << 30
MAX_CHUNK_DEFAULT = 128 << 20
CHUNKS_INFLIGHT = 4
_SOCKET_UMASK = 0o177
"""A Unix socket is its owner's alone."""


class BadInput(ValueError):
    """Wrong options or environment: one line; exit code 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Sizes are bytes, durations seconds. socket: path of the Unix socket; port: None for no TCP.

    config: a settings document; memory and ttl are the short form of one. What is None has a default that depends on
    them.
    """

    config: Path | None
    memory: int | None
    socket: Path | None
    host: str
    port: int | None
    admin_port: int
    token_file: Path | None
    insecure: bool
    tls_cert: Path | None
    tls_key: Path | None
    ttl: float | None
    max_chunk: int | None
    max_inflight: int | None
    max_connections: int
    max_pinned: int | None
    max_pin_time: float
    frame_timeout: float
    idle_timeout: float
    drain_timeout: float

    def read_settings(self) -> StoreSettings:
        """The tiers to share. Raises BadInput that names the option or the file's field."""
        if self.ttl is not None and self.ttl <= 0:
            raise BadInput("--ttl must be more than 0 s; leave it out to keep chunks of any age")
        if self.config is None:
            memory = MEMORY_DEFAULT if self.memory is None else self.memory
            if memory < CAPACITY_MIN:
                raise BadInput(f"--memory {memory} is too little: {CAPACITY_MIN} bytes or more")
            return StoreSettings(memory=memory, ttl=self.ttl)
        for flag, value, name in (("--memory", self.memory, "memory.capacity"), ("--ttl", self.ttl, "ttl")):
            if value is not None:
                raise BadInput(f"{flag} and --config are both given: write {name} into the file")
        try:
            settings = parse_settings(json.loads(self.config.read_text("utf-8")))
        except OSError as error:
            raise BadInput(f"can't read --config {self.config}: {error.strerror}: check the path") from error
        except BadSettings as error:
            raise BadInput(f"--config {self.config}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise BadInput(f"--config {self.config} isn't JSON: {error}") from error
        if settings.node is not None:
            raise BadInput(f"--config {self.config}: node: a node server shares tiers of its own: leave it out")
        return settings

    def limits(self, settings: StoreSettings) -> Limits:
        """Raises BadInput that names the option."""
        largest = chunk_bytes_max(settings)
        max_chunk = min(MAX_CHUNK_DEFAULT, largest) if self.max_chunk is None else self.max_chunk
        max_inflight = CHUNKS_INFLIGHT * max_chunk if self.max_inflight is None else self.max_inflight
        for flag, size in (("--max-chunk", max_chunk), ("--max-connections", self.max_connections)):
            if size < 1:
                raise BadInput(f"{flag} must be at least 1, it is {size}")
        if max_chunk > largest:
            raise BadInput(f"--max-chunk {max_chunk} is more than any tier takes, which is {largest} bytes")
        if max_inflight < max_chunk:
            raise BadInput(f"--max-inflight {max_inflight} has no room for one chunk (--max-chunk {max_chunk})")
        for flag, seconds in (("--frame-timeout", self.frame_timeout), ("--idle-timeout", self.idle_timeout)):
            if seconds <= 0:
                raise BadInput(f"{flag} must be more than 0 s")
        if not 0 < self.max_pin_time <= PIN_SECONDS_MAX:
            raise BadInput(f"--max-pin-time must be more than 0 s and at most {PIN_SECONDS_MAX / 3600:g} h")
        return Limits(
            connections=self.max_connections,
            chunk_bytes=max_chunk,
            inflight_bytes=max_inflight,
            frame_timeout_s=self.frame_timeout,
            idle_timeout_s=self.idle_timeout,
        )

    def pinned_bytes(self, settings: StoreSettings) -> int:
        """Bound on what pins hold. Raises BadInput."""
        if self.max_pinned is None:
            return pinned_bytes_default(settings)
        largest = 2 * pinned_bytes_default(settings)
        if self.max_pinned > largest:
            raise BadInput(f"--max-pinned {self.max_pinned} is more than the smaller of memory and disk, {largest}")
        return self.max_pinned


def chunk_bytes_max(settings: StoreSettings) -> int:
    """Largest payload that some tier keeps."""
    disk = 0 if settings.disk is None else settings.disk.capacity // 8
    return max(settings.memory or 0, disk, 0 if settings.s3 is None else MAX_CHUNK_DEFAULT)


def read_token(options: ServeOptions) -> str | None:
    """The token that clients must have, None for none. Raises BadInput: nobody serves openly by mistake."""
    path = options.token_file
    if path is None:
        if not is_loopback(options.host) and not options.insecure:
            raise BadInput(
                f"--host {options.host} is open to other machines and there is no --token-file: give one, bind to "
                "127.0.0.1, or let everybody in with --insecure"
            )
        return None
    if options.insecure:
        raise BadInput("--insecure and --token-file are both given: leave one of them out")
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"can't read --token-file {path}: {error}: check the path and its permissions") from error
    if not token:
        raise BadInput(f"--token-file {path} is empty: put the token into it")
    return token


def read_tls(options: ServeOptions) -> ServerTls | None:
    """What TCP clients and the admin port are served with. Raises BadInput."""
    if options.tls_cert is None and options.tls_key is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise BadInput("--tls-cert and --tls-key go together: give both, or none")
    tls = ServerTls(options.tls_cert, options.tls_key)
    try:
        tls.context()
    except OSError as error:
        raise BadInput(f"--tls-cert {tls.cert_file}, --tls-key {tls.key_file}: can't use them: {error}") from error
    return tls


@dataclass(frozen=True, slots=True)
class Sockets:
    """Bound and listening, so that nobody else can take them meanwhile."""

    clients: tuple[socket.socket, ...]
    admin: socket.socket
    path: Path | None
    identity: tuple[int, int] | None

    def close(self) -> None:
        """Give the addresses back; the socket file goes only if it is still ours."""
        for sock in (*self.clients, self.admin):
            sock.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                if _identity(self.path) == self.identity:
                    self.path.unlink()


def bind_sockets(options: ServeOptions) -> Sockets:
    """Bind all, or none. Raises BadInput that names the option."""
    if options.socket is None and options.port is None:
        raise BadInput("neither --socket nor --port is given: clients need an address")
    bound: list[socket.socket] = []
    identity = None
    try:
        bound.append(_bind_tcp(options.host, options.admin_port, "--admin-port"))
        if options.port is not None:
            bound.append(_bind_tcp(options.host, options.port, "--port"))
        if options.socket is not None:
            bound.append(_bind_unix(options.socket))
            identity = _identity(options.socket)
    except BadInput:
        for sock in bound:
            sock.close()
        raise
    return Sockets(tuple(bound[1:]), bound[0], options.socket, identity)


def _identity(path: Path) -> tuple[int, int]:
    """Tells a file from a later one of the same name; inode numbers alone are used again at once."""
    about = path.stat()
    return about.st_ino, about.st_mtime_ns


def _bind_tcp(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise BadInput(f"port {port} on {host} is already in use: free it or give another {flag}") from error
        raise BadInput(f"can't listen on {host} port {port} ({flag}): {error}") from error
    return sock


def _bind_unix(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise BadInput(f"--socket {path} is longer than {UNIX_PATH_BYTES_MAX} bytes, the most that the kernel takes")
    _remove_dead(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(_SOCKET_UMASK)
    try:
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise BadInput(f"can't listen on --socket {path}: {error.strerror}: check its folder") from error
    finally:
        os.umask(mask)
    return sock


def _remove_dead(path: Path) -> None:
    """Take away the socket that a killed server left. Raises BadInput if it is alive, or no socket at all."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise BadInput(f"--socket {path} is there already and no socket: give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            raise BadInput(f"can't tell whether --socket {path} is in use: {error.strerror}") from error
    raise BadInput(f"another server listens on --socket {path}: stop it or give another path")
