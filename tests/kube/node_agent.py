"""A node of the test cluster: the process node of the product in the place of a kubelet, with Linux namespaces.

It registers a Node, runs the Pods that the scheduler binds to it, probes them, reports their status and ends them as
a kubelet does; of a Pod it replaces only the image. `start` runs it as a process with a process tree and mounts of its
own, so that killing it ends every container: nothing can be left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from control_plane import NODES, ControlPlane, wait_until
from kubernetes import client, config
from network_namespace import BRIDGE_IP
from node_api import CAPACITY, ApiContent, ApiStatusSink, NodeApi
from oci_bundle import RuncIsolation, remove_cgroups
from pod_isolation import NamespaceIsolation

from paceline_cli.node.node import ProcessNode
from paceline_cli.node.worker import NodeConfig

log = logging.getLogger("paceline.kube.node")
DEFAULT_NODE = "paceline-node"
ISOLATIONS = {"namespaces": NamespaceIsolation, "runc": RuncIsolation}
VOLUME_REFRESH_S = 5.0


@dataclass
class Node:
    """A running node agent, seen from the tests."""

    name: str
    folder: Path
    plane: ControlPlane

    def log(self, namespace: str, pod: str, container: str) -> str:
        """What a container has written so far, over all its runs."""
        path = self.folder / "logs" / f"{namespace}_{pod}" / f"{container}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop(self) -> None:
        """Kill the agent and with it every container."""
        process = self.plane.processes.pop(self.name, None)
        if process is not None:
            process.kill()
            process.wait(10)
        if NODES[self.name] == "runc":
            remove_cgroups()


def start(plane: ControlPlane, name: str = DEFAULT_NODE) -> Node:
    """Start the agent of one of `NODES` and wait until the API server shows its Node ready.

    Only the default node takes Pods from the scheduler; for another one a Pod names it in `nodeName`.
    """
    folder = plane.folder / name
    # Nothing of an earlier agent's Pods survives it but their files.
    shutil.rmtree(folder / "sandboxes", ignore_errors=True)
    shutil.rmtree(folder / "state", ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    agent = [
        *(sys.executable, str(Path(__file__).resolve())),
        *("--name", name),
        *("--kubeconfig", str(plane.kubeconfig_for(name))),
        *("--folder", str(folder)),
    ]
    # The shell is the first process of the tree: it collects what containers leave behind when they are killed.
    tree = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = plane.spawn(name, [*tree, "sh", "-c", '"$@" & wait $!', "sh", *agent])
    admin = config.new_client_from_config(str(plane.kubeconfig))
    core = client.CoreV1Api(admin)

    def ready() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"the node agent ended:\n{plane.log_tail(name)}")
        with contextlib.suppress(client.ApiException):
            node = core.read_node(name)
            conditions = {c.type: c.status for c in node.status.conditions or []}
            return conditions.get("Ready") == "True" and (node.spec.unschedulable or not node.spec.taints)
        return False

    try:
        wait_until(f"node {name} is ready", ready, timeout=30)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{plane.log_tail(name)}") from error
    finally:
        admin.close()
    return Node(name, folder, plane)


async def run(name: str, kubeconfig: Path, folder: Path) -> None:
    """Be the node `name` until killed."""
    api_client = config.new_client_from_config(str(kubeconfig))
    server = urlsplit(api_client.configuration.host)
    api = NodeApi(api_client, name, BRIDGE_IP, folder / "discovery.json")
    sink = ApiStatusSink(api)
    index = list(NODES).index(name)
    isolation = ISOLATIONS[NODES[name]]
    node = ProcessNode(
        NodeConfig(name, folder / "state", folder / "logs", VOLUME_REFRESH_S),
        isolation=isolation(folder / "sandboxes", server.hostname or BRIDGE_IP, server.port or 443, index),
        content=ApiContent(api),
        sink=sink,
        capacity=CAPACITY,
    )
    await asyncio.to_thread(api.register, schedulable=name == DEFAULT_NODE)
    loop = asyncio.get_running_loop()

    def listed(pods: list[dict]) -> None:
        loop.call_soon_threadsafe(node.sync, pods)

    def changed(event: str, pod: dict) -> None:
        if event == "DELETED":
            # Deleted by force: its processes get no grace, since their object is gone.
            loop.call_soon_threadsafe(node.remove, pod["metadata"]["uid"], 0.0)
        else:
            loop.call_soon_threadsafe(node.apply, pod)

    _background("status", sink.run)
    _background("heartbeat", api.keep_alive)
    _background("watch", lambda: api.watch_pods(listed, changed))
    await asyncio.Event().wait()


def _background(name: str, work: Callable[[], None]) -> None:
    def guarded() -> None:
        try:
            work()
        except BaseException:
            # A node without one of its threads would look alive and do nothing.
            log.exception("thread %s failed", name)
            os._exit(1)

    threading.Thread(target=guarded, name=name, daemon=True).start()


def main() -> None:
    """Command line of the agent's own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", choices=NODES, required=True)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="private folder for state, logs and namespaces")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    os.umask(0o022)
    asyncio.run(run(arguments.name, arguments.kubeconfig, arguments.folder))


if __name__ == "__main__":
    main()
