"""The node agent's side of the Kubernetes API: registration, heartbeat, Pods, contents of volumes, status.

A kubelet's calls and no more, made with a kubelet's identity, so that the API server's Node authorizer would refuse
what a kubelet may not read. Writes only what changed: a quiet node renews its Lease and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kubernetes import client, dynamic
from kubernetes.client.exceptions import ApiException

from paceline_cli.node.base import Pod, PodKey, PodRefused

log = logging.getLogger("paceline.kube.node")

LEASE_NAMESPACE = "kube-node-lease"
LEASE_SECONDS, LEASE_PERIOD_S = 40, 10.0
NODE_STATUS_PERIOD_S = 120.0
WATCH_SECONDS = 300
RETRY_S = 0.5
NEVER_ACCEPTED = (400, 405, 422)
MAX_QUEUED_WRITES = 10_000
# The Node authorizer learns of a Pod's Secrets a moment after the Pod is bound.
FORBIDDEN_RETRIES = 10
CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "256Gi"}


class NodeApi:
    """Calls of one node. Blocking; `content` methods run them in threads."""

    def __init__(self, api: client.ApiClient, name: str, address: str, discovery_cache: Path) -> None:
        # The dynamic client's calls and plain dicts are the same in every release of the library. Its cache is named
        # by the server's address, which every test cluster shares, unless a file is given.
        self._api = dynamic.DynamicClient(api, cache_file=str(discovery_cache))
        self._pods = self._api.resources.get(api_version="v1", kind="Pod")
        self.name = name
        self._address = address

    def register(self, *, schedulable: bool) -> None:
        """Create the Node unless it is there, report it ready and take its Lease."""
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "amd64"),
        }
        body = {"metadata": {"name": self.name, "labels": labels}, "spec": {"unschedulable": not schedulable}}
        try:
            self._call("POST", "/api/v1/nodes", body)
        except ApiException as error:
            if error.status != 409:
                raise
        self.report_ready()
        self.renew_lease()

    def report_ready(self) -> None:
        """Write the Node's status with a fresh heartbeat."""
        now = _now()
        conditions = [
            {"type": "Ready", "status": "True", "reason": "AgentReady", "message": "the node agent runs"},
            {"type": "MemoryPressure", "status": "False", "reason": "NotMeasured", "message": ""},
            {"type": "DiskPressure", "status": "False", "reason": "NotMeasured", "message": ""},
            {"type": "PIDPressure", "status": "False", "reason": "NotMeasured", "message": ""},
        ]
        status = {
            "capacity": CAPACITY,
            "allocatable": CAPACITY,
            "conditions": [condition | {"lastHeartbeatTime": now} for condition in conditions],
            "addresses": [
                {"type": "InternalIP", "address": self._address},
                {"type": "Hostname", "address": self.name},
            ],
            "nodeInfo": _node_info(),
        }
        self._patch(f"/api/v1/nodes/{self.name}/status", {"status": status})

    def renew_lease(self) -> None:
        """Create or renew the Lease by which the node controller knows that the node lives."""
        spec = {
            "holderIdentity": self.name,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        path = f"/apis/coordination.k8s.io/v1/namespaces/{LEASE_NAMESPACE}/leases"
        try:
            self._patch(f"{path}/{self.name}", {"spec": spec})
        except ApiException as error:
            if error.status != 404:
                raise
            self._call("POST", path, {"metadata": {"name": self.name}, "spec": spec})

    def keep_alive(self) -> None:
        """Heartbeat for ever; a failed one is logged and tried again."""
        status_due = time.monotonic() + NODE_STATUS_PERIOD_S
        while True:
            time.sleep(LEASE_PERIOD_S)
            try:
                self.renew_lease()
                if time.monotonic() > status_due:
                    self.report_ready()
                    status_due = time.monotonic() + NODE_STATUS_PERIOD_S
            except Exception as error:
                log.warning("heartbeat failed: %s", _reason(error))

    def watch_pods(self, listed: Callable[[list[dict]], None], changed: Callable[[str, dict], None]) -> None:
        """List the node's Pods to `listed`, then pass on (ADDED | MODIFIED | DELETED, Pod); for ever."""
        selector = f"spec.nodeName={self.name}"
        while True:
            try:
                found = self._call("GET", "/api/v1/pods", field_selector=selector)
                listed(found["items"])
                self._follow(selector, found["metadata"]["resourceVersion"], changed)
            except Exception as error:
                log.warning("watch of Pods ended: %s", _reason(error))
                time.sleep(RETRY_S)

    def _follow(self, selector: str, version: str, changed: Callable[[str, dict], None]) -> None:
        while True:
            for event in self._pods.watch(field_selector=selector, resource_version=version, timeout=WATCH_SECONDS):
                if event["type"] not in ("ADDED", "MODIFIED", "DELETED"):
                    return
                changed(event["type"], event["raw_object"])
                version = event["raw_object"]["metadata"]["resourceVersion"]

    def write_status(self, pod: PodKey, uid: str, status: Mapping[str, Any]) -> None:
        """Patch a Pod's status unless the Pod is gone or another one has its name."""
        namespace, name = pod
        body = {"metadata": {"uid": uid}, "status": dict(status)}
        for key in ("podIPs", "hostIPs"):
            # Merged by default: an address of an earlier sandbox would stay beside the new one.
            if key in status:
                body["status"][key] = [{"$patch": "replace"}, *status[key]]
        self._patch(f"/api/v1/namespaces/{namespace}/pods/{name}/status", body)

    def delete_pod(self, key: PodKey, uid: str) -> None:
        """Remove the object of a Pod whose processes are gone."""
        namespace, name = key
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        self._call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", options)

    def read_data(self, kind: str, namespace: str, name: str) -> Mapping[str, bytes] | None:
        """Decoded data of an object of `kind` secrets or configmaps; None if there is none of that name."""
        path = f"/api/v1/namespaces/{namespace}/{kind}/{name}"
        try:
            found = _allowed_soon(lambda: self._call("GET", path))
        except ApiException as error:
            if error.status == 404:
                return None
            raise OSError(f"cannot read {kind} {namespace}/{name}: {_reason(error)}") from error
        if kind == "secrets":
            return _decoded(found.get("data"))
        texts = {key: value.encode() for key, value in (found.get("data") or {}).items()}
        return texts | _decoded(found.get("binaryData"))

    def token(self, pod: Pod, audience: str, expiration: int) -> bytes:
        """A ServiceAccount token bound to `pod`, from the TokenRequest API."""
        bound = {"kind": "Pod", "apiVersion": "v1", "name": pod.name, "uid": pod.uid}
        spec = {"audiences": [audience] if audience else [], "expirationSeconds": expiration, "boundObjectRef": bound}
        account = pod.service_account or "default"
        path = f"/api/v1/namespaces/{pod.namespace}/serviceaccounts/{account}/token"
        try:
            answer = _allowed_soon(lambda: self._call("POST", path, {"spec": spec}))
        except ApiException as error:
            if error.status == 404:
                raise PodRefused("spec.serviceAccountName", f"there is no ServiceAccount {account}") from error
            raise OSError(f"no token for {pod.namespace}/{account}: {_reason(error)}") from error
        return answer["status"]["token"].encode()

    def _patch(self, path: str, body: dict) -> None:
        self._call("PATCH", path, body, content_type="application/strategic-merge-patch+json")

    def _call(self, method: str, path: str, body: dict | None = None, **parameters: Any) -> dict:
        answer = self._api.request(method, path, body, serialize=False, _request_timeout=10, **parameters)
        return json.loads(answer.data)


class ApiContent:
    """`ContentSource` of the process node, from the API server."""

    def __init__(self, api: NodeApi) -> None:
        self._api = api

    async def secret(self, namespace: str, name: str) -> Mapping[str, bytes] | None:
        return await asyncio.to_thread(self._api.read_data, "secrets", namespace, name)

    async def config_map(self, namespace: str, name: str) -> Mapping[str, bytes] | None:
        return await asyncio.to_thread(self._api.read_data, "configmaps", namespace, name)

    async def service_account_token(self, pod: Pod, audience: str, expiration: int) -> bytes:
        return await asyncio.to_thread(self._api.token, pod, audience, expiration)


class ApiStatusSink:
    """`PodStatusSink` of the process node: one thread writes, in order, the newest status of each Pod."""

    def __init__(self, api: NodeApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._newest: dict[str, Mapping[str, Any]] = {}
        self._work: queue.Queue[tuple[str, PodKey, str]] = queue.Queue(MAX_QUEUED_WRITES)

    def status(self, key: PodKey, uid: str, status: Mapping[str, Any]) -> None:
        with self._lock:
            queued = uid in self._newest
            self._newest[uid] = status
        if not queued:
            self._work.put_nowait(("status", key, uid))

    def gone(self, key: PodKey, uid: str) -> None:
        self._work.put_nowait(("gone", key, uid))

    def run(self) -> None:
        """Write for ever. A Pod that is gone or replaced needs no status; what may pass later is tried again."""
        while True:
            kind, key, uid = self._work.get()
            try:
                self._write(kind, key, uid)
            except ApiException as error:
                if error.status in NEVER_ACCEPTED:
                    log.error("%s of Pod %s/%s is refused: %s", kind, *key, _reason(error))
                elif error.status not in (404, 409):
                    self._retry(kind, key, uid, error)
            except Exception as error:
                self._retry(kind, key, uid, error)

    def _write(self, kind: str, key: PodKey, uid: str) -> None:
        if kind == "gone":
            self._api.delete_pod(key, uid)
            return
        with self._lock:
            status = self._newest.pop(uid, None)
        if status is None:
            return
        try:
            self._api.write_status(key, uid, status)
        except BaseException:
            with self._lock:
                self._newest.setdefault(uid, status)
            raise

    def _retry(self, kind: str, key: PodKey, uid: str, error: Exception) -> None:
        log.warning("%s of Pod %s/%s not written: %s", kind, *key, _reason(error))
        time.sleep(RETRY_S)
        self._work.put_nowait((kind, key, uid))


def _allowed_soon(call: Callable[[], Any]) -> Any:
    for _ in range(FORBIDDEN_RETRIES):
        try:
            return call()
        except ApiException as error:
            if error.status != 403:
                raise
        time.sleep(RETRY_S / 5)
    return call()


def _decoded(data: Mapping[str, str] | None) -> dict[str, bytes]:
    return {key: base64.b64decode(value) for key, value in (data or {}).items()}


def _node_info() -> dict[str, str]:
    system = os.uname()
    return {
        "machineID": "",
        "systemUUID": "",
        "bootID": "",
        "kernelVersion": system.release,
        "osImage": "test node",
        "containerRuntimeVersion": "process://1",
        "kubeletVersion": "v1.36.3",
        "kubeProxyVersion": "",
        "operatingSystem": "linux",
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(system.machine, system.machine),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _reason(error: Exception) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}: {(error.body or '')[:300]}"
    return f"{type(error).__name__}: {error}"
