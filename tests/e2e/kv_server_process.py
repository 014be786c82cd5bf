"""`paceline-kvstore serve` for tests: start, wait, stop."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
from engine_process import DEADLINE, HTTP, wait_for

from paceline_kvstore.tiers.remote import RemoteOptions, RemoteTier
from paceline_kvstore.wire.address import Address


class KVServerProcess:
    """A node server on a Unix socket and ports of its own choice."""

    def __init__(self, directory: Path, *arguments: str, config: Path | None = None) -> None:
        self.log = directory / "kv.log"
        self.socket = directory / "kv.sock"
        command = [sys.executable, "-m", "paceline_kvstore.cli", "serve", "--socket", str(self.socket), "--port", "0"]
        command += ["--admin-port", "0", "--max-chunk", "8Mi", *arguments]
        command += ["--memory", "64Mi"] if config is None else ["--config", str(config)]
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(command, stderr=log)
        self.ports = wait_for("listening", self._ports)
        self._open: list[RemoteTier] = []

    def _ports(self) -> tuple[int, int] | None:
        text = self.log.read_text()
        assert self.popen.poll() is None, text
        found = dict(re.findall(r"(clients|admin): listens on \S+ port (\d+)", text))
        return (int(found["clients"]), int(found["admin"])) if len(found) == 2 else None

    def client(self, *, tcp: bool = False, **options: object) -> RemoteTier:
        address = Address(host="127.0.0.1", port=self.ports[0]) if tcp else Address(path=str(self.socket))
        self._open.append(RemoteTier(address, RemoteOptions(**options)))  # type: ignore[arg-type]
        return self._open[-1]

    def ask(self, method: str, path: str, **more: object) -> httpx.Response:
        return HTTP.request(method, f"http://127.0.0.1:{self.ports[1]}{path}", **more)  # type: ignore[arg-type]

    def wait_exit(self) -> int:
        return self.popen.wait(DEADLINE)

    def close(self) -> None:
        """Stop at once, whatever state a test left."""
        for tier in self._open:
            tier.close()
        self.popen.kill()
        self.popen.wait()


@contextmanager
def kv_server_process(directory: Path, *arguments: str, config: Path | None = None) -> Iterator[KVServerProcess]:
    with closing(KVServerProcess(directory, *arguments, config=config)) as process:
        yield process
