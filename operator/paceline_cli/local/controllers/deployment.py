"""The Deployment controller of the local runtime: Deployment -> Pods with a pod-template-hash, and its status.

Without ReplicaSets there is no rollback history (`revisionHistoryLimit` has nothing to keep); everything else follows
kube-controller-manager. Reconciling is level-triggered and idempotent.
"""

import hashlib
import json
from collections.abc import Callable
from copy import deepcopy

from paceline_api.kube import DEPLOYMENT, POD, Manifest
from paceline_cli.local.controllers.deployment_status import deployment_status
from paceline_cli.local.controllers.pods import available_in, is_active, is_finished
from paceline_cli.local.controllers.rollout import bounds, step
from paceline_cli.local.store import ObjectStore

HASH_LABEL = "pod-template-hash"


class DeploymentController:
    """`now` gives RFC 3339 time, `new_suffix` five characters that make a pod's name unique."""

    kinds = (DEPLOYMENT, POD)

    def __init__(self, store: ObjectStore, *, now: Callable[[], str], new_suffix: Callable[[], str]) -> None:
        self._store = store
        self._now = now
        self._new_suffix = new_suffix

    def reconcile(self) -> float | None:
        """Seconds until the next pod becomes available or a progress deadline passes."""
        pods = self._store.list(POD, None).items
        delays = [self._reconcile(deployment, pods) for deployment in self._store.list(DEPLOYMENT, None).items]
        return min((delay for delay in delays if delay is not None), default=None)

    def _reconcile(self, deployment: Manifest, pods: list[Manifest]) -> float | None:
        meta, spec, now = deployment["metadata"], deployment["spec"], self._now()
        if meta.get("deletionTimestamp"):
            return None
        owned = [pod for pod in pods if owner_uid(pod) == meta["uid"]]
        digest = template_hash(spec["template"])
        current = [pod for pod in owned if pod["metadata"]["labels"].get(HASH_LABEL) == digest]
        old = [pod for pod in owned if pod["metadata"]["labels"].get(HASH_LABEL) != digest]
        min_ready_s = spec.get("minReadySeconds", 0)
        if not spec.get("paused"):
            plan = step(bounds(spec), current, old, min_ready_s, now)
            for pod in (*plan.delete, *(pod for pod in owned if is_finished(pod))):
                self._store.delete(POD, meta["namespace"], pod["metadata"]["name"], uid=pod["metadata"]["uid"])
            for _ in range(plan.create):
                self._store.create(pod_from(deployment, digest, self._new_suffix()))
        active = [pod for pod in owned if is_active(pod)]
        status, deadline = deployment_status(deployment, active, [p for p in current if is_active(p)], now)
        self._store.replace_status({**deployment, "metadata": address(deployment), "status": status})
        waits = [w for pod in active if (w := available_in(pod, min_ready_s, now))]
        return min((*waits, *([deadline] if deadline is not None else [])), default=None)


def address(workload: Manifest) -> Manifest:
    """What `replace_status` needs to find it."""
    return {key: workload["metadata"][key] for key in ("namespace", "name", "uid")}


def owner_uid(pod: Manifest) -> str:
    """Of the workload that controls the pod."""
    refs = pod["metadata"].get("ownerReferences") or []
    return next((ref["uid"] for ref in refs if ref.get("controller")), "")


def template_hash(template: Manifest) -> str:
    """Ten hex digits that change with the template."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def pod_from(workload: Manifest, digest: str, suffix: str, hash_label: str = HASH_LABEL) -> Manifest:
    """A Pod of a workload's current template."""
    meta, template = workload["metadata"], deepcopy(workload["spec"]["template"])
    labels = {**(template.get("metadata") or {}).get("labels", {}), hash_label: digest}
    owner = {
        "apiVersion": workload["apiVersion"],
        "kind": workload["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    pod_meta: Manifest = {
        "namespace": meta["namespace"],
        "name": f"{meta['name']}-{digest}-{suffix}",
        "labels": labels,
        "ownerReferences": [owner],
    }
    if annotations := (template.get("metadata") or {}).get("annotations"):
        pod_meta["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "Pod", "metadata": pod_meta, "spec": template.get("spec") or {}}
