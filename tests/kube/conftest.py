"""Fixtures of the tests on a real control plane: `control_plane`, `node`, `namespace`, `kubectl`, `api`.

One control plane and one node a session (each worker of xdist has its own), one namespace a test. The tests and
everything they start run in a network namespace of their own, entered for each test and left after it. Where the
control plane cannot run, tests are skipped with the reason, or fail if CI=true: a green run in CI must mean that they
ran.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cluster_binaries
import control_plane as control_plane_module
import network_namespace
import node_agent
from audit_log import AuditLog
from cluster_binaries import Binaries, Unavailable
from control_plane import ControlPlane, wait_until
from network_namespace import NamespaceDenied, NetworkNamespace

Kubectl = Callable[..., str]
KUBECTL_TIMEOUT_S = 60


def unavailable(reason: str) -> NoReturn:
    """Skip the test with `reason`; in CI, where nothing may be skipped, fail it."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"CI=true and this test could not run: {reason}", pytrace=False)
    pytest.skip(reason)


_build_failure = pytest.StashKey[str]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the binaries before the first test: a cold build takes minutes, more than a test's timeout."""
    wanted = any(item.get_closest_marker("kube") or item.get_closest_marker("node") for item in session.items)
    if not wanted or session.config.option.collectonly:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not cluster_binaries.is_built():
        reporter.write_line("looking for the Kubernetes control plane (a cold build takes minutes)")
    try:
        _find_programs()
    except Unavailable as error:
        session.config.stash[_build_failure] = str(error)


def _find_programs() -> Binaries:
    if os.environ.get("PACELINE_TEST_KUBECONFIG"):
        return Binaries({"kubectl": cluster_binaries.find_kubectl()})
    return cluster_binaries.find_binaries()


@pytest.fixture(scope="session")
def binaries(pytestconfig: pytest.Config) -> Binaries:
    """etcd, the Kubernetes programs and kubectl; for a foreign cluster only kubectl."""
    failure = pytestconfig.stash.get(_build_failure, None)
    if failure is not None:
        unavailable(failure)
    return _find_programs()


@pytest.fixture(scope="session")
def cluster_network() -> Iterator[NetworkNamespace | None]:
    """The network namespace of the cluster; None with `PACELINE_TEST_KUBECONFIG`, whose server is elsewhere."""
    if os.environ.get("PACELINE_TEST_KUBECONFIG"):
        yield None
        return
    try:
        network = network_namespace.create_cluster_network()
    except (NamespaceDenied, OSError) as error:
        unavailable(str(error))
    yield network
    network.close()


@pytest.fixture(scope="session")
def _control_plane(binaries: Binaries, cluster_network: NetworkNamespace | None) -> Iterator[ControlPlane]:
    with tempfile.TemporaryDirectory(prefix="paceline-kube-") as name:
        folder = Path(name)
        try:
            if cluster_network is None:
                kubeconfig = Path(os.environ["PACELINE_TEST_KUBECONFIG"])
                plane = control_plane_module.foreign(kubeconfig, folder, binaries["kubectl"])
            else:
                with cluster_network.entered():
                    plane = control_plane_module.start(binaries, folder)
        except Unavailable as error:
            unavailable(str(error))
        yield plane
        plane.stop()


@pytest.fixture
def control_plane(_control_plane: ControlPlane, cluster_network: NetworkNamespace | None) -> Iterator[ControlPlane]:
    """The running control plane; the test and what it starts are in its network."""
    if cluster_network is None:
        yield _control_plane
        return
    with cluster_network.entered():
        yield _control_plane


@pytest.fixture(scope="session")
def _node(_control_plane: ControlPlane, cluster_network: NetworkNamespace | None) -> Iterator[node_agent.Node]:
    if cluster_network is None:
        unavailable("PACELINE_TEST_KUBECONFIG names a cluster with nodes of its own; this test needs ours")
    with cluster_network.entered():
        node = node_agent.start(_control_plane)
    yield node
    node.stop()


@pytest.fixture
def node(control_plane: ControlPlane, _node: node_agent.Node) -> node_agent.Node:
    """The node that runs Pods as processes."""
    return _node


@pytest.fixture(scope="session")
def _runc_node(_control_plane: ControlPlane, cluster_network: NetworkNamespace | None) -> Iterator[node_agent.Node]:
    if cluster_network is None:
        unavailable("PACELINE_TEST_KUBECONFIG names a cluster with nodes of its own; this test needs ours")
    if shutil.which("runc") is None:
        unavailable("runc is not installed: run tests/kube/install_runc.sh as root")
    with cluster_network.entered():
        node = node_agent.start(_control_plane, "paceline-runc")
    yield node
    node.stop()


@pytest.fixture
def runc_node(control_plane: ControlPlane, _runc_node: node_agent.Node) -> node_agent.Node:
    """The node that runs Pods by runc; a Pod asks for it with `nodeName`."""
    return _runc_node


@pytest.fixture
def audit(control_plane: ControlPlane) -> AuditLog:
    """What was written: `mark = audit.mark()` ... `audit.writes(mark, namespace) == []`."""
    if control_plane.audit is None:
        unavailable("PACELINE_TEST_KUBECONFIG names a server whose audit log is not readable here")
    return control_plane.audit


@pytest.fixture
def kubectl(control_plane: ControlPlane) -> Kubectl:
    """`kubectl("get", "pods", stdin="...")` -> stdout; raises AssertionError with stderr. As administrator."""

    def run(*arguments: str, stdin: str | None = None, timeout: float = KUBECTL_TIMEOUT_S) -> str:
        done = subprocess.run(
            [control_plane.kubectl, f"--kubeconfig={control_plane.kubeconfig}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            # A home of its own: kubectl caches what a server offers, and this server is new.
            env={"HOME": str(control_plane.folder), "PATH": os.defpath},
        )
        if done.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    return run


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A fresh namespace with its default ServiceAccount; deleted after the test, without waiting."""
    from kubernetes import client, config

    name = f"test-{uuid.uuid4().hex[:10]}"
    # Not kubectl: a process for each call would take longer than many a test.
    with config.new_client_from_config(str(control_plane.kubeconfig)) as connection:
        core = client.CoreV1Api(connection)
        core.create_namespace({"metadata": {"name": name}})

        def complete() -> bool:
            accounts = core.list_namespaced_service_account(name, field_selector="metadata.name=default").items
            maps = core.list_namespaced_config_map(name, field_selector="metadata.name=kube-root-ca.crt").items
            return bool(accounts and maps)

        wait_until(f"{name} has its ServiceAccount", complete)
        yield name
        core.delete_namespace(name)


@pytest.fixture
def api(control_plane: ControlPlane) -> Iterator:
    """A dynamic client of the official library, as administrator."""
    from kubernetes import config, dynamic

    client = config.new_client_from_config(str(control_plane.kubeconfig))
    cache = control_plane.folder / f"discovery-{uuid.uuid4().hex[:8]}.json"
    yield dynamic.DynamicClient(client, cache_file=str(cache))
    client.close()
