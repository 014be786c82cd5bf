"""Host isolation: pods as plain processes of the user on a laptop (Linux, macOS), without root and without namespaces.

What stands in for what:
- the pod's address is 127.0.0.1; each containerPort becomes a loopback port that is stable for the pod. PACELINE_HOST
  and PACELINE_PORT_<NAME> tell the process; probes and the reported spec (`report_ports`) use the same numbers;
- a volume is a directory; arguments, environment values and the working directory that equal a mountPath, start with
  one or carry one after `=` are rewritten to it;
- a volume that is to outlive the pod is a folder of `KeptFolders`;
- texts in JSON files of ConfigMaps are rewritten like arguments, and so is tcp://NAME.NAMESPACE.svc:PORT of a KV node
  server: names of Services lead nowhere here, so its pod gets the loopback port that stands in for its Service;
- rights: runAsNonRoot, runAsUser, runAsGroup, fsGroup, seccompProfile RuntimeDefault, dropped capabilities and
  readOnlyRootFilesystem ask for fewer rights than a container has by default. The process gets exactly the rights of
  the user who started the node and no way to more (allowPrivilegeEscalation false sets no_new_privs on Linux), so these
  are accepted. Anything that asks for more is refused, by `parse` or here;
- cpu and memory requests and limits: there are no cgroups, the user's whole machine is the bound. Devices that the node
  was not told of are refused.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline_api.names import ENV_HOST, PORT_KV, port_env
from paceline_cli.node.base import Command, Mount
from paceline_cli.node.kept import KeptFolders
from paceline_cli.node.pod import Container, Pod, PodRefused

LOOPBACK = "127.0.0.1"
# Below the ephemeral ranges of Linux (32768) and macOS (49152), so that outgoing connections never take a port first.
_FIRST_PORT, _LAST_PORT = 20000, 31999
_PLAIN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_PASSED_ON = (
    "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
)  # fmt: skip

_SERVICE_ADDRESS = re.compile(r"tcp://([a-z0-9-]+)\.([a-z0-9-]+)\.svc:[0-9]+")

FixedPort = Callable[[Pod, str], int | None]
"""(pod, port name) -> a port number that the caller wants, or None."""


def port_is_free(port: int, host: str = LOOPBACK) -> bool:
    """True if nothing listens on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is free, one with a listener is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


