"""Stands in for kube-scheduler where there is one node: binds every unbound Pod to it."""

from collections.abc import Callable

from paceline_api.kube import POD, Manifest
from paceline_cli.local.controllers.pods import is_active
from paceline_cli.local.store import ObjectStore


class Scheduler:
    """`now` gives RFC 3339 time. Whether the node can run the Pod is for the node to say."""

    kinds = (POD,)

    def __init__(self, store: ObjectStore, node_name: str, *, now: Callable[[], str]) -> None:
        self._store = store
        self._node_name = node_name
        self._now = now

    def reconcile(self) -> float | None:
        """Never needs a timer."""
        for pod in self._store.list(POD, None, field_selector="spec.nodeName=").items:
            if is_active(pod) and not pod["spec"].get("schedulingGates"):
                self._bind(pod)
        return None

    def _bind(self, pod: Manifest) -> None:
        bound = self._store.replace({**pod, "spec": {**pod["spec"], "nodeName": self._node_name}})
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": self._now()}
        self._store.replace_status({**bound, "status": {"phase": "Pending", "conditions": [scheduled]}})
