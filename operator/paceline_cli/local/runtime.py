"""The local runtime in one object: store, API server, controllers and process node, started and stopped in order.

`paceline up` adds the unchanged operator on `runtime.store` and applies the user's objects. Must be used on the event
loop of the main thread, which has to outlive the processes it starts.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline_api.kube import Kind
from paceline_cli.local.agent import NodeAgent
from paceline_cli.local.controllers.base import ControllerManager
from paceline_cli.local.controllers.daemon_set import DaemonSetController
from paceline_cli.local.controllers.deployment import DeploymentController
from paceline_cli.local.controllers.endpoint_slice import EndpointSliceController
from paceline_cli.local.controllers.scheduler import Scheduler
from paceline_cli.local.http import ApiServer
from paceline_cli.local.kubeconfig import write_kubeconfig
from paceline_cli.local.rules import Validator
from paceline_cli.local.store import ObjectStore
from paceline_cli.node.host import FixedPort, HostIsolation
from paceline_cli.node.kept import KeptFolders
from paceline_cli.node.node import ProcessNode, rfc3339_now
from paceline_cli.node.worker import NodeConfig


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """`state_dir` holds this run's volumes, logs and kubeconfig (0700); several runs may share it."""

    state_dir: Path
    namespace: str = "default"
    node_name: str = "laptop"
    api_port: int = 0
    validators: Mapping[Kind, Validator] = field(default_factory=dict)
    stand_ins: Mapping[str, Path] = field(default_factory=dict)
    """mountPath -> directory that outlives pods (the model cache)."""
    kept_volumes: frozenset[str] = frozenset()
    """Volumes whose folders, each of one pod at a time, outlive pods: below `state_dir`/volumes."""
    devices: Iterable[str] = ()
    fixed_port: FixedPort = lambda pod, port: None


class LocalRuntime:
    """`async with LocalRuntime(config) as runtime`, or `start` and `stop`. Nothing listens and nothing runs before."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.run_dir = config.state_dir / "run" / str(os.getpid())
        self.kubeconfig = self.run_dir / "kubeconfig"
        """For kubectl and for people."""
        # For pods: the token stays out of URLs, and so out of their logs.
        self._pod_kubeconfig = self.run_dir / "pod-kubeconfig"
        self.store = new_store(config.validators)
        self.api = ApiServer(self.store, secrets.token_urlsafe(32), port=config.api_port)
        isolation = HostIsolation(
            fixed_port=config.fixed_port,
            stand_ins=config.stand_ins,
            kept=KeptFolders(config.state_dir / "volumes", config.kept_volumes),
            devices=config.devices,
            api_env={"KUBECONFIG": str(self._pod_kubeconfig)},
        )
        config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_stale_runs(config.state_dir / "run")
        node = NodeConfig(config.node_name, self.run_dir, config.state_dir / "logs")
        self.agent = NodeAgent(self.store, node, isolation)
        self._controllers = ControllerManager(
            self.store,
            [
                DeploymentController(self.store, now=rfc3339_now, new_suffix=new_suffix),
                DaemonSetController(self.store, new_suffix=new_suffix),
                EndpointSliceController(self.store),
                Scheduler(self.store, config.node_name, now=rfc3339_now),
            ],
        )

    @property
    def node(self) -> ProcessNode:
        """The process node: `log_path`, `pods`."""
        return self.agent.node

    async def start(self) -> None:
        """Raises OSError where the API port is taken; nothing is left half-started then."""
        url = await self.api.start()
        write_kubeconfig(self._pod_kubeconfig, url, self.api.token, self.config.namespace)
        write_kubeconfig(self.kubeconfig, self.api.kubectl_url, namespace=self.config.namespace)
        self._controllers.start()
        self.agent.start()

    async def stop(self, grace: float | None = None) -> None:
        """Stops controllers, then every pod within its grace period (or `grace` seconds), then API and store.

        While it waits, `kill()` cuts the grace short.
        """
        await self._controllers.stop()
        await self.agent.stop(grace)
        self.store.close()
        await self.api.stop()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    async def kill(self) -> None:
        """Ends every pod at once: a second Ctrl-C."""
        await self.agent.node.stop(grace=0)

    async def __aenter__(self) -> "LocalRuntime":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.shield(self.stop())


def new_store(validators: Mapping[Kind, Validator] | None = None) -> ObjectStore:
    """A store on the real clock."""
    return ObjectStore(
        now=rfc3339_now, new_uid=lambda: str(uuid.uuid4()), monotonic=time.monotonic, validators=validators
    )


def new_suffix() -> str:
    """Five characters of the alphabet that Kubernetes uses for names: no vowels, no digits that look like letters."""
    return "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))


def remove_stale_runs(directory: Path, alive: Callable[[int], bool] | None = None) -> None:
    """Removes what runs left behind whose process is gone (killed, power cut)."""
    check = alive or _alive
    for entry in directory.glob("*"):
        if entry.name.isdigit() and not check(int(entry.name)):
            shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
