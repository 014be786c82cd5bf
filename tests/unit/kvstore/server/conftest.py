"""A node server on a Unix socket in this process, and raw clients that may say anything."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from paceline_kvstore import ChunkKey, codec
from paceline_kvstore.config import StoreSettings
from paceline_kvstore.opening import open_store
from paceline_kvstore.server.limits import Limits
from paceline_kvstore.server.node_server import NodeServer
from paceline_kvstore.server.store import NodeStore
from paceline_kvstore.tiers import MemoryTier
from paceline_kvstore.tiers.remote import RemoteOptions, RemoteTier
from paceline_kvstore.wire import messages as msg
from paceline_kvstore.wire import transport
from paceline_kvstore.wire.address import Address

DEADLINE = 60.0
"""Longer than anything here takes on a busy machine; a test that waits as long has failed."""


class Raw:
    """A client that sends what it is told, right or wrong."""

    def __init__(self, address: Address) -> None:
        self.sock = address.connect(DEADLINE)
        self.stream = transport.PlainStream(self.sock)
        self.inbox = transport.Inbox(self.stream)

    def send(self, *parts: bytes) -> None:
        self.stream.send(parts, time.monotonic() + DEADLINE)

    def hello(self, token: str = "") -> msg.Reply:
        self.send(msg.encode_request(1, msg.Hello(token)))
        return self.reply()[0]

    def reply(self) -> tuple[msg.Reply, bytes, int]:
        """The next reply, its payload and its request's id."""
        end = time.monotonic() + DEADLINE
        head = self.inbox.head(10**7, 10**9, end)
        reply = msg.decode_reply(head.kind, self.inbox.read(head.field_bytes, end))
        return reply, self.inbox.read(head.payload_bytes, end), head.request_id

    def ended(self) -> bool:
        """True when the server has closed the connection, after whatever it still said."""
        try:
            while True:
                self.reply()
        except ConnectionError:
            return True

    def close(self) -> None:
        self.sock.close()


class Node:
    """A server with clients for one test."""

    def __init__(self, folder: Path, *, capacity: int, ttl: float | None, token: str | None, **limits: Any) -> None:
        self.address = Address(path=str(folder / "kv.sock"))
        tiered = open_store(StoreSettings(memory=capacity, ttl=ttl))
        memory = tiered.levels[0].tier
        assert isinstance(memory, MemoryTier)
        self.tier = memory
        self.store = NodeStore(tiered, pin_seconds_max=60)
        self.registry = CollectorRegistry()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address.path)
        listener.listen(64)
        self.server = NodeServer(self.store, [listener], self.registry, token=token, limits=Limits(**limits))
        self.server.start()
        self._open: list[Any] = []

    def client(self, **options: Any) -> RemoteTier:
        self._open.append(RemoteTier(self.address, RemoteOptions(**options)))
        return self._open[-1]

    def raw(self) -> Raw:
        self._open.append(Raw(self.address))
        return self._open[-1]

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def close(self) -> None:
        for client in self._open:
            client.close()
        self.server.close()


def wait_for(what: str, condition: Callable[[], Any]) -> None:
    """Poll until the condition is true."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE} s: {what}"
        time.sleep(0.005)


def on_the_wire(key: ChunkKey, payload: bytes) -> bytes:
    """A chunk as it travels: header last."""
    chunk = bytes(codec.encode(key, payload))
    return chunk[codec.HEADER_BYTES :] + chunk[: codec.HEADER_BYTES]


def make_key(number: int, namespace: bytes = b"n" * 32) -> ChunkKey:
    return ChunkKey(namespace, number.to_bytes(32, "big"), 16)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Starts one server; limits of `Limits` by name."""
    nodes: list[Node] = []

    def begin(*, capacity: int = 1 << 20, ttl: float | None = None, token: str | None = None, **limits: Any) -> Node:
        limits = {"chunk_bytes": 1 << 18, "inflight_bytes": 1 << 20} | limits
        nodes.append(Node(tmp_path, capacity=capacity, ttl=ttl, token=token, **limits))
        return nodes[-1]

    yield begin
    for node in nodes:
        node.close()


@pytest.fixture
def node(start: Callable[..., Node]) -> Node:
    """A server with room for 256 pages."""
    return start()


@pytest.fixture
def key() -> Callable[..., ChunkKey]:
    return make_key


@pytest.fixture
def wait() -> Callable[[str, Callable[[], Any]], None]:
    return wait_for


@pytest.fixture
def wire() -> Callable[[ChunkKey, bytes], bytes]:
    return on_the_wire
