"""The node server as a process: two engines' clients, signals, kill -9 under load, and a taken address."""

from __future__ import annotations

import json
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import wait_for
from kv_server_process import KVServerProcess, kv_server_process

from paceline_kvstore import ChunkKey
from paceline_kvstore.tiers.remote import RemoteOptions, RemoteTier
from paceline_kvstore.wire import messages as msg
from paceline_kvstore.wire.address import Address
from paceline_kvstore.wire.tls import ClientTls

pytestmark = pytest.mark.e2e


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 256)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KVServerProcess]:
    with kv_server_process(tmp_path) as process:
        yield process


def test_clients_share_chunks_over_both_kinds_of_sockets(server: KVServerProcess) -> None:
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o600
    near, far = server.client(), server.client(tcp=True)
    payload = random.Random(1).randbytes(5 << 20)
    assert near.put(key(1), payload, tenant="a")
    target = bytearray(8 << 20)
    assert far.read_into(key(1), target) == len(payload) and target[: len(payload)] == payload
    assert far.contains([key(1), key(2)]) == 1
    assert server.ask("GET", "/health/ready").status_code == 200
    assert "paceline_kvserver_tier_hits_total 1.0" in server.ask("GET", "/metrics").text
    assert server.ask("POST", "/admin/invalidate", json={"tenant": "a"}).json() == {"removed": 1}
    assert near.get(key(1)) is None and near.stats.errors == far.stats.errors == 0


