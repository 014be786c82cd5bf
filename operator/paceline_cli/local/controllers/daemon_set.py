"""The DaemonSet controller where there is one node: one pod of each DaemonSet, and its status.

Node selectors and tolerations are accepted without effect, as on the node itself. A changed template replaces the pod:
the old one is gone before the new one comes (maxUnavailable 1, as Kubernetes has it by default).
"""

from collections.abc import Callable

from paceline_api.kube import DAEMON_SET, POD, Manifest
from paceline_cli.local.controllers.deployment import address, owner_uid, pod_from, template_hash
from paceline_cli.local.controllers.pods import is_active, is_finished, is_ready
from paceline_cli.local.store import ObjectStore

HASH_LABEL = "controller-revision-hash"


class DaemonSetController:
    """`new_suffix` gives five characters that make a pod's name unique."""

    kinds = (DAEMON_SET, POD)

    def __init__(self, store: ObjectStore, *, new_suffix: Callable[[], str]) -> None:
        self._store = store
        self._new_suffix = new_suffix

    def reconcile(self) -> float | None:
        """Never needs a timer."""
        pods = self._store.list(POD, None).items
        for daemon_set in self._store.list(DAEMON_SET, None).items:
            if not daemon_set["metadata"].get("deletionTimestamp"):
                self._reconcile(daemon_set, [pod for pod in pods if owner_uid(pod) == daemon_set["metadata"]["uid"]])
        return None

    def _reconcile(self, daemon_set: Manifest, owned: list[Manifest]) -> None:
        meta, digest = daemon_set["metadata"], template_hash(daemon_set["spec"]["template"])
        current = [pod for pod in owned if pod["metadata"]["labels"].get(HASH_LABEL) == digest and is_active(pod)]
        spare = [pod for pod in owned if is_finished(pod) or (is_active(pod) and pod not in current)]
        for pod in (*spare, *current[1:]):
            self._store.delete(POD, meta["namespace"], pod["metadata"]["name"], uid=pod["metadata"]["uid"])
        if not owned:
            self._store.create(pod_from(daemon_set, digest, self._new_suffix(), HASH_LABEL))
        ready = int(any(is_ready(pod) for pod in owned if is_active(pod)))
        status = {
            "observedGeneration": meta["generation"],
            "desiredNumberScheduled": 1,
            "currentNumberScheduled": min(1, len(owned)),
            "updatedNumberScheduled": min(1, len(current)),
            "numberReady": ready,
            "numberAvailable": ready,
            "numberUnavailable": 1 - ready,
            "numberMisscheduled": 0,
        }
        self._store.replace_status({**daemon_set, "metadata": address(daemon_set), "status": status})
