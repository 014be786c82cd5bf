"""What is going on, as rows for a table: objects with their conditions, pods with their processes. Pure.

Reads manifests as the API has them, so that what `paceline up` shows is what `kubectl get` would show.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from paceline_api.kube import Manifest

SCALED_TO_ZERO = "ScaledToZero"
TROUBLE_LINES = 6
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d[T ][\d:.,]+Z? +(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) +[\w.]+: ")
_WAITING_WELL = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """An object of the API and its Ready condition; `settled` = its status is about its current generation."""

    kind: str
    name: str
    ready: str
    reason: str
    message: str
    settled: bool = True
    stalled: bool = False
    url: str = ""

    @property
    def label(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Trouble:
    """A pod that cannot run: why, the end of its log, and where the log is. `times` counts its restarts."""

    pod: str
    times: int
    reason: str
    lines: tuple[str, ...]
    log: str


@dataclass(frozen=True, slots=True)
class PodRow:
    """A pod. `note` is what its process says while it is not ready; `port` None = none given yet."""

    name: str
    ready: bool
    state: str
    restarts: int
    port: int | None
    age_s: float
    note: str = ""
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True)
class View:
    """One moment. `ready` = every InferenceService serves, or is meant to be at zero replicas."""

    objects: tuple[ObjectRow, ...]
    pods: tuple[PodRow, ...]
    ready: bool

    @property
    def troubles(self) -> list[Trouble]:
        return [pod.trouble for pod in self.pods if pod.trouble is not None]


@dataclass(frozen=True, slots=True)
class Log:
    """Where a pod's output is, and its end."""

    path: str
    tail: str


def view_of(
    objects: Iterable[Manifest],
    pods: Iterable[Manifest],
    *,
    now: datetime,
    port_of: Callable[[Manifest], int | None],
    log_of: Callable[[Manifest], Log],
    reachable: bool = True,
) -> View:
    """`objects` are those of this API, in the order to show them; `reachable` = the routers' URLs lead to pods."""
    rows = tuple(object_row(manifest) for manifest in objects)
    services = [row for row in rows if row.kind == "InferenceService"]
    serving = [row.settled and (row.ready == "True" or row.reason == SCALED_TO_ZERO) for row in services]
    ready = reachable and bool(services) and all(serving)
    shown = sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
    return View(rows, tuple(_pod_row(pod, now, port_of(pod), log_of(pod)) for pod in shown), ready)


def object_row(manifest: Manifest) -> ObjectRow:
    """Unknown until the operator has looked at it."""
    metadata, status = manifest["metadata"], manifest.get("status") or {}
    conditions = {item["type"]: item for item in status.get("conditions") or []}
    ready = conditions.get("Ready") or {}
    return ObjectRow(
        kind=str(manifest["kind"]),
        name=str(metadata["name"]),
        ready=str(ready.get("status", "Unknown")),
        reason=str(ready.get("reason", "")),
        message=str(ready.get("message", "")),
        settled=status.get("observedGeneration", 0) >= metadata.get("generation", 0),
        stalled=(conditions.get("Stalled") or {}).get("status") == "True",
        url=str(status.get("url") or ""),
    )


def _pod_row(pod: Manifest, now: datetime, port: int | None, log: Log) -> PodRow:
    metadata, status = pod["metadata"], pod.get("status") or {}
    containers: list[dict[str, Any]] = status.get("containerStatuses") or []
    ready = bool(containers) and all(item.get("ready") for item in containers)
    restarts = sum(int(item.get("restartCount", 0)) for item in containers)
    name = str(metadata["name"])
    trouble = None if ready else _trouble(name, restarts, status, containers, log)
    return PodRow(
        name=name,
        ready=ready,
        state="Stopping" if metadata.get("deletionTimestamp") else _state(status, containers, ready),
        restarts=restarts,
        port=port,
        age_s=_age_s(metadata.get("creationTimestamp"), now),
        note="" if ready or trouble else last_line(log.tail),
        trouble=trouble,
    )


def _state(status: Manifest, containers: Sequence[dict[str, Any]], ready: bool) -> str:
    if ready:
        return "Ready"
    for item in containers:
        state = item.get("state") or {}
        if "waiting" in state:
            return str(state["waiting"].get("reason") or "Waiting")
        if "terminated" in state:
            return str(state["terminated"].get("reason") or "Terminated")
    if any("running" in (item.get("state") or {}) for item in containers):
        return "Starting"
    return str(status.get("reason") or status.get("phase") or "Pending")


def _trouble(
    name: str, restarts: int, status: Manifest, containers: Sequence[dict[str, Any]], log: Log
) -> Trouble | None:
    """A container that waits for a bad reason, or that was ended and has not become ready since."""
    for item in containers:
        waiting = (item.get("state") or {}).get("waiting") or {}
        ended = (item.get("state") or {}).get("terminated") or (item.get("lastState") or {}).get("terminated")
        reason = str(waiting.get("reason") or "")
        if ended and (ended.get("exitCode") or reason):
            why = f"{ended.get('reason') or 'Error'}, exit code {ended.get('exitCode')}"
            tail = str(ended.get("message") or "") or log.tail
            return Trouble(name, restarts, f"{reason}: {why}" if reason else why, _last_lines(tail), log.path)
        if reason and reason not in _WAITING_WELL:
            return Trouble(name, restarts, f"{reason}: {waiting.get('message', '')}".rstrip(": "), (), log.path)
        if waiting.get("message"):
            return Trouble(name, restarts, str(waiting["message"]), (), log.path)
    if status.get("phase") == "Failed":
        why = f"{status.get('reason') or 'Failed'}: {status.get('message') or ''}".rstrip(": ")
        return Trouble(name, restarts, why, _last_lines(log.tail), log.path)
    return None


def last_line(text: str) -> str:
    """The last thing a process said, without the time and level of a log line."""
    lines = _last_lines(text, 1)
    return lines[0] if lines else ""


def _last_lines(text: str, count: int = TROUBLE_LINES) -> tuple[str, ...]:
    lines = [_message_of(line.strip()) for line in text.splitlines() if line.strip()]
    return tuple(lines[-count:])


def _message_of(line: str) -> str:
    if line.startswith("{"):
        try:
            record = json.loads(line)
        except ValueError:
            return line
        for key in ("message", "msg", "event"):
            if isinstance(record, dict) and record.get(key):
                return str(record[key])
    return _LOG_PREFIX.sub("", line)


def _age_s(created: Any, now: datetime) -> float:
    if not isinstance(created, str):
        return 0.0
    began = datetime.fromisoformat(created.replace("Z", "+00:00"))
    return max(0.0, (now.astimezone(UTC) - began).total_seconds())


def age_text(seconds: float) -> str:
    """As kubectl writes ages: 42s, 3m, 5h, 2d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size or (seconds >= size and unit == "d"):
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def curl_command(url: str, model: str, *, needs_key: bool) -> str:
    """Ready to paste; `url` is the base URL ending in /v1."""
    body = {
        "model": model,
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    key = ' \\\n  -H "authorization: Bearer $API_KEY"' if needs_key else ""
    return (
        f"curl -N {url}/chat/completions{key} \\\n  -H 'content-type: application/json' \\\n  -d '{json.dumps(body)}'"
    )
