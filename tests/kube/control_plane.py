"""Runs a real control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, each a child process.

Why: server-side apply, schema rules, garbage collection, rollouts, scheduling and EndpointSlices are then Kubernetes'
own and not ours. It listens on the bridge of the tests' network namespace, so fixed ports cannot collide with the
machine's. Certificates, tokens, data and one log per process lie in one private folder. Imports nothing of the product.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from audit_log import AuditLog
from cluster_binaries import Binaries, Unavailable
from network_namespace import BRIDGE_IP

# Each node has its own runtime and so its own identity; the order is that of their parts of the Pods' subnet.
NODES = {"paceline-node": "namespaces", "paceline-runc": "runc"}
API_PORT = 6443
ETCD_URL = "http://127.0.0.1:2379"
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0

# user name and groups of every static token; the API server's own RBAC defaults give them their rights.
USERS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
} | {name: (f"system:node:{name}", "system:nodes") for name in NODES}
# Reads are left out: the log answers "what was written?".
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "None", "verbs": ["get", "list", "watch"]}, {"level": "Metadata"}],
}


@dataclass
class ControlPlane:
    """A running control plane. `kubeconfig` is the administrator's; `audit` is None for a foreign cluster."""

    folder: Path
    server: str
    kubeconfig: Path
    kubectl: str
    audit: AuditLog | None = None
    ca_file: Path | None = None
    tokens: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    start_seconds: float = 0.0

    def kubeconfig_for(self, user: str) -> Path:
        """Path of a kubeconfig for one of `USERS`."""
        return self.write_kubeconfig(user, self.tokens[user])

    def write_kubeconfig(self, name: str, token: str) -> Path:
        """Write a kubeconfig that shows `token` (a static or a ServiceAccount token); return its path."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": self._cluster()}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(content, indent=1))
        return path

    def _cluster(self) -> dict[str, Any]:
        """Address and certificate authority, as a kubeconfig names them."""
        if self.ca_file is not None:
            ca = base64.b64encode(self.ca_file.read_bytes()).decode()
            return {"server": self.server, "certificate-authority-data": ca}
        theirs = yaml.safe_load(self.kubeconfig.read_text())
        context = next(c["context"] for c in theirs["contexts"] if c["name"] == theirs["current-context"])
        return next(c["cluster"] for c in theirs["clusters"] if c["name"] == context["cluster"])

    def log_tail(self, name: str, lines: int = 15) -> str:
        """Last lines of the log of process `name`."""
        path = self.folder / f"{name}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def spawn(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        """Start a child whose output goes to `<name>.log` and that dies with the calling thread."""
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
                # A killed process leaves its temporary files; here they go with the folder.
                env=os.environ | {"TMPDIR": str(self.folder)},
            )
        self.processes[name] = process
        return process

    def stop(self) -> None:
        """End every child by pid, clients before servers. The data is thrown away, so nothing is asked to finish."""
        for process in reversed(self.processes.values()):
            process.kill()
            process.wait(STOP_TIMEOUT_S)
        self.processes.clear()


def start(binaries: Binaries, folder: Path) -> ControlPlane:
    """Start everything and wait until the API server is ready. The caller is in the cluster's network namespace.

    Raises `Unavailable` with the tail of the log of the process that failed.
    """
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    plane = ControlPlane(folder, f"https://{BRIDGE_IP}:{API_PORT}", folder / "admin.kubeconfig", binaries["kubectl"])
    plane.tokens = {user: secrets.token_hex(16) for user in USERS}
    plane.audit = AuditLog(folder / "audit.log")
    try:
        _write_inputs(plane)
        plane.spawn("etcd", _etcd_argv(binaries, folder))
        plane.spawn("kube-apiserver", _apiserver_argv(binaries, folder))
        plane.ca_file = folder / "certs" / "apiserver.crt"
        _wait_ready(plane)
        plane.kubeconfig_for("admin")
        plane.spawn("kube-controller-manager", _controller_manager_argv(binaries, plane))
        plane.spawn("kube-scheduler", _scheduler_argv(binaries, plane))
    except BaseException:
        plane.stop()
        raise
    plane.start_seconds = time.monotonic() - began
    return plane


def foreign(kubeconfig: Path, folder: Path, kubectl: str) -> ControlPlane:
    """A cluster that somebody else runs (`PACELINE_TEST_KUBECONFIG`): nothing is started and nothing is stopped."""
    if not kubeconfig.exists():
        raise Unavailable(f"PACELINE_TEST_KUBECONFIG={kubeconfig} does not exist")
    return ControlPlane(folder, "", kubeconfig, kubectl)


def wait_until(what: str, check: Callable[[], Any], timeout: float = READY_TIMEOUT_S, interval: float = 0.05) -> Any:
    """Poll `check` until it returns something true and return that. Raises AssertionError naming `what`."""
    deadline = time.monotonic() + timeout
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout:.0f} s still not: {what}")
        time.sleep(interval)


def _write_inputs(plane: ControlPlane) -> None:
    folder = plane.folder
    (folder / "certs").mkdir(mode=0o700)
    rows = [f'{plane.tokens[key]},{name},{key},"{groups}"' for key, (name, groups) in USERS.items()]
    (folder / "tokens.csv").touch(mode=0o600)
    (folder / "tokens.csv").write_text("\n".join(rows) + "\n")
    (folder / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY))
    key = folder / "service-account.key"
    # The API server derives the public key from a SEC 1 file, which ecparam writes, but not from PKCS 8.
    command = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=10)
    except FileNotFoundError as error:
        raise Unavailable("no real control plane: openssl is missing (it makes the ServiceAccount key)") from error


def _etcd_argv(binaries: Binaries, folder: Path) -> list[str]:
    return [
        binaries["etcd"],
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={ETCD_URL}",
        f"--advertise-client-urls={ETCD_URL}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
        "--logger=zap",
        "--log-level=warn",
    ]


def _apiserver_argv(binaries: Binaries, folder: Path) -> list[str]:
    key = folder / "service-account.key"
    return [
        binaries["kube-apiserver"],
        f"--etcd-servers={ETCD_URL}",
        f"--secure-port={API_PORT}",
        "--bind-address=0.0.0.0",
        f"--advertise-address={BRIDGE_IP}",
        f"--cert-dir={folder / 'certs'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--allow-privileged=true",
        f"--audit-policy-file={folder / 'audit-policy.json'}",
        f"--audit-log-path={folder / 'audit.log'}",
        "--audit-log-mode=blocking-strict",
        # Watches of a stopped test must not hold the server back at the end.
        "--shutdown-delay-duration=0s",
    ]


def _controller_manager_argv(binaries: Binaries, plane: ControlPlane) -> list[str]:
    return [
        binaries["kube-controller-manager"],
        f"--kubeconfig={plane.kubeconfig_for('controller-manager')}",
        f"--service-account-private-key-file={plane.folder / 'service-account.key'}",
        f"--root-ca-file={plane.ca_file}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        # The default of 20 requests a second spends the first seconds on the controllers' own ServiceAccounts.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        f"--cert-dir={plane.folder / 'controller-manager-certs'}",
    ]


def _scheduler_argv(binaries: Binaries, plane: ControlPlane) -> list[str]:
    return [
        binaries["kube-scheduler"],
        f"--kubeconfig={plane.kubeconfig_for('scheduler')}",
        "--leader-elect=false",
        f"--cert-dir={plane.folder / 'scheduler-certs'}",
    ]


def _wait_ready(plane: ControlPlane) -> None:
    def ready() -> bool:
        for name, process in plane.processes.items():
            if process.poll() is not None:
                tail = plane.log_tail(name)
                raise Unavailable(f"{name} ended with code {process.returncode} while starting:\n{tail}")
        return is_ready(plane)

    try:
        wait_until("kube-apiserver answers /readyz with 200", ready)
    except AssertionError as error:
        raise Unavailable(f"{error}\n{plane.log_tail('kube-apiserver')}") from error


def is_ready(plane: ControlPlane) -> bool:
    """Whether the API server answers /readyz with 200 now."""
    if plane.ca_file is None or not plane.ca_file.exists():
        return False
    headers = {"Authorization": f"Bearer {plane.tokens['admin']}"}
    request = urllib.request.Request(f"{plane.server}/readyz", headers=headers)
    try:
        # The certificate may be half written: that is an SSLError, which is an OSError, as all failures here are.
        https = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=os.fspath(plane.ca_file)))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)
        with opener.open(request, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False
