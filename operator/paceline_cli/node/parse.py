"""Pod manifest -> `Pod`, or PodRefused with the path of the field that this node does not honour.

Accepted without effect, because another component owns them: scheduling fields (the scheduler), image pull fields (the
image is what this node replaces), ServiceAccount names (admission turns tokens into volumes), `dnsPolicy` ClusterFirst
or Default (names resolve as on the node), `resizePolicy` (no in-place resize), `terminationMessagePath` at its default.
No I/O.
"""

from collections.abc import Mapping
from typing import Any

from paceline_cli.node.fields import Fields
from paceline_cli.node.parse_volumes import parse_volume
from paceline_cli.node.pod import (
    Container,
    EnvFrom,
    EnvVar,
    Exec,
    HttpGet,
    Pod,
    PodRefused,
    Port,
    Probe,
    SecurityContext,
    Sleep,
    TcpSocket,
    VolumeMount,
)

_SCHEDULER = (
    "affinity",
    "nodeSelector",
    "tolerations",
    "topologySpreadConstraints",
    "schedulerName",
    "schedulingGates",
    "priority",
    "priorityClassName",
    "preemptionPolicy",
)


def parse_pod(manifest: Mapping[str, Any]) -> Pod:
    """Raises PodRefused for the first field that cannot be honoured."""
    meta = manifest.get("metadata") or {}
    spec = Fields(manifest.get("spec"), "spec")
    spec.accept(*_SCHEDULER, "imagePullSecrets", "serviceAccount")
    _refuse_host_access(spec)
    context = spec.child("securityContext")
    rights, fs_group = _security(context), context.integer_or_none("fsGroup")
    context.accept("fsGroupChangePolicy")
    context.only("supplementalGroupsPolicy", "Merge")
    context.done()
    volumes = tuple(parse_volume(v) for v in spec.children("volumes"))
    names = {volume.name for volume in volumes}
    pod = Pod(
        namespace=meta.get("namespace", "default"),
        name=meta["name"],
        uid=meta.get("uid", ""),
        labels=meta.get("labels") or {},
        annotations=meta.get("annotations") or {},
        node_name=spec.text("nodeName"),
        service_account=spec.text("serviceAccountName", "default"),
        init_containers=tuple(_init_container(c, rights, names) for c in spec.children("initContainers")),
        containers=tuple(_container(c, rights, names) for c in spec.children("containers")),
        volumes=volumes,
        restart_policy=spec.text("restartPolicy", "Always"),
        grace=spec.integer("terminationGracePeriodSeconds", 30),
        fs_group=fs_group,
        api_access=spec.flag("automountServiceAccountToken", True),
    )
    spec.done()
    if not pod.containers:
        raise PodRefused("spec.containers", "must have at least one container")
    return pod


def _refuse_host_access(spec: Fields) -> None:
    for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "setHostnameAsFQDN"):
        spec.only(key, False)
    spec.only("hostUsers", True)
    spec.only("dnsPolicy", "ClusterFirst", "Default")
    spec.only("enableServiceLinks", False, default=True, why="set it to false, variables of Services are not injected")
    os_name = spec.child("os")
    os_name.only("name", "linux")
    os_name.done()


def _security(fields: Fields, above: SecurityContext | None = None) -> SecurityContext:
    """The keys that Pod and container share; a container's own win over `above`."""
    above = above or SecurityContext()
    seccomp = fields.child("seccompProfile")
    seccomp.only("type", "RuntimeDefault")
    profile = seccomp.text("type")
    seccomp.done()

    def first(own: Any, inherited: Any) -> Any:
        return inherited if own is None else own

    return SecurityContext(
        run_as_user=first(fields.integer_or_none("runAsUser"), above.run_as_user),
        run_as_group=first(fields.integer_or_none("runAsGroup"), above.run_as_group),
        run_as_non_root=first(fields.flag_or_none("runAsNonRoot"), above.run_as_non_root),
        seccomp_profile=profile or above.seccomp_profile,
    )


def _container_security(fields: Fields, above: SecurityContext) -> SecurityContext:
    shared = _security(fields, above)
    fields.only("privileged", False)
    fields.only("procMount", "Default")
    capabilities = fields.child("capabilities")
    dropped = capabilities.strings("drop")
    capabilities.done()
    context = SecurityContext(
        run_as_user=shared.run_as_user,
        run_as_group=shared.run_as_group,
        run_as_non_root=shared.run_as_non_root,
        seccomp_profile=shared.seccomp_profile,
        read_only_root=fields.flag_or_none("readOnlyRootFilesystem"),
        allow_privilege_escalation=fields.flag_or_none("allowPrivilegeEscalation"),
        drop_capabilities=dropped,
    )
    fields.done()
    return context


def _init_container(fields: Fields, rights: SecurityContext, volumes: set[str]) -> Container:
    for key in ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "restartPolicy"):
        if fields.has(key):
            raise PodRefused(f"{fields.path}.{key}", "init containers run once, sidecars are not honoured")
    return _container(fields, rights, volumes)


