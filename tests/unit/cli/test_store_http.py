"""The local API server against the official `kubernetes` dynamic client, and against the product's own client."""

import asyncio
import itertools
import json
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client as official
from kubernetes import config as official_config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from paceline_api.kube import CONFIG_MAP, POD, Conflict, Expired, Invalid
from paceline_cli.local.http import ApiServer
from paceline_cli.local.kubeconfig import write_kubeconfig
from paceline_cli.local.store import ObjectStore
from paceline_kube.client import OfficialKubeClient

TOKEN = "secret-token"


class Running:
    """An API server on its own thread's event loop."""

    def __init__(self, path: Path) -> None:
        ids = itertools.count()
        self.store = ObjectStore(
            now=lambda: "2026-01-01T00:00:00Z",
            new_uid=lambda: f"uid-{next(ids)}",
            monotonic=time.monotonic,
            history_max=50,
        )
        self.kubeconfig = path / "kubeconfig"
        self._up, self._down = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._up.wait(10)

    async def _serve(self) -> None:
        server = ApiServer(self.store, TOKEN)
        write_kubeconfig(self.kubeconfig, await server.start(), TOKEN)
        self._up.set()
        await self._down.wait()
        await server.stop()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._down.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._loop.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    server = Running(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def dynamic(running: Running, tmp_path: Path) -> Iterator[DynamicClient]:
    configuration = official.Configuration()
    official_config.load_kube_config(str(running.kubeconfig), client_configuration=configuration)
    with official.ApiClient(configuration) as api:
        yield DynamicClient(api, cache_file=str(tmp_path / "discovery"))


def pod(name: str, node: str = "n", **labels: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": "ns", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"nodeName": node}}


def test_the_kubeconfig_is_private(running: Running) -> None:
    assert stat.S_IMODE(running.kubeconfig.stat().st_mode) == 0o600


def test_discovery_get_list_and_selectors(running: Running, dynamic: DynamicClient) -> None:
    pods = dynamic.resources.get(api_version="v1", kind="Pod")
    services = dynamic.resources.get(api_version="paceline.dev/v1alpha1", kind="InferenceService")
    assert services.namespaced
    for name in "abc":
        running.store.create(pod(name, node=f"n{name}", app="x" if name != "c" else "y"))
    assert pods.get(name="a", namespace="ns").spec.nodeName == "na"
    assert [p.metadata.name for p in pods.get(namespace="ns", label_selector="app=x").items] == ["a", "b"]
    assert [p.metadata.name for p in pods.get(field_selector="spec.nodeName=nc").items] == ["c"]
    with pytest.raises(NotFoundError):
        pods.get(name="nope", namespace="ns")


def test_a_watch_streams_what_it_selects(running: Running, dynamic: DynamicClient) -> None:
    pods = dynamic.resources.get(api_version="v1", kind="Pod")
    version = pods.get(namespace="ns").metadata.resourceVersion
    timer = threading.Timer(0.2, lambda: running.store.create(pod("late", app="x")))
    timer.start()
    events = []
    for event in pods.watch(namespace="ns", resource_version=version, label_selector="app=x", timeout=30):
        events.append((event["type"], event["object"].metadata.name))
        if len(events) == 1:
            running.store.create(pod("other", app="y"))
            running.store.delete(POD, "ns", "late", grace_s=0)
        else:
            break
    timer.join()
    assert events == [("ADDED", "late"), ("DELETED", "late")]


def test_server_side_apply_patch_status_and_delete(running: Running, dynamic: DynamicClient) -> None:
    maps = dynamic.resources.get(api_version="v1", kind="ConfigMap")
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "ns"}, "data": {"a": "1"}}
    options = {"field_manager": "m", "force_conflicts": True}
    first = maps.server_side_apply(body=body, name="c", namespace="ns", **options)
    again = maps.server_side_apply(body=body, name="c", namespace="ns", **options)
    assert again.metadata.resourceVersion == first.metadata.resourceVersion
    pods = dynamic.resources.get(api_version="v1", kind="Pod")
    running.store.create(pod("p"))
    patched = pods.status.patch(
        name="p", namespace="ns", body={"status": {"phase": "Running"}}, content_type="application/merge-patch+json"
    )
    assert patched.status.phase == "Running"
    with pytest.raises(ConflictError):
        maps.create(body=body, namespace="ns")
    maps.delete(name="c", namespace="ns")
    assert running.store.get(CONFIG_MAP, "ns", "c") is None


