"""The status of a Deployment as kube-controller-manager writes it. Pure.

Zero counts are left out, as the API's omitempty does. Conditions follow `DeploymentComplete`, `DeploymentProgressing`
and `DeploymentTimedOut`.
"""

from collections.abc import Sequence
from typing import Any

from paceline_api.kube import Manifest
from paceline_cli.local.controllers.pods import available_in, condition, is_ready, seconds
from paceline_cli.local.controllers.rollout import bounds

_COMPLETE, _UPDATED, _TIMED_OUT = "NewReplicaSetAvailable", "ReplicaSetUpdated", "ProgressDeadlineExceeded"
_DEADLINE_S = 600


def deployment_status(
    deployment: Manifest, active: Sequence[Manifest], updated: Sequence[Manifest], now: str
) -> tuple[Manifest, float | None]:
    """(status, seconds until the progress deadline or None). `active`: live pods; `updated`: those of the template."""
    spec = deployment["spec"]
    limits, min_ready_s = bounds(spec), spec.get("minReadySeconds", 0)
    available = sum(1 for pod in active if available_in(pod, min_ready_s, now) == 0)
    counts = {
        "replicas": len(active),
        "updatedReplicas": len(updated),
        "readyReplicas": sum(1 for pod in active if is_ready(pod)),
        "availableReplicas": available,
        "unavailableReplicas": max(0, limits.desired - available),
    }
    status: dict[str, Any] = {"observedGeneration": deployment["metadata"]["generation"]}
    status |= {key: value for key, value in counts.items() if value}
    complete = limits.desired == len(active) == len(updated) == available
    enough = available >= limits.desired - limits.max_unavailable
    progressing, left = _progressing(deployment, counts, complete, now)
    status["conditions"] = [_available(deployment, enough, now), progressing]
    return status, left


def _available(deployment: Manifest, enough: bool, now: str) -> Manifest:
    reason = "MinimumReplicasAvailable" if enough else "MinimumReplicasUnavailable"
    message = f"Deployment {'has' if enough else 'does not have'} minimum availability."
    return _condition(deployment, "Available", enough, reason, message, now, touch=False)


def _progressing(deployment: Manifest, counts: Manifest, complete: bool, now: str) -> tuple[Manifest, float | None]:
    before, name = condition(deployment, "Progressing"), deployment["metadata"]["name"]
    old = deployment.get("status") or {}
    rolled_out = counts["replicas"] == counts["updatedReplicas"]
    if complete or (before.get("reason") == _COMPLETE and rolled_out):
        # Once rolled out, pods that come and go are not a rollout any more.
        message = f'Deployment "{name}" has successfully progressed.'
        return _condition(deployment, "Progressing", True, _COMPLETE, message, now, touch=False), None
    moved = any(
        counts[key] != old.get(key, 0) for key in ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
    )
    fresh = old.get("observedGeneration") != deployment["metadata"]["generation"]
    if not before or moved or fresh:
        message = f'Deployment "{name}" is progressing.'
        limit = deployment["spec"].get("progressDeadlineSeconds", _DEADLINE_S)
        return _condition(deployment, "Progressing", True, _UPDATED, message, now, touch=True), float(limit)
    if before.get("reason") == _TIMED_OUT:
        return dict(before), None
    limit = deployment["spec"].get("progressDeadlineSeconds", _DEADLINE_S)
    left = seconds(before["lastUpdateTime"]) + limit - seconds(now)
    if left > 0:
        return dict(before), left
    message = f'Deployment "{name}" has timed out progressing.'
    return _condition(deployment, "Progressing", False, _TIMED_OUT, message, now, touch=True), None


def _condition(
    deployment: Manifest, kind: str, true: bool, reason: str, message: str, now: str, *, touch: bool
) -> Manifest:
    """Keeps lastTransitionTime while the status stays, and lastUpdateTime too unless `touch`."""
    before, status = condition(deployment, kind), "True" if true else "False"
    same = before.get("status") == status
    kept = same and before.get("reason") == reason and not touch
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": before["lastTransitionTime"] if same else now,
        "lastUpdateTime": before["lastUpdateTime"] if kept else now,
    }
