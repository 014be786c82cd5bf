"""The node's boundaries: what isolates a pod, where its files come from, where its status goes.

Why: the same node runs on a laptop without rights (`host.py`) and under a real API server with network and mount
namespaces (the tests' isolation). Must not import an implementation of any of these, nor a Kubernetes client.

Order for one pod: `Isolation.check` -> `Isolation.prepare` -> volumes written (owned by `volume_owner`) ->
`PodEnvironment.command` for each process (containers, exec probes, exec preStop) -> `Isolation.teardown`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline_cli.node.pod import Container, Pod, PodKey, PodRefused

__all__ = [
    "Command",
    "ContentSource",
    "Isolation",
    "Mount",
    "Pod",
    "PodEnvironment",
    "PodKey",
    "PodRefused",
    "PodStatusSink",
]


@dataclass(frozen=True, slots=True)
class Mount:
    """`host_path` (a directory, or a file for a subPath) must be seen by the process at `mount_path`."""

    host_path: Path
    mount_path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start. `env` is its whole environment; `cwd` None = the isolation chooses.

    `signal_group` sends SIGTERM to the whole process group: for wrappers that stay in front of the process and do not
    pass signals on. By default only the first process gets SIGTERM, as in a container; SIGKILL goes to the group.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None
    signal_group: bool = False


class PodEnvironment(Protocol):
    """What one pod was given. Lives until `Isolation.teardown`."""

    @property
    def pod_ip(self) -> str:
        """Address of the pod that the node and other pods can reach."""
        ...

    @property
    def host_ip(self) -> str:
        """Address of the node."""
        ...

    @property
    def volume_owner(self) -> tuple[int, int] | None:
        """(uid, gid) of the files in volumes; None = the node's own user."""
        ...

    def port(self, container_port: int) -> int:
        """The port to reach instead of `container_port`; the same number where pods have addresses of their own."""
        ...

    def env(self, container: Container) -> Mapping[str, str]:
        """Variables that replace the container's own, before `$(VAR)` expansion."""
        ...

    def volume_path(self, pod: Pod, volume: str) -> Path | None:
        """A host directory that stands in for an emptyDir (kept across pods); None = a fresh one."""
        ...

    def config(self, path: str, data: bytes, mounts: tuple[Mount, ...]) -> bytes:
        """What the file `path` of a ConfigMap must say so that a process with `mounts` finds what it names."""
        ...

    def command(self, container: Container, command: Command, mounts: tuple[Mount, ...]) -> Command:
        """The command to run on this node so that `command` runs isolated with `mounts` in place.

        `command.argv` and `.env` are expanded and name paths as the container sees them. The result may add a prefix
        (nsenter, setpriv, ...) or rewrite paths. It starts in a session of its own; its exit code is the container's.
        """
        ...


class Isolation(Protocol):
    """Gives pods their address, ports, mounts and rights."""

    def check(self, pod: Pod) -> None:
        """Raises PodRefused for securityContext, volumes or resources that this isolation cannot honour."""
        ...

    async def prepare(self, pod: Pod) -> PodEnvironment:
        """Idempotent per pod uid. Raises OSError where the node cannot (retried with backoff)."""
        ...

    async def teardown(self, pod: Pod) -> None:
        """After the last process of the pod is gone. Never raises for something that is gone already."""
        ...


class ContentSource(Protocol):
    """Contents of Secrets and ConfigMaps, and tokens; awaited, so that a blocking client can use a thread."""

    async def secret(self, namespace: str, name: str) -> Mapping[str, bytes] | None:
        """Decoded data by key; None = no such Secret."""
        ...

    async def config_map(self, namespace: str, name: str) -> Mapping[str, bytes] | None:
        """data and binaryData by key; None = no such ConfigMap."""
        ...

    async def service_account_token(self, pod: Pod, audience: str, expiration: int) -> bytes:
        """A token for the pod's ServiceAccount (TokenRequest API); audience "" = the API server's own.

        Raises PodRefused where there is no such API.
        """
        ...


class PodStatusSink(Protocol):
    """Receives what a kubelet would write. Called on the event loop; must return at once (queue the write)."""

    def status(self, key: PodKey, uid: str, status: Mapping[str, Any]) -> None:
        """The whole `status` of the pod, only when it changed. Write it to the status subresource."""
        ...

    def gone(self, key: PodKey, uid: str) -> None:
        """A deleted pod's last process is gone: delete the object (grace period 0, precondition uid)."""
        ...
