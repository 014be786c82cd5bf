"""The local runtime as a whole: from a Deployment and a Service to answering processes, a rollout, and a clean end."""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from paceline_api.kube import DEPLOYMENT, ENDPOINT_SLICE, POD, SECRET
from paceline_cli.local.controllers.pods import is_ready
from paceline_cli.local.runtime import LocalRuntime, RuntimeConfig, remove_stale_runs
from paceline_cli.local.service_proxy import ServiceProxy
from paceline_cli.node.host import port_is_free

SERVER = """
import http.server, json, os, signal, sys, threading
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"version": sys.argv[1], "pid": os.getpid(), "kubeconfig": os.environ.get("KUBECONFIG"),
                           "token": open("/run/secrets/token".replace("/run/secrets", sys.argv[2])).read()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *a): pass
server = http.server.ThreadingHTTPServer((os.environ["PACELINE_HOST"], int(os.environ["PACELINE_PORT_HTTP"])), H)
server.daemon_threads = False
signal.signal(signal.SIGTERM, lambda *a: threading.Thread(target=server.shutdown).start())
server.serve_forever()
server.server_close()
"""


def deployment(version: str, **pod_spec: Any) -> dict[str, Any]:
    container = {
        "name": "web",
        "command": [sys.executable, "-c", SERVER, version],
        "args": ["/secrets"],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        "volumeMounts": [{"name": "s", "mountPath": "/secrets", "readOnly": True}],
        # Time for the endpoint to be taken out before the listener closes, as in a cluster.
        "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
    }
    spec = {
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": [{"name": "s", "secret": {"secretName": "internal"}}],
        **pod_spec,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": "ns"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": spec},
        },
    }


SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web", "namespace": "ns"},
    "spec": {"selector": {"app": "web"}, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
}
SECRET_OBJECT = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "internal", "namespace": "ns"},
    "stringData": {"token": "t0k3n"},
}


async def until(condition: Callable[[], object], limit_s: float = 40.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.02)


async def get(port: int) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run(tmp_path: Path, main: Callable[[LocalRuntime], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        async with LocalRuntime(RuntimeConfig(tmp_path / "state", namespace="ns", **options)) as runtime:
            for manifest in (SECRET_OBJECT, SERVICE):
                runtime.store.apply(manifest, field_manager="test")
            await main(runtime)

    asyncio.run(asyncio.wait_for(whole(), 60))


def ready_pods(runtime: LocalRuntime) -> list[dict[str, Any]]:
    return [pod for pod in runtime.store.list(POD, "ns").items if is_ready(pod)]


def test_from_objects_to_answers_through_a_rollout_to_a_clean_end(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    async def main(runtime: LocalRuntime) -> None:
        assert runtime.store.get(SECRET, "ns", "internal")["data"] == {"token": "dDBrM24="}  # type: ignore[index]
        runtime.store.apply(deployment("one"), field_manager="test")
        proxy = ServiceProxy(runtime.store, "ns", "web", "http", host="127.0.0.1", port=0)
        port = await proxy.start()
        await until(lambda: proxy.targets())
        seen.append(await get(port))
        (pod,) = ready_pods(runtime)
        real = pod["spec"]["containers"][0]["ports"][0]["containerPort"]
        assert real != 8000
        assert proxy.targets() == [("127.0.0.1", real)]

        runtime.store.apply(deployment("two"), field_manager="test")
        while seen[-1]["version"] != "two":
            # Every request during the rollout is answered by one of the two.
            seen.append(await get(port))
        await until(lambda: len(runtime.store.list(POD, "ns").items) == 1)
        assert (await get(port))["version"] == "two"

        runtime.store.delete(DEPLOYMENT, "ns", "web")
        await until(lambda: runtime.store.list(POD, "ns").items == [])
        (item,) = runtime.store.list(ENDPOINT_SLICE, "ns").items
        assert item["endpoints"] == []
        assert port_is_free(real)
        await proxy.stop()

    run(tmp_path, main)
    assert seen[0]["token"] == "t0k3n"
    assert seen[0]["kubeconfig"] == str(tmp_path / "state" / "run" / str(os.getpid()) / "pod-kubeconfig")
    assert not any(alive(answer["pid"]) for answer in seen)


def test_leaving_stops_every_process_and_removes_the_run(tmp_path: Path) -> None:
    pids: list[int] = []

    async def main(runtime: LocalRuntime) -> None:
        runtime.store.apply(deployment("one", automountServiceAccountToken=False), field_manager="test")
        await until(lambda: ready_pods(runtime))
        port = ready_pods(runtime)[0]["spec"]["containers"][0]["ports"][0]["containerPort"]
        answer = await get(port)
        assert answer["kubeconfig"] is None, "a pod without API access must not get the API's token"
        pids.append(answer["pid"])

    run(tmp_path, main)
    assert not alive(pids[0])
    assert list((tmp_path / "state" / "run").iterdir()) == []
    assert [p.name for p in (tmp_path / "state" / "logs").rglob("*.log")] == ["web.log"]


def test_a_taken_port_is_named_in_the_status_and_used_once_it_is_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        wanted = other.getsockname()[1]

        async def main(runtime: LocalRuntime) -> None:
            def message() -> str:
                statuses = [p.get("status", {}).get("containerStatuses") for p in runtime.store.list(POD, "ns").items]
                return str(statuses)

            runtime.store.apply(deployment("one"), field_manager="test")
            await until(lambda: f"port {wanted} is taken by another program" in message())
            writes = runtime.store.writes[POD]
            await asyncio.sleep(1.2)  # Longer than a retry.
            assert runtime.store.writes[POD] == writes, "waiting must not write"
            other.close()
            await until(lambda: ready_pods(runtime))
            assert (await get(wanted))["version"] == "one"

        run(tmp_path, main, fixed_port=lambda pod, name: wanted)


def test_remains_of_killed_runs_are_removed(tmp_path: Path) -> None:
    for name in ("11", "22", "notes"):
        (tmp_path / name).mkdir()
    remove_stale_runs(tmp_path, alive=lambda pid: pid == 22)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["22", "notes"]


def test_a_busy_api_port_starts_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = RuntimeConfig(tmp_path / "state", api_port=other.getsockname()[1])

        async def main() -> None:
            await LocalRuntime(config).start()

        with pytest.raises(OSError, match=f"port {config.api_port} is in use"):
            asyncio.run(main())
    assert list((tmp_path / "state").glob("run/*/kubeconfig")) == []
