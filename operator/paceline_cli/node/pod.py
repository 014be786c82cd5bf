"""A Pod as the process node understands it: frozen records, no dicts, no API defaults left open.

Why: the rest of the node reads attributes and never asks what a missing key means. `parse.py` builds these records and
refuses whatever they cannot express. Imports nothing of Kubernetes and does no I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

PodKey = tuple[str, str]
"""(namespace, name)."""


class PodRefused(Exception):
    """A Pod asks for something this node cannot honour. `path` is the field, e.g. `spec.containers[0].tty`."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


@dataclass(frozen=True, slots=True)
class SecurityContext:
    """Rights of a process; None = unset. A container's values already win over its Pod's."""

    run_as_user: int | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None
    read_only_root: bool | None = None
    allow_privilege_escalation: bool | None = None
    drop_capabilities: tuple[str, ...] = ()
    seccomp_profile: str | None = None


@dataclass(frozen=True, slots=True)
class Port:
    """One named containerPort (TCP only)."""

    name: str
    port: int


@dataclass(frozen=True, slots=True)
class EnvVar:
    """`value` (before `$(VAR)` expansion) or exactly one reference: (kind, object or path, key, optional)."""

    name: str
    value: str = ""
    source: str = ""
    """"" | "field" | "resource" | "secret" | "configMap"."""
    ref: str = ""
    """Field path, resource name, or the Secret's or ConfigMap's name."""
    key: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class EnvFrom:
    """All keys of a Secret or ConfigMap as variables, each with `prefix`."""

    source: str
    ref: str
    prefix: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """Volume `name` seen at `mount_path`; `sub_path` is relative to the volume's root."""

    name: str
    mount_path: str
    read_only: bool = False
    sub_path: str = ""


@dataclass(frozen=True, slots=True)
class HttpGet:
    """GET; 200..399 is success. `port` is a number or a port's name; host "" is the pod's own IP."""

    port: int | str
    path: str = "/"
    scheme: str = "HTTP"
    host: str = ""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """Success = the connection opens."""

    port: int | str
    host: str = ""


@dataclass(frozen=True, slots=True)
class Exec:
    """Runs in the container's environment; exit code 0 is success."""

    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sleep:
    """preStop only; seconds."""

    seconds: int


@dataclass(frozen=True, slots=True)
class Probe:
    """A kubelet probe; times in seconds, defaults as the API server sets them."""

    action: HttpGet | TcpSocket | Exec
    initial_delay: int = 0
    period: int = 10
    timeout: int = 1
    failure_threshold: int = 3
    success_threshold: int = 1
    grace: int | None = None
    """terminationGracePeriodSeconds of the probe: used in place of the pod's when this probe kills."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container. `command` is argv[0:] before `args`; both before `$(VAR)` expansion."""

    name: str
    command: tuple[str, ...]
    args: tuple[str, ...] = ()
    image: str = ""
    working_dir: str = ""
    env: tuple[EnvVar, ...] = ()
    env_from: tuple[EnvFrom, ...] = ()
    ports: tuple[Port, ...] = ()
    mounts: tuple[VolumeMount, ...] = ()
    startup: Probe | None = None
    readiness: Probe | None = None
    liveness: Probe | None = None
    pre_stop: HttpGet | Exec | Sleep | None = None
    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    security: SecurityContext = SecurityContext()
    log_tail_on_error: bool = False
    """terminationMessagePolicy: FallbackToLogsOnError."""


@dataclass(frozen=True, slots=True)
class VolumeItem:
    """One file of a volume. `key`: the key of a Secret or ConfigMap, or the downward API's field path.

    Source "resource" has "<container>/<resource>" as key.
    """

    key: str
    path: str
    mode: int | None = None
    source: str = "key"


@dataclass(frozen=True, slots=True)
class VolumeSourceSpec:
    """One source of files. kind: configMap | secret | downwardAPI | serviceAccountToken."""

    kind: str
    ref: str = ""
    items: tuple[VolumeItem, ...] = ()
    """Empty for configMap and secret = every key under its own name."""
    optional: bool = False
    audience: str = ""
    expiration: int = 3600


@dataclass(frozen=True, slots=True)
class Volume:
    """kind: emptyDir | files. `sources` has one entry for a plain volume, several for a projected one."""

    name: str
    kind: str
    sources: tuple[VolumeSourceSpec, ...] = ()
    default_mode: int = 0o644
    memory: bool = False
    """emptyDir medium Memory."""
    size_limit: str = ""


@dataclass(frozen=True, slots=True)
class Pod:
    """A bound Pod, as far as the node acts on it."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    node_name: str
    service_account: str
    containers: tuple[Container, ...]
    init_containers: tuple[Container, ...] = ()
    volumes: tuple[Volume, ...] = ()
    restart_policy: str = "Always"
    grace: int = 30
    """terminationGracePeriodSeconds."""
    fs_group: int | None = None
    api_access: bool = True
    """automountServiceAccountToken: whether the pod may talk to the API."""

    @property
    def key(self) -> PodKey:
        """(namespace, name)."""
        return (self.namespace, self.name)
