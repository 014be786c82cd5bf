"""Questions about a Pod's manifest that several controllers ask. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from paceline_api.kube import Manifest

_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def seconds(rfc3339: str) -> float:
    """Unix time of a Kubernetes timestamp."""
    return datetime.strptime(rfc3339, _FORMAT).replace(tzinfo=UTC).timestamp()


def condition(manifest: Manifest, kind: str) -> Mapping[str, Any]:
    """A condition by its type, {} if there is none."""
    conditions = (manifest.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind), {})


def is_ready(pod: Manifest) -> bool:
    """The Ready condition."""
    return condition(pod, "Ready").get("status") == "True"


def available_in(pod: Manifest, min_ready_s: int, now: str) -> float | None:
    """Seconds until a ready pod counts as available (0 = now); None for a pod that is not ready."""
    ready = condition(pod, "Ready")
    if ready.get("status") != "True":
        return None
    return max(0.0, seconds(ready["lastTransitionTime"]) + min_ready_s - seconds(now)) if min_ready_s else 0.0


def is_terminating(pod: Manifest) -> bool:
    """Deleted, but its node has not finished yet."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_finished(pod: Manifest) -> bool:
    """Its containers will not run again."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_active(pod: Manifest) -> bool:
    """Counts towards replicas."""
    return not is_terminating(pod) and not is_finished(pod)


def deletion_rank(pod: Manifest) -> tuple[Any, ...]:
    """Sort key: the first is deleted first.

    The order of Kubernetes' `ActivePodsWithRanks`: unassigned, not running, not ready, lower pod-deletion-cost, ready
    for a shorter time, more restarts, younger.
    """
    meta, status = pod["metadata"], pod.get("status") or {}
    cost = (meta.get("annotations") or {}).get("controller.kubernetes.io/pod-deletion-cost", "0")
    since = condition(pod, "Ready").get("lastTransitionTime", "") if is_ready(pod) else ""
    restarts = max((c.get("restartCount", 0) for c in status.get("containerStatuses") or []), default=0)
    return (
        bool((pod.get("spec") or {}).get("nodeName")),
        status.get("phase") == "Running",
        is_ready(pod),
        int(cost) if cost.lstrip("-").isdigit() else 0,
        -seconds(since) if since else 0.0,
        -restarts,
        -seconds(meta["creationTimestamp"]),
        meta["name"],
    )