def test_importing_it_loads_no_engine_and_no_heavy_package() -> None:
    code = (
        "import sys, paceline_kvstore.cli, paceline_kvstore.server.process, paceline_kvstore.tiers.remote;"
        "heavy = {'torch', 'fastapi', 'pydantic', 'cryptography', 'boto3', 'paceline_engine'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sigterm_drains(server: KVServerProcess) -> None:
    tier = server.client()
    assert tier.put(key(1), b"x")
    server.popen.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert not server.socket.exists() and "draining for at most 30 s" in server.log.read_text()
    assert tier.get(key(1)) is None and not tier.put(key(2), b"x")


def stuck_put(server: KVServerProcess) -> socket.socket:
    """A client that began to send a chunk and stopped."""
    sock = Address(path=str(server.socket)).connect(5)
    sock.sendall(msg.encode_request(1, msg.Hello()) + msg.encode_request(2, msg.Put(key(9)), 1 << 20) + b"x" * 500)
    wait_for("it has begun", lambda: "receiving_bytes 0.0" not in server.ask("GET", "/metrics").text)
    return sock


def test_a_second_signal_stops_now(server: KVServerProcess) -> None:
    with stuck_put(server):
        server.popen.send_signal(signal.SIGTERM)
        wait_for("not ready", lambda: server.ask("GET", "/health/ready").status_code == 503)
        server.popen.send_signal(signal.SIGINT)
        assert server.wait_exit() == 1
    assert "SIGINT again: stopping now" in server.log.read_text()


def test_a_drain_ends_at_its_limit(tmp_path: Path) -> None:
    with kv_server_process(tmp_path, "--drain-timeout", "200ms") as server, stuck_put(server):
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 1
    assert "drain limit: ending 1 connections" in server.log.read_text()


def test_the_token_is_asked_for_where_others_could_come(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with kv_server_process(tmp_path, "--token-file", str(token), "--host", "0.0.0.0") as server:
        assert server.client(token="secret", tcp=True).put(key(1), b"x")
        assert not server.client(tcp=True).put(key(2), b"x")
        assert server.client(token="secres").get(key(1)) is None
        assert server.ask("GET", "/admin/stats").status_code == 401
        stats = server.ask("GET", "/admin/stats", headers={"authorization": "Bearer secret"}).json()
        assert stats["tier"]["puts"] == 1


def test_tls_over_tcp_and_an_open_door_only_when_asked_for(tmp_path: Path) -> None:
    cert, private = tmp_path / "tls.crt", tmp_path / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-subj", "/CN=kv", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(private), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    tls = ("--tls-cert", str(cert), "--tls-key", str(private))
    with kv_server_process(tmp_path, "--host", "0.0.0.0", "--insecure", *tls) as server:
        assert server.client(tcp=True, tls=ClientTls(cert)).put(key(1), b"x")
        assert server.client().get(key(1)) == b"x", "a Unix socket needs none"
        assert server.client(tcp=True).get(key(1)) is None


def test_tiers_of_a_file_are_shared_and_outlive_the_process(tmp_path: Path) -> None:
    config = tmp_path / "kv.json"
    disk = {"path": str(tmp_path / "disk"), "capacity": "256Mi"}
    config.write_text(json.dumps({"memory": {"capacity": "64Mi"}, "disk": disk, "tenantQuotas": {"acme": "8Mi"}}))
    payload = random.Random(1).randbytes(3 << 20)
    with kv_server_process(tmp_path, config=config) as server:
        tier = server.client()
        for number in range(4):
            assert tier.put(key(number), payload, tenant="acme")
        assert tier.contains([key(2), key(3)]) == 2 and tier.contains([key(0)]) == 0, "two fit the quota"
        assert tier.put(key(9), payload, durable=True)
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
    with kv_server_process(tmp_path, config=config) as server:
        tier = server.client()
        target = bytearray(8 << 20)
        for number in (2, 3, 9):
            assert tier.read_into(key(number), target) == len(payload) and target[: len(payload)] == payload
        levels = server.ask("GET", "/admin/stats").json()["levels"]
        assert [(level["name"], level["hits"]) for level in levels] == [("memory", 0), ("disk", 3)]
        assert 'paceline_kvstore_hits_total{tier="disk"} 3.0' in server.ask("GET", "/metrics").text
        assert server.ask("POST", "/admin/invalidate", json={"tenant": "acme"}).json() == {"removed": 2}
        assert tier.contains([key(9)]) == 1 and tier.contains([key(2)]) == 0


PAYLOADS = [random.Random(number).randbytes(100_000 + number) for number in range(30)]


def test_kill_9_and_restart_under_load_serves_nothing_wrong_and_raises_nothing(tmp_path: Path) -> None:
    stop, failures = threading.Event(), []
    tier = RemoteTier(Address(path=str(tmp_path / "kv.sock")), RemoteOptions(backoff=0.01, backoff_max=0.1))
    hits = [0]

    def load(seed: int) -> None:
        dice = random.Random(seed)
        try:
            while not stop.is_set():
                number = dice.randrange(30)
                if dice.random() < 0.5:
                    durable = dice.random() < 0.2
                    kept = tier.put(key(number), PAYLOADS[number], durable=durable)
                    assert not (kept and durable), "memory must not promise to survive"
                else:
                    payload = tier.get(key(number))
                    assert payload is None or payload == PAYLOADS[number]
                    hits[0] += payload is not None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        with kv_server_process(tmp_path) as server:
            before = hits[0]
            wait_for("hits", lambda before=before: failures or hits[0] > before + 5)
            server.popen.kill()
            server.wait_exit()
        errors = tier.stats.errors
        wait_for("misses", lambda errors=errors: failures or tier.stats.errors > errors)
    stop.set()
    for thread in threads:
        thread.join()
    tier.close()
    assert failures == [] and tier.stats.corrupt == 0


def test_a_taken_address_is_named_and_a_dead_socket_is_replaced(server: KVServerProcess, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline_kvstore.cli", "serve", "--admin-port", "0"]
    for arguments, complaint in (
        (["--socket", str(server.socket)], f"another server listens on --socket {server.socket}"),
        (["--port", str(server.ports[0])], f"port {server.ports[0]} on 127.0.0.1 is already in use"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and complaint in done.stderr
    assert server.client().put(key(1), b"x"), "the first one goes on"
    server.popen.kill()
    server.wait_exit()
    assert server.socket.exists()
    with kv_server_process(tmp_path) as second:
        assert second.client().put(key(1), b"x")
