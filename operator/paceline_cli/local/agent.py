"""Ties the process node to the object store, as a kubelet is tied to the API: bound Pods in, status out.

Before a Pod starts its containerPorts are rewritten to the loopback ports it gets, so that named targetPorts of
Services lead to the process. The node keeps the Pod as it was planned: it finds the real numbers by the planned ones.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from paceline_api.kube import POD, Conflict, Kind, Manifest
from paceline_cli.local.content import StoreContent
from paceline_cli.local.store import ObjectStore
from paceline_cli.node.host import HostIsolation, report_ports
from paceline_cli.node.node import ProcessNode
from paceline_cli.node.parse import parse_pod
from paceline_cli.node.pod import PodKey, PodRefused
from paceline_cli.node.worker import NodeConfig

_RETRY_S = 1.0
_log = logging.getLogger(__name__)


class NodeAgent:
    """`start()` in a running event loop; `await stop()` ends every pod gracefully. `node` is the process node."""

    def __init__(self, store: ObjectStore, config: NodeConfig, isolation: HostIsolation) -> None:
        self._store = store
        self._isolation = isolation
        self._task: asyncio.Task[None] | None = None
        self._seen: set[str] = set()
        self.node = ProcessNode(config, isolation=isolation, content=StoreContent(store), sink=self)

    # The node's PodStatusSink.

    def status(self, key: PodKey, uid: str, status: Mapping[str, Any]) -> None:
        """Writes the status subresource."""
        pod = self._store.get(POD, *key)
        if pod is not None and pod["metadata"]["uid"] == uid:
            self._store.replace_status({**pod, "status": dict(status)})

    def gone(self, key: PodKey, uid: str) -> None:
        """Deletes the object for good."""
        self._seen.discard(uid)
        with contextlib.suppress(Conflict):  # Another pod of that name.
            self._store.delete(POD, *key, uid=uid, grace_s=0)

    def start(self) -> None:
        """Follows the Pods of this node."""
        self._task = asyncio.ensure_future(self._follow())

    async def stop(self, grace: float | None = None) -> None:
        """Ends every pod (see `ProcessNode.stop`); may be called again with a smaller grace."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.node.stop(grace)

    async def _follow(self) -> None:
        loop, wake = asyncio.get_running_loop(), asyncio.Event()

        def written(kind: Kind) -> None:
            if kind == POD:
                with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                    loop.call_soon_threadsafe(wake.set)

        unsubscribe = self._store.subscribe(written)
        try:
            while True:
                wake.clear()
                retry = not self._sync()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), _RETRY_S if retry else None)
        finally:
            unsubscribe()

    def _sync(self) -> bool:
        """False if a pod has to wait for its ports."""
        selector = f"spec.nodeName={self.node.config.name}"
        pods, complete = self._store.list(POD, None, field_selector=selector).items, True
        admitted = []
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if uid in self._seen or pod["metadata"].get("deletionTimestamp") or self._admit(pod):
                admitted.append(pod)
            else:
                complete = False
        self.node.sync(admitted)
        return complete

    def _admit(self, pod: Manifest) -> bool:
        """Reserves ports and writes them into the Pod; False while a wanted port is taken."""
        try:
            environment = self._isolation.reserve(parse_pod(pod))
        except PodRefused:
            # The node reports the refusal in the Pod's status.
            self._seen.add(pod["metadata"]["uid"])
            return True
        except OSError as error:
            self._refuse_for_now(pod, str(error))
            return False
        self._store.replace(report_ports(pod, environment))
        self._seen.add(pod["metadata"]["uid"])
        return True

    def _refuse_for_now(self, pod: Manifest, message: str) -> None:
        waiting = {"waiting": {"reason": "ContainerCreating", "message": message}}
        listed = [
            {"name": c["name"], "image": c.get("image", ""), "state": waiting, "ready": False, "restartCount": 0}
            for c in pod["spec"]["containers"]
        ]
        status = {**(pod.get("status") or {}), "phase": "Pending", "containerStatuses": listed}
        self._store.replace_status({**pod, "status": status})
