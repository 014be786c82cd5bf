"""What `paceline-engine serve` was asked to do, and the errors that end it before it serves.

Light to import: the core process is started from here before FastAPI is even loaded.
"""

from __future__ import annotations

import errno
import json
import socket
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from paceline_engine.config import EngineConfig
from paceline_kvstore.config import BadSettings, parse_settings

DISK_CAPACITY = 8 << 30


class BadInput(ValueError):
    """Wrong options or environment: one line; exit code 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the API process. Durations are seconds; `core` has everything of the core but model_dir."""

    model: str
    served_model_name: str
    host: str
    port: int
    admin_port: int
    metrics_port: int
    drain_timeout: float
    progress_timeout: float
    internal_token_file: Path | None
    chat_template: Path | None
    trust_request_chat_template: bool
    tool_call_parser: str
    enable_auto_tool_choice: bool
    grammar_compile_timeout: float
    cache_dir: Path
    cache_limit: int
    max_num_waiting: int
    core: dict[str, Any]

    def core_config(self, model_dir: Path) -> EngineConfig:
        """The core's configuration. It may queue more than this process admits, so the refusal is always ours."""
        seqs = self.core["max_num_seqs"]
        try:
            return EngineConfig(model_dir=str(model_dir), max_num_waiting=self.max_live + seqs, **self.core)
        except ValueError as error:
            raise BadInput(str(error)) from error

    @property
    def config_hash(self) -> str:
        """Short digest of everything that was asked for but ports and files of secrets."""
        hidden = {"port", "admin_port", "metrics_port", "internal_token_file", "host"}
        asked = {name: str(getattr(self, name)) for name in self.__slots__ if name not in hidden}
        return blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def max_live(self) -> int:
        """Requests the core may hold, running and waiting."""
        return self.max_num_waiting + self.core["max_num_seqs"]


@dataclass(frozen=True, slots=True)
class Ports:
    """The three bound sockets; listening already, so that nobody else can take a port while the model loads."""

    http: socket.socket
    admin: socket.socket
    metrics: socket.socket

    def close(self) -> None:
        """Give the ports back."""
        for sock in (self.http, self.admin, self.metrics):
            sock.close()


def bind_ports(options: ServeOptions) -> Ports:
    """Bind all three ports, or none. Raises BadInput that names the port and its option."""
    wanted = (("--port", options.port), ("--admin-port", options.admin_port), ("--metrics-port", options.metrics_port))
    bound: list[socket.socket] = []
    try:
        for flag, port in wanted:
            bound.append(_bind(options.host, port, flag))
    except BadInput:
        for sock in bound:
            sock.close()
        raise
    return Ports(*bound)


def _bind(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle off only for sockets that name the protocol; with it on, each answer waits some 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(socket.SOMAXCONN)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise BadInput(f"port {port} on {host} is already in use: free it or give another {flag}") from error
        raise BadInput(f"can't listen on {host} port {port} ({flag}): {error.strerror or error}") from error
    sock.setblocking(False)
    return sock


def kv_store_document(file: Path | None, disk: Path | None, disk_capacity: int | None) -> str:
    """The settings of the KV store as JSON, from a file or the disk's two options; "" without any. Raises BadInput."""
    if disk is None and disk_capacity is not None:
        raise BadInput("--kv-store-disk-capacity needs --kv-store-disk: say which folder it bounds")
    if file is not None and disk is not None:
        raise BadInput("--kv-store-config and --kv-store-disk: give one of them; a file can name a disk, too")
    if disk is not None:
        capacity = DISK_CAPACITY if disk_capacity is None else disk_capacity
        flag, text = "--kv-store-disk", json.dumps({"disk": {"path": str(disk.absolute()), "capacity": capacity}})
    else:
        flag, text = f"--kv-store-config {file}", read_text(file, "--kv-store-config")
    if text is None:
        return ""
    try:
        document = json.loads(text)
        parse_settings(document)
    except json.JSONDecodeError as error:
        raise BadInput(f"{flag} isn't JSON: {error}") from error
    except BadSettings as error:
        raise BadInput(f"{flag}: {error}") from error
    return json.dumps(document)


def read_token(path: Path | None) -> str | None:
    """The internal token. Raises BadInput if the file is unreadable or empty: never serve open by mistake."""
    text = read_text(path, "--internal-token-file")
    if text is not None and not text.strip():
        raise BadInput(f"--internal-token-file {path} is empty: put the token into it")
    return text.strip() if text is not None else None


def read_text(path: Path | None, flag: str) -> str | None:
    """A file's text, or None without a path. Raises BadInput."""
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"can't read {flag} {path}: {error}: check the path and its permissions") from error
