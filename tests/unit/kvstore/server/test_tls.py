"""TLS between engines and a node server: who is believed, that bytes come through, and that nobody hangs."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from paceline_kvstore import ChunkKey
from paceline_kvstore.config import BadSettings, StoreSettings, parse_settings
from paceline_kvstore.opening import open_store
from paceline_kvstore.server.admin import AdminServer
from paceline_kvstore.server.limits import Limits
from paceline_kvstore.server.node_server import NodeServer
from paceline_kvstore.server.store import NodeStore
from paceline_kvstore.tiers.remote import RemoteOptions, RemoteTier
from paceline_kvstore.wire.address import Address
from paceline_kvstore.wire.tls import ClientTls, ServerTls

Key = Callable[..., ChunkKey]


def certificate(folder: Path, name: str) -> ServerTls:
    """For 127.0.0.1, its own authority."""
    tls = ServerTls(folder / f"{name}.crt", folder / f"{name}.key")
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(tls.key_file),
        "-out", str(tls.cert_file),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return tls


class Node:
    def __init__(self, tls: ServerTls, hello_timeout_s: float = 60.0) -> None:
        self.tls = tls
        self.registry = CollectorRegistry()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        store = NodeStore(open_store(StoreSettings(memory=16 << 20)))
        limits = Limits(chunk_bytes=4 << 20, inflight_bytes=8 << 20, hello_timeout_s=hello_timeout_s)
        self.server = NodeServer(store, [listener], self.registry, token="secret", limits=limits, tls=tls)
        self.server.start()
        self._open: list[RemoteTier] = []

    def client(self, ca_file: Path | None = None, host: str = "127.0.0.1") -> RemoteTier:
        tls = None if ca_file is None else ClientTls(ca_file)
        options = RemoteOptions(token="secret", tls=tls, read_deadline=60.0, write_deadline=60.0, backoff=1e-6)
        self._open.append(RemoteTier(Address(host=host, port=self.port), options))
        return self._open[-1]

    def close(self) -> None:
        for tier in self._open:
            tier.close()
        self.server.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(certificate(tmp_path, "server"))
    yield made
    made.close()


def test_chunks_come_through(node: Node, key: Key) -> None:
    tier = node.client(node.tls.cert_file)
    payloads = [bytes([number]) * (1_000_000 + number) for number in range(5)]
    for number, payload in enumerate(payloads):
        assert tier.put(key(number), payload)
        assert tier.get(key(number)) == payload
    buffers = [bytearray(1 << 20) for _ in payloads]
    assert tier.read_many([(key(number), buffer) for number, buffer in enumerate(buffers)]) == 5
    for payload, buffer in zip(payloads, buffers, strict=True):
        assert buffer[: len(payload)] == payload
    assert tier.contains([key(number) for number in range(6)]) == 5
    assert (tier.stats.errors, tier.stats.corrupt) == (0, 0)


def test_a_server_that_is_not_believed_gets_no_token_and_no_bytes(node: Node, key: Key, tmp_path: Path) -> None:
    stranger = certificate(tmp_path, "stranger")
    for tier in (node.client(stranger.cert_file), node.client(node.tls.cert_file, host="localhost"), node.client()):
        assert not tier.put(key(1), b"x") and tier.get(key(1)) is None
        assert tier.stats.errors == 2
    assert node.client(node.tls.cert_file).put(key(1), b"x"), "others go on"


def test_a_renewed_certificate_is_used_without_a_restart(node: Node, key: Key, tmp_path: Path) -> None:
    old = tmp_path / "old.crt"
    shutil.copy(node.tls.cert_file, old)
    before = node.client(old)
    assert before.put(key(1), b"x")
    certificate(tmp_path, "server")
    assert node.client(node.tls.cert_file).get(key(1)) == b"x"
    assert node.client(old).get(key(1)) is None
    assert before.put(key(2), b"y"), "a connection that there is goes on"


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_who_does_not_shake_hands_is_cut_off(tmp_path: Path, said: bytes) -> None:
    with (
        closing(Node(certificate(tmp_path, "server"), hello_timeout_s=0.2)) as node,
        socket.create_connection(("127.0.0.1", node.port), timeout=60) as sock,
    ):
        sock.sendall(said)
        with suppress(ConnectionResetError):
            while sock.recv(1000):
                pass


def test_a_drain_ends_idle_clients(node: Node, key: Key) -> None:
    tier = node.client(node.tls.cert_file)
    assert tier.put(key(1), b"x")
    assert node.server.drain(10)
    assert tier.get(key(1)) is None


def test_the_admin_port_speaks_tls_too(node: Node) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    admin = AdminServer(listener, node.server, node.registry, "secret", node.tls)
    admin.start()
    try:
        context = ssl.create_default_context(cafile=node.tls.cert_file)
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
        connection.request("GET", "/admin/stats", headers={"authorization": "Bearer secret"})
        response = connection.getresponse()
        assert response.status == 200 and json.loads(response.read())["capacity"] == 16 << 20
        connection.close()
        with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
            plain.sendall(b"GET /admin/stats HTTP/1.1\r\nauthorization: Bearer secret\r\n\r\n")
            assert not plain.recv(1000).startswith(b"HTTP")
    finally:
        admin.close()


def test_settings_name_the_authority(node: Node, key: Key, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    address = {"address": f"tcp://127.0.0.1:{node.port}", "tokenFile": str(token)}
    store = open_store(parse_settings({"node": address | {"caFile": str(node.tls.cert_file)}}))
    assert store.offer(key(1), b"x" * 100) and store.levels[0].writes.wait_idle(time.monotonic() + 20)
    assert node.client(node.tls.cert_file).get(key(1)) == b"x" * 100
    store.close()
    with pytest.raises(BadSettings, match=r"node\.caFile: can't use .*token"):
        open_store(parse_settings({"node": address | {"caFile": str(token)}}))
    with pytest.raises(BadSettings, match=r"node\.caFile: TLS is for tcp"):
        parse_settings({"node": {"address": "unix:///run/kv.sock", "caFile": "/ca.crt"}})
