"""Isolation of the process node by Linux namespaces: what the node agent gives a Pod in place of a container runtime.

Each Pod has a network namespace on the cluster's bridge with an address of its own; each container a root, a process
tree and exactly the rights that its securityContext leaves. What cannot be honoured is refused with the field named.
Runs as root inside the cluster's network namespace and a private mount namespace.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import network_namespace as network
from container_image import image_binds, image_env, image_links
from sandbox_rights import AUDIT_ARCH, CAPABILITIES

from paceline_api.quantity import parse_bytes
from paceline_cli.node.base import Command, Container, Mount, Pod, PodRefused

SANDBOX_INIT = Path(__file__).resolve().parent / "sandbox_init.py"
SUBNET = ip_network(f"{network.BRIDGE_IP}/{network.PREFIX_LENGTH}", strict=False)
MAX_PODS = 110
ROOT_USER = 0
MS_NOSUID_NODEV = 2 | 4
MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Sandbox:
    """One Pod's network namespace, address and files; the node's `PodEnvironment`."""

    folder: Path
    namespace: network.NetworkNamespace
    pod_ip: str
    link: str
    volume_owner: tuple[int, int]
    fs_group: int | None
    hostname: str
    api_env: Mapping[str, str]
    host_ip: str = network.BRIDGE_IP
    memory_volumes: list[Path] = field(default_factory=list)
    serial: itertools.count[int] = field(default_factory=itertools.count)

    def port(self, container_port: int) -> int:
        return container_port

    def env(self, container: Container) -> Mapping[str, str]:
        return self.api_env

    def config(self, path: str, data: bytes, mounts: tuple[Mount, ...]) -> bytes:
        """As it is: pods have mounts and a network of their own."""
        return data

    def volume_path(self, pod: Pod, volume: str) -> Path | None:
        """The tmpfs of an emptyDir with medium Memory; the node makes all other directories itself."""
        path = self.folder / "memory" / volume
        return path if path in self.memory_volumes else None

    def command(self, container: Container, command: Command, mounts: tuple[Mount, ...]) -> Command:
        spec = self.folder / f"{container.name}.{next(self.serial)}.json"
        spec.touch(mode=0o600)
        spec.write_text(json.dumps(self.container_spec(container, command, mounts)))
        # -E -s -S: the environment is the container's, and start-up need not look for packages.
        argv = (sys.executable, "-E", "-s", "-S", str(SANDBOX_INIT), str(spec))
        return Command(argv, {"PATH": os.defpath}, "/")

    def container_spec(self, container: Container, command: Command, mounts: tuple[Mount, ...]) -> dict[str, Any]:
        """Everything that a runtime must know to start `command`, as plain data."""
        for mount in mounts:
            if not mount.host_path.exists():
                # A subPath that is not there yet.
                mount.host_path.mkdir(parents=True)
                mount.host_path.chmod(0o777)
                os.chown(mount.host_path, *self.volume_owner)
        etc = [[str(self.folder / name), f"/etc/{name}"] for name in ("hosts", "hostname", "resolv.conf")]
        image, targets = image_binds(), [m.mount_path for m in mounts]
        return {
            "argv": list(command.argv),
            "env": image_env() | dict(command.env),
            "cwd": command.cwd,
            "netns": f"/proc/{os.getpid()}/fd/{self.namespace.fd}",
            "hostname": self.hostname,
            "root": str(self.folder / "root"),
            "record": str(self.folder / f"{container.name}.pid"),
            "exec": command.argv in _exec_commands(container),
            "image": image,
            # A checkout below a volume's path (say, under /tmp) is bound once more, on top of the volume.
            "covered": [path for path in image if any(Path(path).is_relative_to(target) for target in targets)],
            "links": image_links(),
            "files": etc,
            "mounts": [{"source": str(m.host_path), "target": m.mount_path, "read_only": m.read_only} for m in mounts],
            "read_only_root": bool(container.security.read_only_root),
            "rights": rights(container, self.fs_group),
        }


def rights(container: Container, fs_group: int | None) -> dict[str, Any]:
    """The `rights` of `sandbox_rights.apply` that a container's securityContext leaves."""
    security = container.security
    dropped = {name.removeprefix("CAP_") for name in security.drop_capabilities}
    kept = [] if "ALL" in dropped else sorted(set(CAPABILITIES) - dropped)
    return {
        "uid": security.run_as_user or ROOT_USER,
        "gid": security.run_as_group or 0,
        "groups": [] if fs_group is None else [fs_group],
        "capabilities": kept,
        "seccomp": security.seccomp_profile == "RuntimeDefault",
        "no_new_privs": security.allow_privilege_escalation is False,
    }