def _container(fields: Fields, rights: SecurityContext, volumes: set[str]) -> Container:
    fields.accept("imagePullPolicy", "resizePolicy")
    for key in ("stdin", "stdinOnce", "tty"):
        fields.only(key, False)
    fields.only("terminationMessagePath", "/dev/termination-log")
    fields.only("terminationMessagePolicy", "File", "FallbackToLogsOnError")
    if not fields.has("command"):
        raise PodRefused(f"{fields.path}.command", "required: the entrypoint of an image is not known here")
    resources = fields.child("resources")
    container = Container(
        name=fields.text("name"),
        image=fields.text("image"),
        command=fields.strings("command"),
        args=fields.strings("args"),
        working_dir=fields.text("workingDir"),
        env=tuple(_env_var(e) for e in fields.children("env")),
        env_from=tuple(_env_from(e) for e in fields.children("envFrom")),
        ports=tuple(_port(p) for p in fields.children("ports")),
        mounts=tuple(_mount(m, volumes) for m in fields.children("volumeMounts")),
        startup=_probe(fields, "startupProbe"),
        readiness=_probe(fields, "readinessProbe"),
        liveness=_probe(fields, "livenessProbe"),
        pre_stop=_pre_stop(fields.child("lifecycle")),
        requests=resources.texts("requests"),
        limits=resources.texts("limits"),
        security=_container_security(fields.child("securityContext"), rights),
        log_tail_on_error=fields.text("terminationMessagePolicy") == "FallbackToLogsOnError",
    )
    resources.done()
    fields.done()
    return container


def _port(fields: Fields) -> Port:
    fields.only("protocol", "TCP")
    for key in ("hostPort", "hostIP"):
        if fields.has(key):
            raise PodRefused(f"{fields.path}.{key}", "host ports are not honoured; use a Service")
    port = Port(name=fields.text("name"), port=fields.integer("containerPort", 0))
    fields.done()
    return port


def _env_var(fields: Fields) -> EnvVar:
    name, value = fields.text("name"), fields.text("value")
    source = fields.child("valueFrom")
    fields.done()
    for key, kind in (("secretKeyRef", "secret"), ("configMapKeyRef", "configMap")):
        if source.has(key):
            ref = source.child(key)
            found = EnvVar(name, "", kind, ref.text("name"), ref.text("key"), ref.flag("optional"))
            ref.done()
            source.done()
            return found
    if source.has("fieldRef"):
        ref = source.child("fieldRef")
        ref.only("apiVersion", "v1")
        found = EnvVar(name, "", "field", ref.text("fieldPath"))
    elif source.has("resourceFieldRef"):
        ref = source.child("resourceFieldRef")
        ref.only("divisor", "1", "0", 1, 0)
        found = EnvVar(name, "", "resource", ref.text("resource"), ref.text("containerName"))
    else:
        source.done()
        return EnvVar(name, value)
    ref.done()
    source.done()
    return found


def _env_from(fields: Fields) -> EnvFrom:
    prefix = fields.text("prefix")
    kind = "secret" if fields.has("secretRef") else "configMap"
    ref = fields.child(f"{kind}Ref")
    found = EnvFrom(kind, ref.text("name"), prefix, ref.flag("optional"))
    ref.done()
    fields.done()
    return found


def _mount(fields: Fields, volumes: set[str]) -> VolumeMount:
    fields.only("mountPropagation", "None")
    fields.only("recursiveReadOnly", "Disabled")
    mount = VolumeMount(
        name=fields.text("name"),
        mount_path=fields.text("mountPath").rstrip("/"),
        read_only=fields.flag("readOnly"),
        sub_path=fields.text("subPath"),
    )
    fields.done()
    if mount.name not in volumes:
        raise PodRefused(f"{fields.path}.name", f"no volume is named {mount.name}")
    if not mount.mount_path.startswith("/") or ".." in mount.mount_path.split("/"):
        raise PodRefused(f"{fields.path}.mountPath", "must be an absolute path below / without ..")
    if mount.sub_path.startswith("/") or ".." in mount.sub_path.split("/"):
        raise PodRefused(f"{fields.path}.subPath", "must be a relative path without ..")
    return mount


def _http_get(fields: Fields) -> HttpGet:
    fields.only("scheme", "HTTP", "HTTPS")
    headers = tuple((h.text("name"), h.text("value")) for h in fields.children("httpHeaders"))
    action = HttpGet(
        fields.port("port"), fields.text("path", "/"), fields.text("scheme", "HTTP"), fields.text("host"), headers
    )
    fields.done()
    return action


def _exec(fields: Fields) -> Exec:
    action = Exec(fields.strings("command"))
    fields.done()
    if not action.command:
        raise PodRefused(f"{fields.path}.command", "required")
    return action


def _probe(container: Fields, key: str) -> Probe | None:
    if not container.has(key):
        return None
    fields = container.child(key)
    action: HttpGet | TcpSocket | Exec
    if fields.has("httpGet"):
        action = _http_get(fields.child("httpGet"))
    elif fields.has("tcpSocket"):
        socket = fields.child("tcpSocket")
        action = TcpSocket(socket.port("port"), socket.text("host"))
        socket.done()
    elif fields.has("exec"):
        action = _exec(fields.child("exec"))
    else:
        raise PodRefused(fields.path, "must have httpGet, tcpSocket or exec (grpc is not honoured)")
    probe = Probe(
        action=action,
        initial_delay=fields.integer("initialDelaySeconds", 0),
        period=fields.integer("periodSeconds", 10),
        timeout=fields.integer("timeoutSeconds", 1),
        failure_threshold=fields.integer("failureThreshold", 3),
        success_threshold=fields.integer("successThreshold", 1),
        grace=fields.integer_or_none("terminationGracePeriodSeconds"),
    )
    fields.done()
    return probe


def _pre_stop(lifecycle: Fields) -> HttpGet | Exec | Sleep | None:
    fields = lifecycle.child("preStop")
    lifecycle.done()
    action: HttpGet | Exec | Sleep | None = None
    if fields.has("exec"):
        action = _exec(fields.child("exec"))
    elif fields.has("httpGet"):
        action = _http_get(fields.child("httpGet"))
    elif fields.has("sleep"):
        sleep = fields.child("sleep")
        action = Sleep(sleep.integer("seconds", 0))
        sleep.done()
    fields.done()
    return action