class HostEnvironment:
    """What a pod was given on the host; see `PodEnvironment`."""

    pod_ip = LOOPBACK
    host_ip = LOOPBACK
    volume_owner = None

    def __init__(self, ports: Mapping[int, int], isolation: "HostIsolation", api_env: Mapping[str, str]) -> None:
        self.ports = ports
        self._api_env = api_env
        self._isolation = isolation

    def port(self, container_port: int) -> int:
        """The loopback port that stands in for `container_port`."""
        return self.ports.get(container_port, container_port)

    def env(self, container: Container) -> dict[str, str]:
        """Host and ports to listen on."""
        named = {port_env(port.name): str(self.port(port.port)) for port in container.ports if port.name}
        return {ENV_HOST: LOOPBACK} | named

    def volume_path(self, pod: Pod, volume: str) -> Path | None:
        """The caller's directory for the mountPath of an emptyDir, if it named one."""
        if not any(v.name == volume and v.kind == "emptyDir" for v in pod.volumes):
            return None
        if (kept := self._isolation.kept_path(pod, volume)) is not None:
            return kept
        paths = {m.mount_path for c in pod.containers for m in c.mounts if m.name == volume and not m.sub_path}
        return next((self._isolation.stand_ins[p] for p in sorted(paths) if p in self._isolation.stand_ins), None)

    def config(self, path: str, data: bytes, mounts: tuple[Mount, ...]) -> bytes:
        """JSON with its texts rewritten; any other file as it is."""
        if not path.endswith(".json"):
            return data

        def here(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: here(inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [here(inner) for inner in value]
            return self._isolation.reachable(rewrite(value, mounts)) if isinstance(value, str) else value

        try:
            return json.dumps(here(json.loads(data))).encode()
        except ValueError:
            return data

    def command(self, container: Container, command: Command, mounts: tuple[Mount, ...]) -> Command:
        """Paths rewritten, the program looked up, the few variables of the user's session that programs need."""
        env = {key: rewrite(value, mounts) for key, value in command.env.items()}
        argv = [rewrite(word, mounts) for word in command.argv]
        base = {**self._isolation.base_env(), **self._api_env}
        argv[0] = self._isolation.program(argv[0], env.get("PATH", base["PATH"]))
        cwd = rewrite(command.cwd, mounts) if command.cwd else None
        return Command(tuple(argv), base | env, cwd, command.signal_group)


class HostIsolation:
    """`stand_ins`: mountPath -> directory kept across pods. `devices`: extended resources that this machine has.

    `api_env`: variables (KUBECONFIG) for pods that a cluster would give a ServiceAccount token.
    """

    def __init__(
        self,
        *,
        fixed_port: FixedPort = lambda pod, port: None,
        stand_ins: Mapping[str, Path] | None = None,
        kept: KeptFolders | None = None,
        api_env: Mapping[str, str] | None = None,
        devices: Iterable[str] = (),
        bin_dir: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.stand_ins = dict(stand_ins or {})
        self._kept = kept
        self._service_ports: dict[tuple[str, str], int] = {}
        self._api_env = dict(api_env or {})
        self._fixed_port = fixed_port
        self._devices = frozenset(devices)
        # Not resolved: in a virtual environment python is a link to an interpreter elsewhere.
        self._bin_dir = bin_dir or Path(sys.executable).parent
        self._environ = os.environ if environ is None else environ
        self._taken: dict[int, str] = {}
        self._environments: dict[str, HostEnvironment] = {}

    def check(self, pod: Pod) -> None:
        """Raises PodRefused for devices that are not here and for memory-backed volumes."""
        for index, container in enumerate(pod.containers):
            for name in sorted({*container.requests, *container.limits} - {*_PLAIN_RESOURCES, *self._devices}):
                path = f"spec.containers[{index}].resources.limits[{name}]"
                raise PodRefused(path, "this machine has no such device; remove it or choose another device")
        for index, volume in enumerate(pod.volumes):
            if volume.memory:
                raise PodRefused(f"spec.volumes[{index}].emptyDir.medium", "Memory needs a mount; not honoured here")

    def reserve(self, pod: Pod) -> HostEnvironment:
        """Idempotent per pod uid; raises OSError naming a wanted port that another program has."""
        known = self._environments.get(pod.uid)
        if known is None:
            if self._kept is not None:
                self._kept.claim(pod)
            ports: dict[int, int] = {}
            for container in pod.containers:
                for port in container.ports:
                    ports[port.port] = self._allocate(pod, port.name, port.port)
            known = self._environments[pod.uid] = HostEnvironment(ports, self, self._api_env if pod.api_access else {})
        return known

    async def prepare(self, pod: Pod) -> HostEnvironment:
        """`reserve`."""
        return self.reserve(pod)

    async def teardown(self, pod: Pod) -> None:
        """Gives the ports back."""
        if self._kept is not None:
            self._kept.release(pod)
        self._environments.pop(pod.uid, None)
        self._taken = {port: uid for port, uid in self._taken.items() if uid != pod.uid}

    def kept_path(self, pod: Pod, volume: str) -> Path | None:
        """The folder that outlives the pod, if the volume has one."""
        return None if self._kept is None else self._kept.path(pod, volume)

    def reachable(self, text: str) -> str:
        """`text`, or where a node server is if it is the address of its Service."""
        match = _SERVICE_ADDRESS.fullmatch(text)
        return f"tcp://{LOOPBACK}:{self._service_port(match[2], match[1])}" if match else text

    def _service_port(self, namespace: str, name: str) -> int:
        """The loopback port of a Service's only pod, the same while this runs."""
        known = self._service_ports.get((namespace, name))
        if known is None:
            owner = f"service {namespace}/{name}"
            known = self._service_ports[namespace, name] = self._free_port(owner)
            self._taken[known] = owner
        return known

    def _allocate(self, pod: Pod, name: str, container_port: int) -> int:
        if name == PORT_KV:
            # A node server's Service and ServiceAccount have one name. While the old pod ends, the new one waits.
            port = self._service_port(pod.namespace, pod.service_account)
            if not port_is_free(port):
                raise OSError(f"port {port} is still taken: by the server that this one replaces, or another program")
            return port
        wanted = self._fixed_port(pod, name)
        # While a new pod replaces an old one both live: the newcomer takes a port of its own.
        if wanted is not None and wanted not in self._taken:
            if not port_is_free(wanted):
                raise OSError(f"port {wanted} is taken by another program: stop it or choose another port")
            self._taken[wanted] = pod.uid
            return wanted
        port = self._free_port(f"{pod.uid}/{container_port}")
        self._taken[port] = pod.uid
        return port

    def _free_port(self, text: str) -> int:
        """One that depends on the text and on what is taken."""
        size = _LAST_PORT - _FIRST_PORT + 1
        seed = hashlib.blake2b(text.encode(), digest_size=4).digest()
        for step in range(size):
            port = _FIRST_PORT + (int.from_bytes(seed, "big") + step) % size
            if port not in self._taken and port_is_free(port):
                return port
        raise OSError(f"no free port between {_FIRST_PORT} and {_LAST_PORT}")

    def base_env(self) -> dict[str, str]:
        """The part of the user's environment that is passed on; the rest (tokens, shell settings) stays out."""
        path = os.pathsep.join([str(self._bin_dir), self._environ.get("PATH", os.defpath)])
        return {key: self._environ[key] for key in _PASSED_ON if key in self._environ} | {"PATH": path}

    def program(self, name: str, path: str) -> str:
        """The file to run: beside this Python first, then on `path`. FileNotFoundError says where it looked."""
        if os.sep in name:
            return name
        found = shutil.which(name, path=os.pathsep.join([str(self._bin_dir), path]))
        if found is None:
            raise FileNotFoundError(f"{name} was not found in {self._bin_dir} nor on PATH: install it")
        return found


def rewrite(text: str, mounts: Iterable[Mount]) -> str:
    """`text` with a leading mountPath, or one after the first `=`, replaced by the directory that stands in for it."""
    head, equals, tail = text.partition("=")
    for mount in sorted(mounts, key=lambda m: len(m.mount_path), reverse=True):
        for prefix, value in (("", text), (head + equals, tail)):
            if value == mount.mount_path or value.startswith(mount.mount_path + "/"):
                return f"{prefix}{mount.host_path}{value[len(mount.mount_path) :]}"
    return text


def report_ports(manifest: Mapping[str, Any], environment: HostEnvironment) -> dict[str, Any]:
    """The Pod with the ports that its processes really listen on, so that named targetPorts of Services resolve."""
    spec = dict(manifest["spec"])
    spec["containers"] = [
        {
            **container,
            "ports": [
                {**p, "containerPort": environment.port(p["containerPort"])} for p in container.get("ports") or []
            ],
        }
        if container.get("ports")
        else container
        for container in spec["containers"]
    ]
    return {**manifest, "spec": spec}