def test_an_unforced_apply_is_served_unless_it_takes_a_field_of_another(
    running: Running, dynamic: DynamicClient
) -> None:
    maps = dynamic.resources.get(api_version="v1", kind="ConfigMap")

    def apply(manager: str, *, force: bool = False, **data: str) -> dict[str, str]:
        meta = {"name": "c", "namespace": "ns"}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}
        options = {"field_manager": manager, "force_conflicts": force}
        return maps.server_side_apply(body=body, name="c", namespace="ns", **options).data.to_dict()

    assert apply("a", x="1", y="1") == {"x": "1", "y": "1"}
    assert apply("a", x="2") == {"x": "2"}
    assert apply("b", x="2", z="1") == {"x": "2", "z": "1"}
    with pytest.raises(ConflictError) as refused:
        apply("b", x="3", z="1")
    assert 'Apply failed with 1 conflict: conflict with \\"a\\": .data.x' in str(refused.value)
    assert running.store.get(CONFIG_MAP, "ns", "c")["data"] == {"x": "2", "z": "1"}
    assert apply("b", force=True, x="3") == {"x": "3"}


def test_no_token_no_answer(running: Running) -> None:
    url = json.loads(running.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    attempts: list[tuple[str, dict[str, str]]] = [("", {}), ("", {"Authorization": "Bearer wrong"}), ("/via/wrong", {})]
    for prefix, headers in attempts:
        request = urllib.request.Request(f"{url}{prefix}/api/v1/secrets", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        with refused.value:
            assert refused.value.code == 401


def test_a_url_that_carries_the_token_needs_no_header(running: Running, tmp_path: Path) -> None:
    url = json.loads(running.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    write_kubeconfig(tmp_path / "kubectl", f"{url}/via/{TOKEN}")
    running.store.create(pod("a"))
    found = OfficialKubeClient.connect(tmp_path / "kubectl").list(POD, "ns")
    assert [item["metadata"]["name"] for item in found.items] == ["a"]


def test_the_products_own_client(running: Running) -> None:
    client = OfficialKubeClient.connect(running.kubeconfig)
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "ns"}, "data": {"a": "1"}}
    created = client.apply(body, field_manager="m")
    assert client.apply(body, field_manager="m") == created
    assert client.served(POD)
    version = client.list(CONFIG_MAP, None).resource_version
    stale = client.create(body | {"metadata": {"name": "d", "namespace": "ns"}})
    client.replace(stale | {"data": {"b": "2"}})
    with pytest.raises(Conflict):
        client.replace(stale)
    assert client.delete(CONFIG_MAP, "ns", "c", uid=created["metadata"]["uid"])
    assert not client.delete(CONFIG_MAP, "ns", "c")
    events = client.watch(CONFIG_MAP, "ns", resource_version=version, timeout_s=1)
    assert [(e.type, e.object["metadata"]["name"]) for e in events] == [
        ("ADDED", "d"),
        ("MODIFIED", "d"),
        ("DELETED", "c"),
    ]
    for number in range(100):
        client.apply(body | {"data": {"n": str(number)}}, field_manager="m")
    with pytest.raises(Expired):
        next(client.watch(CONFIG_MAP, "ns", resource_version=version, timeout_s=1))
    with pytest.raises(Invalid):
        client.list(CONFIG_MAP, None, field_selector="spec.x=1")


def test_a_busy_port_is_an_os_error(running: Running) -> None:
    async def second() -> None:
        url = running.kubeconfig.read_text().split("127.0.0.1:")[1].split('"')[0]
        await ApiServer(running.store, TOKEN, port=int(url)).start()

    with pytest.raises(OSError, match="in use"):
        asyncio.run(second())
