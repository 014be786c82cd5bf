"""A bad line between clients and the node server: bits turn, connections break and stall. What arrives is right."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline_kvstore import ChunkKey
from paceline_kvstore.tiers.remote import RemoteOptions, RemoteTier
from paceline_kvstore.wire.address import Address

Key = Callable[..., ChunkKey]
CLIENTS, CALLS, KEYS = 4, 60, 16
QUICK = RemoteOptions(read_deadline=0.3, write_deadline=0.3, backoff=0.001, backoff_max=0.01)


class Line:
    """Carries bytes both ways between clients and a server, as badly as it is told: `share` of all pieces suffer."""

    def __init__(self, path: Path, server: Address) -> None:
        self.address = Address(path=str(path))
        self.share = 0.0
        self.faults = dict.fromkeys(("flip", "cut", "stall"), 0)
        self._server = server
        self._dice = random.Random(6)
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address.path)
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in (self._listener, *self._open):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = self._server.connect(5.0)
            except OSError:
                return
            server.settimeout(None)
            self._open += [client, server]
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := bytearray(source.recv(4096)):
                fault = self._dice.choice(list(self.faults)) if self._dice.random() < self.share else ""
                if fault:
                    self.faults[fault] += 1
                if fault == "cut":
                    break
                if fault == "stall":
                    continue
                if fault == "flip":
                    data[self._dice.randrange(len(data))] ^= 1 << self._dice.randrange(8)
                target.sendall(data)
        except OSError:
            pass
        for sock in (source, target):
            sock.close()


@pytest.fixture
def node(start: Callable[..., Any]) -> Any:
    return start(frame_timeout_s=0.3, idle_timeout_s=2.0)


@pytest.fixture
def line(node: Any, tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path / "line.sock", node.address)
    yield line
    line.close()


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(3000 + 900 * number)


def test_nothing_wrong_comes_over_a_bad_line_and_clients_recover(node: Any, line: Line, key: Key, wait: Any) -> None:
    def use(seed: int) -> int:
        dice, hits = random.Random(seed), 0
        tier = RemoteTier(line.address, QUICK)
        for _ in range(CALLS):
            number = dice.randrange(KEYS)
            match dice.randrange(5):
                case 0 | 1:
                    tier.put(key(number), payload_of(number), parent=key(number + 1))
                case 2:
                    count = tier.contains([key(number), key(number + 1)])
                    assert 0 <= count <= 2
                case _:
                    payload = tier.get(key(number))
                    assert payload is None or payload == payload_of(number)
                    hits += payload is not None
        tier.close()
        return hits

    line.share = 0.03
    with ThreadPoolExecutor(CLIENTS) as pool:
        hits = sum(pool.map(use, range(CLIENTS)))
    assert hits > 0
    assert all(line.faults.values()), line.faults
    line.share = 0.0
    tier = RemoteTier(line.address)
    for number in range(KEYS):
        wait("it is kept", lambda number=number: tier.put(key(number), payload_of(number)))
        assert tier.get(key(number)) == payload_of(number)
    tier.close()
    wait("all connections have ended", lambda: node.server.num_connections == 0)
    assert node.tier.num_leased == 0
    node.tier.check_integrity()
