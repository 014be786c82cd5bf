"""The HTTP side of the node server: health, metrics against the catalogue, and what an administrator may do."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline_api.metrics import KV_SERVER, KV_STORE
from paceline_kvstore import ChunkKey
from paceline_kvstore.server import admin as admin_module
from paceline_kvstore.server.admin import AdminServer
from paceline_kvstore.server.store import Removed

# A breaker guards a tier that is elsewhere; this server has memory.
CATALOGUE = [*KV_SERVER, *(metric for metric in KV_STORE if metric.name != "paceline_kvstore_breaker_open")]
Key = Callable[..., ChunkKey]
Ask = Callable[..., tuple[int, Any]]
TOKEN = {"authorization": "Bearer secret"}


class Port:
    """The admin port of one server."""

    def __init__(self, node: Any, token: str | None) -> None:
        self.node = node
        sock = socket.create_server(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        self._server = AdminServer(sock, node.server, node.registry, token)
        self._server.start()

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] = TOKEN) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.headers["content-type"] == "application/json"
            return response.status, json.loads(text) if is_json else text
        finally:
            connection.close()

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def port(start: Callable[..., Any]) -> Iterator[Port]:
    made = Port(start(token="secret"), "secret")
    yield made
    made.close()


def hexed(*keys: ChunkKey) -> list[str]:
    return [key.to_bytes().hex() for key in keys]


def test_health_is_open_and_says_when_it_drains(port: Port) -> None:
    assert port.ask("GET", "/health/live", headers={}) == port.ask("GET", "/health/ready", headers={}) == (200, "ok\n")
    port.node.server.drain(1)
    assert port.ask("GET", "/health/ready", headers={}) == (503, "draining\n")
    assert port.ask("GET", "/health/live", headers={})[0] == 200


def test_every_metric_of_the_catalogue_is_exposed_and_no_other(port: Port, key: Key, wait: Any) -> None:
    tier = port.node.client(token="secret")
    tier.put(key(1), b"x" * 100), tier.get(key(1)), tier.get(key(2)), tier.pin("me", [key(1)], 30)
    requests = "paceline_kvserver_requests_total"
    wait("the last is counted", lambda: port.node.metric(requests, operation="get", outcome="miss"))
    wait("the last is counted", lambda: port.node.metric(requests, operation="pin", outcome="ok"))
    status, text = port.ask("GET", "/metrics", headers={})
    families = {f.name: f for f in text_string_to_metric_families(text) if not f.name.endswith("_created")}
    assert status == 200 and set(families) == {metric.name for metric in CATALOGUE}
    for metric in CATALOGUE:
        assert families[metric.name].type == metric.type.value
        for sample in families[metric.name].samples:
            if sample.name.endswith("_created"):
                continue
            assert set(sample.labels) - {"le"} == set(metric.labels)
    value = {
        (sample.name, *sorted(sample.labels.values())): sample.value for f in families.values() for sample in f.samples
    }
    assert value["paceline_kvserver_requests_total", "get", "miss"] == 1
    assert value["paceline_kvserver_requests_total", "get", "ok"] == 1
    assert value["paceline_kvserver_payload_bytes_total", "sent"] == 100
    assert value["paceline_kvserver_payload_bytes_total", "received"] == 100
    assert value["paceline_kvserver_tier_bytes",] == 4096 and value["paceline_kvserver_pinned_bytes",] == 100
    assert value["paceline_kvserver_connections",] == 2


@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer wrong"}, {"authorization": "secretx"}])
def test_admin_wants_the_token(port: Port, key: Key, given: dict[str, str]) -> None:
    port.node.tier.put(key(1), b"x")
    for method, path, body in (
        ("GET", "/admin/stats", None),
        ("POST", "/admin/invalidate", {"tenant": ""}),
        ("POST", "/admin/lookup", {"keys": hexed(key(1))}),
        ("POST", "/admin/pin", {"keys": hexed(key(1)), "seconds": 5}),
    ):
        status, answer = port.ask(method, path, body, given)
        assert status == 401 and answer["error"]["field"] == "authorization" and "secret" not in str(answer)
    assert key(1) in port.node.tier


def test_lookup_pin_and_unpin(port: Port, key: Key) -> None:
    port.node.tier.put(key(1), b"x"), port.node.tier.put(key(3), b"x")
    three = {"keys": hexed(key(1), key(2), key(3))}
    assert port.ask("POST", "/admin/pin", three | {"seconds": 30}) == (200, {"pinned": 1})
    status, answer = port.ask("POST", "/admin/lookup", three)
    assert status == 200 and answer["leading"] == 1
    found = [(each["tiers"], each["pinned"]) for each in answer["keys"]]
    assert found == [(["memory"], True), ([], True), (["memory"], True)], "what comes later is held, too"
    stats = port.ask("GET", "/admin/stats")[1]
    assert stats["pinned"] == {"count": 3, "num_bytes": 2}
    assert [(level["name"], level["writes"]) for level in stats["levels"]] == [("memory", 0)]
    assert port.ask("POST", "/admin/unpin", {"holder": "nightly"}) == (200, {"unpinned": False})
    assert port.ask("POST", "/admin/unpin", {}) == (200, {"unpinned": True})
    assert port.ask("POST", "/admin/pin", three | {"seconds": 30, "holder": "nightly"})[1] == {"pinned": 1}
    assert port.ask("POST", "/admin/unpin", {"holder": "nightly"}) == (200, {"unpinned": True})


def test_invalidate_by_chain_namespace_and_tenant(port: Port, key: Key) -> None:
    tier = port.node.store.tier
    tier.put(key(1), b"x", tenant="a")
    tier.put(key(2), b"x", parent=key(1), tenant="a")
    for number, (namespace, tenant) in enumerate([(b"m", "a"), (b"m", "b"), (b"o", "b")]):
        tier.put(key(number, namespace * 32), b"x", tenant=tenant)
    chain = key(1).chain.hex()
    assert port.ask("POST", "/admin/invalidate", {"chain": chain}) == (200, {"removed": 3}), "another namespace's too"
    both = {"namespace": (b"m" * 32).hex(), "tenant": "a"}
    assert port.ask("POST", "/admin/invalidate", both) == (200, {"removed": 1})
    assert port.ask("POST", "/admin/invalidate", {"tenant": "b"}) == (200, {"removed": 1})
    assert port.ask("GET", "/admin/stats")[1]["bytes_used"] == 0


KEY = "00" * 64 + "10000000" + "00000000"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("lookup", b"", "body"),
        ("lookup", b"{", "body"),
        ("lookup", b"[" * 100_000, "body"),
        ("lookup", [], "body"),
        ("lookup", {}, "keys"),
        ("lookup", {"keys": []}, "keys"),
        ("lookup", {"keys": KEY}, "keys"),
        ("lookup", {"keys": [KEY] * 4097}, "keys"),
        ("lookup", {"keys": [KEY, 5]}, "keys[1]"),
        ("lookup", {"keys": [KEY, KEY[:-1]]}, "keys[1]"),
        ("lookup", {"keys": [KEY.replace("1", "G")]}, "keys[0]"),
        ("lookup", {"keys": ["00" * 72]}, "keys[0]"),
        ("lookup", {"keys": [KEY], "key": 1}, "key"),
        ("pin", {"keys": [KEY]}, "seconds"),
        ("pin", {"keys": [KEY], "seconds": 1, "holder": ""}, "holder"),
        ("unpin", {"holder": "x" * 129}, "holder"),
        ("unpin", {"keys": [KEY]}, "keys"),
        ("pin", {"keys": [KEY], "seconds": 0}, "seconds"),
        ("pin", {"keys": [KEY], "seconds": 61}, "seconds"),
        ("pin", {"keys": [KEY], "seconds": True}, "seconds"),
        ("pin", b'{"keys": ["%s"], "seconds": NaN}' % KEY.encode(), "seconds"),
        ("invalidate", {}, "chain"),
        ("invalidate", {"chain": "0123456"}, "chain"),
        ("invalidate", {"chain": "0" * 65}, "chain"),
        ("invalidate", {"chain": "x" * 10}, "chain"),
        ("invalidate", {"chain": "0" * 10, "tenant": "a"}, "chain"),
        ("invalidate", {"namespace": "00"}, "namespace"),
        ("invalidate", {"tenant": None}, "tenant"),
        ("invalidate", {"tenant": "t" * 257}, "tenant"),
        ("invalidate", {"everything": True}, "everything"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(port: Port, key: Key, path: str, body: Any, field: str) -> None:
    port.node.tier.put(key(1), b"x")
    status, answer = port.ask("POST", f"/admin/{path}", body)
    assert status == 400 and answer["error"]["field"] == field and answer["error"]["message"].startswith(f"{field}:")
    assert key(1) in port.node.tier


def test_other_paths_methods_and_large_bodies(port: Port) -> None:
    assert port.ask("GET", "/nothing")[0] == 404
    assert port.ask("GET", "/admin/pin")[0] == port.ask("POST", "/metrics")[0] == 405
    assert port.ask("PUT", "/admin/pin")[0] == 501
    assert port.ask("POST", "/admin/lookup", b"x" * ((1 << 20) + 1))[0] == 413
    assert port.ask("POST", "/admin/lookup", None, TOKEN | {"content-length": "-5"})[0] == 400


def test_slow_clients_are_bounded_and_do_not_keep_others_out_for_long(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_module, "CLIENT_SECONDS", 0.2)
    port = Port(start(), None)
    slow = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(admin_module.CLIENTS_MAX)]
    try:
        for sock in slow:
            sock.sendall(b"GET /health/live HTTP/1.1\r\nx: ")
        for sock in slow:
            sock.settimeout(20)
            assert sock.recv(100) in (b"",)
        monkeypatch.undo()  # The next one may take its time.
        assert port.ask("GET", "/health/live")[0] == 200
    finally:
        for sock in slow:
            sock.close()
        port.close()


def test_a_purge_may_take_longer_than_a_client_may_take_to_ask(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def clear(**_which: Any) -> Removed:
        begun.set()
        assert go_on.wait(60)
        return Removed(7)

    monkeypatch.setattr(port.node.store, "clear", clear)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(port.ask, "POST", "/admin/invalidate", {"tenant": "a"})
        assert begun.wait(60)
        later = time.monotonic() + 2 * admin_module.CLIENT_SECONDS
        with monkeypatch.context() as clock:
            clock.setattr(admin_module.time, "monotonic", lambda: later)
            port._server._http.service_actions()
        go_on.set()
        assert answer.result(60) == (200, {"removed": 7})


def test_a_purge_that_a_tier_did_not_hear_of_is_no_success(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port.node.store, "clear", lambda **_which: Removed(3, ("s3",)))
    status, answer = port.ask("POST", "/admin/invalidate", {"tenant": "a"})
    assert status == 503 and answer["removed"] == 3 and "tier s3 failed" in answer["error"]["message"]
