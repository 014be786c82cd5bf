"""The status of a Pod exactly as a kubelet reports it, computed from a view of its containers. Pure.

Sources: Kubernetes "Pod Lifecycle" (phases, conditions), the kubelet's `getPhase` and
`GenerateContainersReadyCondition`. Times are RFC 3339 strings handed in by the caller.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not started, or between two runs."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Running:
    """Started at `started_at`."""

    started_at: str


@dataclass(frozen=True, slots=True)
class Terminated:
    """One finished run."""

    exit_code: int
    reason: str
    started_at: str
    finished_at: str
    signal: int = 0
    message: str = ""
    container_id: str = ""


State = Waiting | Running | Terminated


@dataclass(frozen=True, slots=True)
class ContainerView:
    """What is known of one container now."""

    name: str
    image: str
    state: State
    last_state: Terminated | None = None
    restart_count: int = 0
    ready: bool = False
    started: bool = False
    container_id: str = ""


@dataclass(frozen=True, slots=True)
class PodView:
    """What is known of one pod now. Empty addresses: not prepared yet."""

    containers: Sequence[ContainerView]
    init_containers: Sequence[ContainerView] = ()
    restart_policy: str = "Always"
    pod_ip: str = ""
    host_ip: str = ""
    start_time: str = ""
    scheduled_time: str = ""
    failure: tuple[str, str] | None = None
    """(reason, message) of a pod that the node ended itself: phase Failed."""


def pod_status(view: PodView, now: str, previous: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`status` of the Pod; transition times are kept from `previous` where a condition did not change."""
    phase = _phase(view)
    status: dict[str, Any] = {"phase": phase, "conditions": _conditions(view, phase, now, previous or {})}
    if view.failure:
        status["reason"], status["message"] = view.failure
    if view.host_ip:
        status |= {"hostIP": view.host_ip, "hostIPs": [{"ip": view.host_ip}]}
    if view.pod_ip:
        status |= {"podIP": view.pod_ip, "podIPs": [{"ip": view.pod_ip}]}
    if view.start_time:
        status["startTime"] = view.start_time
    if view.init_containers:
        status["initContainerStatuses"] = [_container(c) for c in view.init_containers]
    status["containerStatuses"] = [_container(c) for c in view.containers]
    return status


def _initialized(view: PodView) -> bool:
    return all(isinstance(c.state, Terminated) and c.state.exit_code == 0 for c in view.init_containers)


def _phase(view: PodView) -> str:
    if view.failure:
        return "Failed"
    if not _initialized(view):
        failed = any(isinstance(c.state, Terminated) and c.state.exit_code for c in view.init_containers)
        return "Failed" if failed and view.restart_policy == "Never" else "Pending"
    states = [c.state for c in view.containers]
    # "Waiting" before the first run is Pending; between two runs the pod counts as Running.
    if any(isinstance(c.state, Waiting) and c.last_state is None for c in view.containers):
        return "Pending"
    if all(isinstance(state, Terminated) for state in states):
        ok = all(isinstance(state, Terminated) and state.exit_code == 0 for state in states)
        if view.restart_policy == "Always":
            return "Running"
        return "Succeeded" if ok else "Failed"
    return "Running"


def _conditions(view: PodView, phase: str, now: str, previous: Mapping[str, Any]) -> list[dict[str, Any]]:
    unready = [c.name for c in view.containers if not c.ready]
    incomplete = [c.name for c in view.init_containers if not _done(c)]
    ready = _verdict(unready, "ContainersNotReady", "containers with unready status")
    if phase in ("Succeeded", "Failed") and unready:
        ready = ("False", "PodCompleted" if phase == "Succeeded" else "PodFailed", "")
    wanted = {
        "PodReadyToStartContainers": ("True" if view.pod_ip else "False", "", ""),
        "Initialized": _verdict(incomplete, "ContainersNotInitialized", "containers with incomplete status"),
        "Ready": ready,
        "ContainersReady": ready,
        "PodScheduled": ("True", "", ""),
    }
    known = {c.get("type"): c for c in previous.get("conditions") or []}
    return [_condition(kind, verdict, now, known.get(kind), view) for kind, verdict in wanted.items()]


def _done(container: ContainerView) -> bool:
    return isinstance(container.state, Terminated) and container.state.exit_code == 0


def _verdict(names: Iterable[str], reason: str, message: str) -> tuple[str, str, str]:
    listed = " ".join(names)
    return ("False", reason, f"{message}: [{listed}]") if listed else ("True", "", "")


def _condition(
    kind: str, verdict: tuple[str, str, str], now: str, before: Mapping[str, Any] | None, view: PodView
) -> dict[str, Any]:
    status, reason, message = verdict
    since = now
    if before and before.get("status") == status:
        since = before.get("lastTransitionTime") or now
    elif kind == "PodScheduled" and view.scheduled_time:
        since = view.scheduled_time
    condition: dict[str, Any] = {"type": kind, "status": status, "lastProbeTime": None, "lastTransitionTime": since}
    if reason:
        condition["reason"] = reason
    if message:
        condition["message"] = message
    return condition


def _container(view: ContainerView) -> dict[str, Any]:
    return {
        "name": view.name,
        "image": view.image,
        "imageID": "",
        "containerID": view.container_id,
        "state": _state(view.state),
        "lastState": _state(view.last_state) if view.last_state else {},
        "ready": view.ready,
        "started": view.started,
        "restartCount": view.restart_count,
    }


def _state(state: State) -> dict[str, Any]:
    match state:
        case Waiting():
            waiting = {"reason": state.reason}
            return {"waiting": waiting | ({"message": state.message} if state.message else {})}
        case Running():
            return {"running": {"startedAt": state.started_at}}
        case Terminated():
            ended: dict[str, Any] = {
                "exitCode": state.exit_code,
                "reason": state.reason,
                "startedAt": state.started_at,
                "finishedAt": state.finished_at,
            }
            more = {"signal": state.signal, "message": state.message, "containerID": state.container_id}
            ended |= {key: value for key, value in more.items() if value}
            return {"terminated": ended}
