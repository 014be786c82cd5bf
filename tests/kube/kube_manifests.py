"""Plain manifests and observations for the tests of the harness itself; nothing of Paceline's own objects."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from control_plane import wait_until

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
# Generous, since it is only waited for in full by a test that fails.
READY_TIMEOUT_S = 60
SERVER = ["python", "-u", "-m", "http.server", "8080", "--directory", "/usr/share"]


def container(command: list[str], **fields: Any) -> dict[str, Any]:
    """A container named main with restricted rights; `fields` win."""
    return {"name": "main", "image": "none", "command": command, "securityContext": RESTRICTED} | fields


def pod(name: str, main: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A bare Pod that is quick to end; `spec` wins."""
    defaults = {"enableServiceLinks": False, "terminationGracePeriodSeconds": 1, "containers": [main]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": defaults | spec}


def deployment(name: str, main: dict[str, Any], replicas: int = 1, **spec: Any) -> dict[str, Any]:
    """A Deployment whose Pods are like `pod`, labelled app=<name>."""
    template = pod(name, main, **spec)
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template["spec"]},
        },
    }


def service(name: str, target_port: str) -> dict[str, Any]:
    """A Service over the Pods of the Deployment of the same name, to a named port."""
    ports = [{"name": "http", "port": 80, "targetPort": target_port}]
    spec = {"selector": {"app": name}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def apply(kubectl: Any, namespace: str, *objects: dict[str, Any]) -> str:
    """`kubectl apply` of the objects in one call."""
    listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    return kubectl("--namespace", namespace, "apply", "-f", "-", stdin=json.dumps(listed))


def get(kubectl: Any, namespace: str, *what: str) -> dict[str, Any]:
    """`kubectl get -o json`."""
    return json.loads(kubectl("--namespace", namespace, "get", *what, "-o", "json"))


def wait_ready(kubectl: Any, namespace: str, what: str) -> None:
    """Wait for a Pod to be ready or for a Deployment to be available, by kubectl's own watch."""
    condition = "Ready" if what.startswith("pod") else "Available"
    arguments = ["wait", f"--for=condition={condition}", what, f"--timeout={READY_TIMEOUT_S}s"]
    kubectl("--namespace", namespace, *arguments)


def wait_log(node: Any, namespace: str, name: str, text: str, timeout: float = READY_TIMEOUT_S) -> str:
    """Wait until the main container of Pod `name` has written `text`; return all it wrote."""

    def found() -> str:
        log = node.log(namespace, name, "main")
        return log if text in log else ""

    return wait_until(f"{text!r} in the log of {name}", found, timeout=timeout)


def http_status(url: str) -> int:
    """Status of a GET that passes no proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5) as response:
        return response.status


def processes_naming(text: str) -> list[int]:
    """Process ids of others that have `text` in their arguments or environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if text.encode() in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def network_namespace_of(pid: int) -> str:
    """Identity of the network namespace of a process."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def network_namespaces() -> set[str]:
    """Identities of the network namespaces that a process of this test run is in or holds open.

    Of this run alone: the kernel gives the identity of a namespace that is gone to the next one that anybody makes.
    """
    found = set()
    mine = psutil.Process()
    for process in (mine, *mine.children(recursive=True)):
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            for link in (folder / "ns" / "net", *(folder / "fd").iterdir()):
                with contextlib.suppress(OSError):
                    found.add(str(link.readlink()))
    return {name for name in found if name.startswith("net:[")}
