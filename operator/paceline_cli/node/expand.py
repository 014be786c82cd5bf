"""`$(VAR)` expansion and the environment of a container, as a kubelet computes them.

Rules (Kubernetes, "Define dependent environment variables"): `$(NAME)` becomes the value of a variable defined before,
an unknown name stays as written, `$$` is a literal `$`. envFrom comes first and is overridden by env; env values see
earlier `env` entries; command and args see everything. Reads objects only through ContentSource.
"""

import re
from collections.abc import Mapping, Sequence
from math import ceil

from paceline_api.quantity import parse_quantity
from paceline_cli.node.base import ContentSource, PodEnvironment
from paceline_cli.node.pod import Container, EnvFrom, EnvVar, Pod

_REFERENCE = re.compile(r"\$(\$|\(([^()]*)\))")
_INDEXED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class ConfigError(Exception):
    """Something the container refers to is missing; retried, reported as CreateContainerConfigError."""


def expand(text: str, env: Mapping[str, str]) -> str:
    """`text` with `$(NAME)` replaced from `env`."""

    def value(match: re.Match[str]) -> str:
        if match.group(1) == "$":
            return "$"
        return env.get(match.group(2), match.group(0))

    return _REFERENCE.sub(value, text)


def expand_all(words: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """`expand` of every word."""
    return tuple(expand(word, env) for word in words)


def field_value(pod: Pod, environment: PodEnvironment, path: str) -> str:
    """Value of a downward API field; ConfigError for a path that a kubelet would not know."""
    known = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "metadata.uid": pod.uid,
        "spec.nodeName": pod.node_name,
        "spec.serviceAccountName": pod.service_account,
        "status.hostIP": environment.host_ip,
        "status.hostIPs": environment.host_ip,
        "status.podIP": environment.pod_ip,
        "status.podIPs": environment.pod_ip,
        "metadata.labels": _lines(pod.labels),
        "metadata.annotations": _lines(pod.annotations),
    }
    if path in known:
        return known[path]
    match = _INDEXED.fullmatch(path)
    if match is None:
        raise ConfigError(
            f"fieldPath {path} is not known: use metadata.name, status.podIP or another downward API field"
        )
    table = pod.labels if match.group(1) == "labels" else pod.annotations
    return table.get(match.group(2), "")


def _lines(table: Mapping[str, str]) -> str:
    # The downward API writes one key="escaped value" a line, sorted.
    return "\n".join(
        '{}="{}"'.format(key, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for key, value in sorted(table.items())
    )


def resource_value(pod: Pod, capacity: Mapping[str, str], container: str, resource: str) -> str:
    """Value of `limits.cpu` and the like with divisor 1, rounded up; a limit that is not set is the node's capacity."""
    found = next((c for c in (*pod.containers, *pod.init_containers) if c.name == container), None)
    kind, _, name = resource.partition(".")
    if found is None or kind not in ("limits", "requests") or not name:
        raise ConfigError(f"resourceFieldRef {container}/{resource} is not known")
    table = found.limits if kind == "limits" else found.requests
    default = capacity.get(name, "0") if kind == "limits" else "0"
    return str(ceil(parse_quantity(table.get(name, default))))


async def container_env(
    container: Container,
    pod: Pod,
    environment: PodEnvironment,
    content: ContentSource,
    capacity: Mapping[str, str],
) -> dict[str, str]:
    """The container's whole declared environment; raises ConfigError for a missing reference."""
    result = {"HOSTNAME": pod.name}
    for source in container.env_from:
        result.update(await _env_from(source, pod, content))
    overrides = environment.env(container)
    # Overrides stand before everything else so that `$(PACELINE_PORT_HTTP)` in env values sees them.
    seen: dict[str, str] = dict(overrides)
    for var in container.env:
        if var.name in overrides:
            continue
        value = await _env_value(var, container, pod, environment, content, capacity, seen)
        if value is not None:
            seen[var.name] = value
    return result | seen


async def _env_from(source: EnvFrom, pod: Pod, content: ContentSource) -> dict[str, str]:
    data = await _data(source.source, source.ref, pod, content)
    if data is None:
        if source.optional:
            return {}
        raise ConfigError(f"{source.source.lower()} {source.ref!r} not found")
    return {source.prefix + key: value.decode() for key, value in data.items()}


async def _env_value(
    var: EnvVar,
    container: Container,
    pod: Pod,
    environment: PodEnvironment,
    content: ContentSource,
    capacity: Mapping[str, str],
    seen: Mapping[str, str],
) -> str | None:
    if var.source == "":
        return expand(var.value, seen)
    if var.source == "field":
        return field_value(pod, environment, var.ref)
    if var.source == "resource":
        return resource_value(pod, capacity, var.key or container.name, var.ref)
    data = await _data(var.source, var.ref, pod, content)
    if data is not None and var.key in data:
        return data[var.key].decode()
    if var.optional:
        return None
    what = f"{var.source.lower()} {var.ref!r} not found"
    if data is not None:
        what = f"couldn't find key {var.key} in {var.source.lower()} {pod.namespace}/{var.ref}"
    raise ConfigError(what)


async def _data(source: str, name: str, pod: Pod, content: ContentSource) -> Mapping[str, bytes] | None:
    if source == "secret":
        return await content.secret(pod.namespace, name)
    return await content.config_map(pod.namespace, name)
