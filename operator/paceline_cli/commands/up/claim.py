"""Claims the router's port before anything starts.

A lock file of the port is held for the whole run, so that of two starts at the same moment one is refused before it
has started anything, and told by whom.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from paceline_cli.errors import BadInput

HOST = "127.0.0.1"
_STATE_ENV = "PACELINE_STATE_DIR"


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """$PACELINE_STATE_DIR, else the XDG state folder."""
    if environ.get(_STATE_ENV):
        return Path(environ[_STATE_ENV])
    base = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "paceline"


class Claim:
    """A port that is this process's until `release`. Raises BadInput if somebody else has it."""

    def __init__(self, state_dir: Path, port: int) -> None:
        self.port = port or _any_free_port()
        self.state_dir = state_dir.absolute()
        locks = self.state_dir / "ports"
        try:
            self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            locks.mkdir(exist_ok=True, mode=0o700)
            self._lock = os.open(locks / str(self.port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            why = f"cannot write to {locks}: {error.strerror}"
            raise BadInput(f"{why}; choose another folder with --state-dir or {_STATE_ENV}") from None
        try:
            self._take()
        except BaseException:
            self.release()
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 32, 0).decode().strip()
            raise BadInput(_taken(self.port, f"paceline up, PID {holder or 'unknown'}")) from None
        problem = port_problem(self.port)
        if problem is not None:
            raise BadInput(problem)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def port_problem(port: int) -> str | None:
    """Why the router cannot listen on the loopback port; None if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is free, one with a listener is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EACCES:
                return f"port {port} needs root; use --port N with N of 1024 or more"
            return _taken(port, _listener(port))
    return None


def _taken(port: int, holder: str | None) -> str:
    who = f" by {holder}" if holder else " by another program"
    return f"port {port} is taken{who}: stop it or use --port N"


def _listener(port: int) -> str | None:
    """Name and PID of the program that listens on the port, where this user may see it."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            address = tuple(connection.laddr)
            if connection.status == psutil.CONN_LISTEN and address[1:2] == (port,) and connection.pid:
                with contextlib.suppress(psutil.Error):
                    return f"{psutil.Process(connection.pid).name()}, PID {connection.pid}"
    return None


def _any_free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