class NamespaceIsolation:
    """`Isolation` of the process node for Pods on the test cluster's bridge.

    Several nodes share the bridge: node `index` gives out addresses of its own part of the subnet.
    """

    sandbox_type: type[Sandbox] = Sandbox

    def __init__(self, folder: Path, api_host: str, api_port: int, index: int = 0) -> None:
        self._folder = folder
        self._api_env = {
            "KUBERNETES_SERVICE_HOST": api_host,
            "KUBERNETES_SERVICE_PORT": str(api_port),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(api_port),
        }
        self.sandboxes: dict[str, Sandbox] = {}
        # Addresses are not used again soon, so that a stale endpoint fails instead of reaching another Pod.
        part = list(SUBNET.subnets(prefixlen_diff=1))[index]
        self._addresses = itertools.cycle(itertools.islice(part.hosts(), 1, None))

    def check(self, pod: Pod) -> None:
        """Raises PodRefused for what these namespaces cannot honour."""
        for kind, containers in (("initContainers", pod.init_containers), ("containers", pod.containers)):
            for index, container in enumerate(containers):
                self._check_container(f"spec.{kind}[{index}]", container)

    def _check_container(self, path: str, container: Container) -> None:
        security = container.security
        if security.run_as_non_root and (security.run_as_user or ROOT_USER) == ROOT_USER:
            # The stand-in image has no user of its own, so nothing but runAsUser can make it another one.
            raise PodRefused(f"{path}.securityContext.runAsNonRoot", "true, but the container would run as root")
        if security.seccomp_profile and platform.machine() not in AUDIT_ARCH:
            raise PodRefused(f"{path}.securityContext.seccompProfile", f"no profile for {platform.machine()}")
        binds = [Path(bind) for bind in image_binds()]
        for index, mount in enumerate(container.mounts):
            target = Path(mount.mount_path)
            if any(target.is_relative_to(bind) for bind in binds) and not target.exists():
                raise PodRefused(
                    f"{path}.volumeMounts[{index}].mountPath",
                    f"{target} lies in a read-only directory that stands in for the image; mount it elsewhere",
                )

    async def prepare(self, pod: Pod) -> Sandbox:
        """Make the Pod's namespace and link, once per uid. Raises OSError where the kernel refuses."""
        if pod.uid not in self.sandboxes:
            if len(self.sandboxes) >= MAX_PODS:
                raise OSError(f"the node runs {MAX_PODS} pods already")
            self.sandboxes[pod.uid] = await asyncio.to_thread(self._create, pod)
        return self.sandboxes[pod.uid]

    def _create(self, pod: Pod) -> Sandbox:
        folder = self._folder / pod.uid
        (folder / "root").mkdir(parents=True, exist_ok=True)
        address = str(next(self._addresses))
        link = f"v{pod.uid.replace('-', '')[:12]}"
        network.detach_pod(link)
        namespace = network.create()
        try:
            network.attach_pod(namespace, address, link)
            sandbox = self.sandbox_type(
                folder=folder,
                namespace=namespace,
                pod_ip=address,
                link=link,
                volume_owner=(ROOT_USER, pod.fs_group or 0),
                fs_group=pod.fs_group,
                hostname=pod.name[:63],
                api_env=self._api_env,
            )
            _write_etc(folder, address, pod.name)
            for volume in pod.volumes:
                if volume.kind == "emptyDir" and volume.memory:
                    _mount_memory(sandbox, volume.name, volume.size_limit)
        except BaseException:
            network.detach_pod(link)
            namespace.close()
            raise
        return sandbox

    async def teardown(self, pod: Pod) -> None:
        """Remove link, namespace, memory and files of the Pod."""
        sandbox = self.sandboxes.pop(pod.uid, None)
        if sandbox is not None:
            await asyncio.to_thread(_remove, sandbox)


def _exec_commands(container: Container) -> set[tuple[str, ...]]:
    """Commands of exec probes and preStop: they join the running container instead of becoming it."""
    probes = (container.startup, container.readiness, container.liveness)
    actions = [probe.action for probe in probes if probe is not None] + [container.pre_stop]
    return {tuple(command) for action in actions if (command := getattr(action, "command", None))}


def _write_etc(folder: Path, address: str, name: str) -> None:
    (folder / "hosts").write_text(f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{address}\t{name}\n")
    (folder / "hostname").write_text(f"{name}\n")
    # There is no cluster DNS here: names fail at once instead of asking the machine's resolver.
    (folder / "resolv.conf").write_text("")
    for file in ("hosts", "hostname", "resolv.conf"):
        (folder / file).chmod(0o644)


def _mount_memory(sandbox: Sandbox, volume: str, size_limit: str) -> None:
    path = sandbox.folder / "memory" / volume
    path.mkdir(parents=True, exist_ok=True)
    size = f",size={parse_bytes(size_limit)}" if size_limit else ""
    options = f"mode=0777,gid={sandbox.volume_owner[1]}{size}".encode()
    if _libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", ctypes.c_ulong(MS_NOSUID_NODEV), options) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount the memory of volume {volume}")
    sandbox.memory_volumes.append(path)


def _remove(sandbox: Sandbox) -> None:
    network.detach_pod(sandbox.link)
    sandbox.namespace.close()
    for path in sandbox.memory_volumes:
        _libc.umount2(os.fsencode(path), MNT_DETACH)
    shutil.rmtree(sandbox.folder, ignore_errors=True)
