"""The life of one pod on this node: set up, init containers in order, containers, end, clean up.

Owns the pod's directory and its runners. A pod that asks for something this node does not honour stays Pending with
the reason CreateContainerConfigError, as a kubelet reports a container it cannot configure: a phase of Failed would
make the owning controller create pods without end.
"""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from paceline_api.quantity import parse_bytes
from paceline_cli.node.base import Isolation, Mount, PodEnvironment, PodStatusSink
from paceline_cli.node.container import ContainerRunner, NodeServices
from paceline_cli.node.expand import ConfigError
from paceline_cli.node.parse import parse_pod
from paceline_cli.node.pod import Container, Pod, PodKey, PodRefused, Volume
from paceline_cli.node.status import ContainerView, PodView, Waiting, pod_status
from paceline_cli.node.volumes import File, directory_bytes, make_empty_dir, volume_files, write_files

_RETRY_FIRST_S, _RETRY_MAX_S = 0.5, 10.0

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Facts of a node. `capacity` answers resourceFieldRef for unset limits; `refresh_s` is the age of volume files."""

    name: str
    state_dir: Path
    """Volumes of running pods, 0700; removed with each pod."""
    log_dir: Path
    refresh_s: float = 60.0


class PodWorker:
    """`run()` is the pod's whole life; `terminate()` begins its end."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        config: NodeConfig,
        isolation: Isolation,
        services: NodeServices,
        sink: PodStatusSink,
    ) -> None:
        meta = manifest["metadata"]
        self.key: PodKey = (meta.get("namespace", "default"), meta["name"])
        self.uid: str = meta.get("uid", "")
        self._manifest = manifest
        self._config = config
        self._isolation = isolation
        self._services = services
        self._sink = sink
        self._pod: Pod | None = None
        self._environment: PodEnvironment | None = None
        self._dir = config.state_dir / "pods" / (self.uid or "-".join(self.key))
        self._stop = asyncio.Event()
        self._grace: float | None = None
        self._runners: list[ContainerRunner] = []
        self._init_runners: list[ContainerRunner] = []
        self._failure: tuple[str, str] | None = None
        self._message = ("ContainerCreating", "")
        self._started_at = services.now()
        self._last: dict[str, Any] | None = None
        self._publish_due = False

    @property
    def is_daemon(self) -> bool:
        """Whether a DaemonSet controls the pod."""
        owners = self._manifest["metadata"].get("ownerReferences") or []
        return any(owner.get("kind") == "DaemonSet" and owner.get("controller") for owner in owners)

    def update(self, manifest: Mapping[str, Any]) -> None:
        """New labels and annotations reach downward API volumes at the next refresh; a Pod's spec is immutable."""
        self._manifest = manifest
        if self._pod is not None:
            meta = manifest["metadata"]
            labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
            self._pod = replace(self._pod, labels=labels, annotations=annotations)

    def terminate(self, grace: float | None) -> None:
        """Ends the pod within `grace` seconds (None: its own); a later call may only shorten it."""
        seconds = grace if grace is not None else float(self._pod.grace if self._pod else 0)
        if self._grace is not None and seconds >= self._grace:
            return
        self._grace = seconds
        self._stop.set()
        for runner in (*self._init_runners, *self._runners):
            runner.stop(seconds)

    async def run(self) -> None:
        """Returns when the pod was terminated and nothing of it is left on the node."""
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            if await self._unless(stop, self._setup()):
                await self._contain()
            await stop
        finally:
            stop.cancel()
            await self._clean_up()
        self._publish()
        self._sink.gone(self.key, self.uid)

    async def _unless(self, stop: "asyncio.Future[Any]", work: Awaitable[bool]) -> bool:
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return False
        return task.result() and not self._stop.is_set()

    async def _setup(self) -> bool:
        self._changed()
        try:
            pod = self._pod = parse_pod(self._manifest)
            self._isolation.check(pod)
        except (PodRefused, KeyError) as error:
            _log.error("pod %s/%s is refused: %s", *self.key, error)
            self._wait("CreateContainerConfigError", str(error))
            return False
        self._environment = await self._retry(lambda: self._isolation.prepare(pod))
        await self._retry(self._write_volumes)
        return True

    async def _retry(self, work: Callable[[], Awaitable[_T]]) -> _T:
        delay = _RETRY_FIRST_S
        while True:
            try:
                return await work()
            except (ConfigError, PodRefused, OSError) as error:
                self._wait("ContainerCreating", str(error))
            await asyncio.sleep(delay)
            delay = min(delay * 2, _RETRY_MAX_S)

    def _wait(self, reason: str, message: str) -> None:
        self._message = (reason, message)
        self._changed()

    def _prepared(self) -> tuple[Pod, PodEnvironment]:
        if self._pod is None or self._environment is None:
            raise RuntimeError("the pod is not set up yet")
        return self._pod, self._environment

    async def _write_volumes(self) -> None:
        pod, environment = self._prepared()
        for volume in pod.volumes:
            root = self._dir / volume.name
            if volume.kind == "files":
                services = self._services
                files = await volume_files(volume, pod, environment, services.content, services.capacity)
                files = self._as_here(volume, files)
                write_files(root, files, environment.volume_owner)
            elif (stand_in := environment.volume_path(pod, volume.name)) is not None:
                stand_in.mkdir(parents=True, exist_ok=True, mode=0o700)
            else:
                make_empty_dir(root, environment.volume_owner)

    def _as_here(self, volume: Volume, files: dict[str, File]) -> dict[str, File]:
        """Files of ConfigMaps with paths and addresses as they are on this node."""
        if any(source.kind != "configMap" for source in volume.sources):
            return files
        pod, environment = self._prepared()
        mounts = tuple(mount for container in pod.containers for mount in self._mounts(container))
        return {
            path: replace(file, content=environment.config(path, file.content, mounts)) for path, file in files.items()
        }

    def _mounts(self, container: Container) -> tuple[Mount, ...]:
        pod, environment = self._prepared()
        mounts = []
        for mount in container.mounts:
            root = environment.volume_path(pod, mount.name) or self._dir / mount.name
            mounts.append(Mount(root / mount.sub_path, mount.mount_path, mount.read_only))
        return tuple(mounts)

    def _runner(self, container: Container, *, init: bool) -> ContainerRunner:
        pod, environment = self._prepared()
        log = self._config.log_dir / f"{pod.namespace}_{pod.name}" / f"{container.name}.log"
        return ContainerRunner(
            container, pod, environment, self._mounts(container), self._services, log, self._changed, init=init
        )

    async def _contain(self) -> None:
        """Runs the containers until all are finished for good."""
        pod = self._pod
        assert pod is not None
        self._init_runners = [self._runner(c, init=True) for c in pod.init_containers]
        self._runners = [self._runner(c, init=False) for c in pod.containers]
        self._changed()
        refresh = asyncio.ensure_future(self._refresh())
        try:
            for runner in self._init_runners:
                await runner.run()
                if self._stop.is_set() or not runner.view.ready:
                    return
            await asyncio.gather(*(runner.run() for runner in self._runners))
        finally:
            refresh.cancel()
            await asyncio.gather(refresh, return_exceptions=True)

    async def _refresh(self) -> None:
        """Keeps volume files current and evicts a pod whose emptyDir outgrew its limit, as a kubelet does."""
        while True:
            await asyncio.sleep(self._config.refresh_s)
            try:
                await self._write_volumes()
            except (ConfigError, PodRefused, OSError) as error:
                _log.warning("pod %s/%s: volumes were not refreshed: %s", *self.key, error)
            await self._enforce_size_limits()

    async def _enforce_size_limits(self) -> None:
        pod, environment = self._prepared()
        for volume in pod.volumes:
            # A directory that stands in for the volume outlives the pod and is shared: its size is the user's business.
            if not volume.size_limit or environment.volume_path(pod, volume.name) is not None:
                continue
            used = await asyncio.to_thread(directory_bytes, self._dir / volume.name)
            if used > parse_bytes(volume.size_limit):
                why = f'Usage of EmptyDir volume "{volume.name}" exceeds the limit "{volume.size_limit}".'
                self._failure = ("Evicted", why)
                for runner in self._runners:
                    runner.stop(pod.grace)

    async def _clean_up(self) -> None:
        # Also where `prepare` was never reached: an agent may have reserved something for the pod before.
        if self._pod is not None:
            await self._isolation.teardown(self._pod)
        shutil.rmtree(self._dir, ignore_errors=True)

    def _changed(self) -> None:
        # Several changes in one turn of the loop are one report.
        if not self._publish_due:
            self._publish_due = True
            asyncio.get_running_loop().call_soon(self._publish)

    def _publish(self) -> None:
        self._publish_due = False
        known = self._last or self._manifest.get("status") or {}
        status = pod_status(self._view(), self._services.now(), known)
        if status != self._last:
            self._last = status
            self._sink.status(self.key, self.uid, status)

    def _view(self) -> PodView:
        environment = self._environment
        return PodView(
            containers=self._views(self._runners, "containers"),
            init_containers=self._views(self._init_runners, "initContainers"),
            restart_policy=self._pod.restart_policy if self._pod and not self._stop.is_set() else "Never",
            pod_ip=environment.pod_ip if environment else "",
            host_ip=environment.host_ip if environment else "",
            start_time=self._started_at,
            failure=self._failure,
        )

    def _views(self, runners: list[ContainerRunner], key: str) -> list[ContainerView]:
        if runners:
            return [runner.view for runner in runners]
        listed = (self._manifest.get("spec") or {}).get(key) or []
        return [ContainerView(c.get("name", ""), c.get("image", ""), Waiting(*self._message)) for c in listed]
