"""`ProcessNode`: runs the Pods bound to one node as processes and reports their status.

The caller feeds it Pods (from a watch or a list) and acts on what the sink is told; the node itself knows no API. All
methods must be called on the event loop that runs it, and that loop's thread must live as long as the node: on Linux a
process dies with the thread that started it (PR_SET_PDEATHSIG).
"""

import asyncio
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline_cli.node.base import ContentSource, Isolation, PodStatusSink
from paceline_cli.node.container import NodeServices
from paceline_cli.node.guard import Guard
from paceline_cli.node.pod import PodKey
from paceline_cli.node.worker import NodeConfig, PodWorker

LOG_DIRS_MAX = 20
"""Logs of this many pods are kept, newest first."""

_log = logging.getLogger(__name__)


def rfc3339_now() -> str:
    """The time as Kubernetes writes it, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def machine_capacity() -> dict[str, str]:
    """cpu and memory of this machine as quantities."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": str(os.cpu_count() or 1), "memory": str(memory)}


class ProcessNode:
    """Feed it with `apply`, `remove` or `sync`; end it with `stop`."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        isolation: Isolation,
        content: ContentSource,
        sink: PodStatusSink,
        capacity: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self._isolation = isolation
        self._sink = sink
        self._guard = Guard()
        self._services = NodeServices(content, self._guard, capacity or machine_capacity(), rfc3339_now)
        self._workers: dict[str, tuple[PodWorker, asyncio.Task[None]]] = {}
        config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        config.log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def pods(self) -> set[PodKey]:
        """Pods that have something on this node."""
        return {worker.key for worker, _ in self._workers.values()}

    def log_path(self, namespace: str, pod: str, container: str) -> Path:
        """Where a container's output goes (stdout and stderr, rotated)."""
        return self.config.log_dir / f"{namespace}_{pod}" / f"{container}.log"

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """A Pod as the API has it now: starts it, updates it, or begins its termination. Level-triggered."""
        meta = manifest["metadata"]
        key, uid = (meta.get("namespace", "default"), meta["name"]), meta.get("uid", "")
        deleting = bool(meta.get("deletionTimestamp"))
        known = self._workers.get(uid)
        if known is None:
            if deleting:
                # Nothing of it runs here (any more): let the object go.
                self._sink.gone(key, uid)
            elif (manifest.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                self._start(manifest, uid)
            return
        worker = known[0]
        if deleting:
            worker.terminate(meta.get("deletionGracePeriodSeconds"))
        else:
            worker.update(manifest)

    def _start(self, manifest: Mapping[str, Any], uid: str) -> None:
        worker = PodWorker(manifest, self.config, self._isolation, self._services, self._sink)
        task = asyncio.ensure_future(worker.run())
        self._workers[uid] = (worker, task)
        task.add_done_callback(lambda done: self._finished(uid, done))

    def _finished(self, uid: str, task: "asyncio.Task[None]") -> None:
        worker, _ = self._workers.pop(uid)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("pod %s/%s: the node failed", *worker.key, exc_info=error)
        self._trim_logs()

    def remove(self, uid: str, grace: float | None = None) -> None:
        """The Pod's object is gone: ends its processes (within its own grace period unless given)."""
        known = self._workers.get(uid)
        if known is not None:
            known[0].terminate(grace)

    def sync(self, manifests: Iterable[Mapping[str, Any]]) -> None:
        """All Pods of this node: applies each, removes those that are not listed."""
        listed = list(manifests)
        uids = {m["metadata"].get("uid", "") for m in listed}
        for uid in [u for u in self._workers if u not in uids]:
            self.remove(uid)
        for manifest in listed:
            self.apply(manifest)

    async def stop(self, grace: float | None = None) -> None:
        """Ends every pod, within `grace` seconds or each within its own period, and waits until all is gone.

        Pods of DaemonSets end last: others may need them until their own end, as a drained node's pods do.
        May be called again with a smaller grace while it waits (a second Ctrl-C).
        """
        workers = list(self._workers.values())
        for is_daemon in (False, True):
            ending = [(worker, task) for worker, task in workers if worker.is_daemon is is_daemon]
            for worker, _ in ending:
                worker.terminate(grace)
            await asyncio.gather(*(task for _, task in ending), return_exceptions=True)
        self._guard.close()

    def _trim_logs(self) -> None:
        kept = {f"{namespace}_{name}" for namespace, name in self.pods}
        old = [d for d in self.config.log_dir.iterdir() if d.is_dir() and d.name not in kept]
        # By the last line written, so that pods of another run that shares the folder keep theirs while they live.
        old.sort(key=_last_written_s, reverse=True)
        for directory in old[LOG_DIRS_MAX:]:
            shutil.rmtree(directory, ignore_errors=True)


def _last_written_s(directory: Path) -> float:
    try:
        return max([directory.stat().st_mtime, *(file.stat().st_mtime for file in directory.iterdir())])
    except OSError:  # Another run has just removed it.
        return 0.0
