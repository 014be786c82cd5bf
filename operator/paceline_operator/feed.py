"""Where informers hand over events: cache first, then the keys concerned go to the queue. Also the resync.

An event's own keys are computed from the object before and after, so that a service that leaves a router has both
fleets looked at. Must not plan or write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from paceline_api.kube import (
    CONFIG_MAP,
    DAEMON_SET,
    DEPLOYMENT,
    INFERENCE_SERVICE,
    KV_STORE,
    POD,
    POD_DISRUPTION_BUDGET,
    ROLE,
    ROLE_BINDING,
    ROUTER,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    TENANT,
    EventType,
    Kind,
    KubeClient,
    KubeError,
    Manifest,
)
from paceline_api.names import INTERNAL_TOKEN_SECRET, MANAGED_BY
from paceline_operator.cache import Cache
from paceline_operator.dependents import every_key, keys_for
from paceline_operator.metrics import OperatorMetrics
from paceline_operator.planner.manifests import OPERATOR
from paceline_operator.planner.model import Key
from paceline_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)

OWN_KINDS: Sequence[Kind] = (INFERENCE_SERVICE, ROUTER, TENANT, KV_STORE)
CHILD_KINDS: Sequence[Kind] = (
    DEPLOYMENT, DAEMON_SET, SERVICE, CONFIG_MAP, SERVICE_ACCOUNT, ROLE, ROLE_BINDING, POD_DISRUPTION_BUDGET,
)  # fmt: skip
WATCHED_KINDS: Sequence[Kind] = (*OWN_KINDS, *CHILD_KINDS, POD, SECRET)


def label_selector(kind: Kind) -> str:
    """Only what Paceline manages, except for the kinds that users write."""
    return "" if kind in OWN_KINDS or kind == SECRET else f"{MANAGED_BY}={OPERATOR}"


def field_selector(kind: Kind) -> str:
    """Of Secrets only the internal token, whoever made it: no other Secret ever reaches this process by a watch."""
    return f"metadata.name={INTERNAL_TOKEN_SECRET}" if kind == SECRET else ""


class Feed:
    """Thread-safe: informers call `event` from their own threads."""

    def __init__(self, cache: Cache, queue: WorkQueue[Key], metrics: OperatorMetrics) -> None:
        self._cache = cache
        self._queue = queue
        self._metrics = metrics

    def event(self, kind: Kind, event_type: EventType, manifest: Manifest) -> None:
        """One change. Objects outside namespaces and foreign shapes do not occur in the watched kinds."""
        metadata = manifest["metadata"]
        before = self._cache.get(kind, str(metadata["namespace"]), str(metadata["name"]))
        if event_type == "DELETED":
            self._cache.remove(kind, manifest)
        elif not self._cache.put(kind, manifest):
            return
        for version in filter(None, (before, manifest)):
            self._enqueue(keys_for(self._cache, kind, version))

    def resync(self, client: KubeClient, namespace: str | None, progress: Callable[[], None] = lambda: None) -> None:
        """Real LISTs of every kind; ghosts go, and every key is looked at again. `progress` is called now and then.

        A kind that cannot be listed does not hold up the others; raises a KubeError that names every such kind.
        """
        errors: list[KubeError] = []
        for kind in WATCHED_KINDS:
            progress()
            try:
                self._correct(client, kind, namespace, progress)
            except KubeError as error:
                errors.append(KubeError(error.status, error.reason, f"{kind.plural}: {error.message}"))
        self._enqueue(every_key(self._cache))
        if errors:
            raise KubeError(errors[0].status, errors[0].reason, "; ".join(error.message for error in errors))

    def _correct(self, client: KubeClient, kind: Kind, namespace: str | None, progress: Callable[[], None]) -> None:
        listed = client.list(kind, namespace, label_selector=label_selector(kind), field_selector=field_selector(kind))

        def confirm(space: str, name: str) -> Manifest | None:
            progress()
            return client.get(kind, space, name)

        _, ghosts = self._cache.correct(kind, namespace, listed.items, confirm)
        if ghosts:
            log.warning("Found %d ghosts of kind %s: their deletion was never reported", len(ghosts), kind.kind)
            self._metrics.ghosts(kind.kind, len(ghosts))
        for ghost in ghosts:
            self._enqueue(keys_for(self._cache, kind, ghost))

    def _enqueue(self, keys: set[Key]) -> None:
        for key in sorted(keys):
            if not self._queue.add(key):
                log.warning("The workqueue is full, %s waits for the next resync", key)
