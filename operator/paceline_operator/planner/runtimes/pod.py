"""The engine container of another engine software, and the hook that drains it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from paceline_api.kube import Manifest
from paceline_api.names import INTERNAL_TOKEN_KEY, INTERNAL_TOKEN_SECRET, PORT_HTTP, port_env
from paceline_api.v1alpha1 import InferenceService
from paceline_operator.planner import pods
from paceline_operator.planner.runtimes.base import ForeignRuntime, Launch, startup_probe

# Routers hear of a deletion within this time and send nothing more.
ENDPOINT_LAG_S = 2
_USER = "paceline"


def foreign_container(
    runtime: ForeignRuntime,
    service: InferenceService,
    *,
    name: str,
    image: str,
    ports: Mapping[str, int],
    drain_s: int,
    startup_budget_s: int,
) -> Manifest:
    """The container without what all engines have alike: resources, credentials and mounts."""
    launch = runtime.launch(service)
    patience = launch.probe_timeout_s
    return {
        "name": name,
        "image": image,
        **({"command": list(launch.command)} if launch.command else {}),
        "args": list(launch.args),
        "env": _env(launch, ports),
        "ports": pods.ports(ports),
        "securityContext": pods.container_security(),
        "lifecycle": {"preStop": {"exec": {"command": drain_command(drain_s)}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "startupProbe": launch.startup or startup_probe(launch.ready, startup_budget_s, patience),
        "readinessProbe": pods.http_probe(launch.ready, PORT_HTTP, period_s=2, timeout_s=patience, failures=2),
        "livenessProbe": pods.http_probe(launch.live, PORT_HTTP, period_s=10, timeout_s=max(5, patience), failures=6),
    }


def first_containers(runtime: ForeignRuntime, service: InferenceService, container: Manifest) -> list[Manifest]:
    """Containers that run to their end before the engine's, with its image, variables and volumes."""
    shared = ("image", "env", "envFrom", "resources", "securityContext", "volumeMounts", "terminationMessagePolicy")
    return [
        {"name": name, "command": list(command), **{key: container[key] for key in shared if key in container}}
        for name, command in runtime.launch(service).init
    ]


def drain_command(drain_s: int) -> list[str]:
    """Waits until no client is connected to the engine's port, at most `drain_s` seconds.

    Engines have no common way to say that nothing is in flight, but the kernel has one: routers close a connection a
    few seconds after its last answer. Needs only a shell; without /proc/net (macOS) it waits for the lag alone.
    """
    line = (
        f'sleep {min(ENDPOINT_LAG_S, drain_s)}; port=$(printf ":%04X" "${port_env(PORT_HTTP)}"); n={ENDPOINT_LAG_S}; '
        f"while [ $n -lt {drain_s} ] && cat /proc/net/tcp /proc/net/tcp6 2> /dev/null | "
        'grep -q "$port [0-9A-F]*:[0-9A-F]* 01 "; do sleep 1; n=$((n + 1)); done'
    )
    return ["/bin/sh", "-c", line]


def _env(launch: Launch, ports: Mapping[str, int]) -> list[Manifest]:
    # Libraries look the user up by name, which a user of the pod's number has only here.
    own = [*pods.base_env(ports, token_file=None), {"name": "USER", "value": _USER}]
    given: list[Manifest] = [{"name": name, "value": value} for name, value in launch.env.items()]
    if launch.token_env:
        source = {"secretKeyRef": {"name": INTERNAL_TOKEN_SECRET, "key": INTERNAL_TOKEN_KEY}}
        given.append({"name": launch.token_env, "valueFrom": source})
    return own + given
