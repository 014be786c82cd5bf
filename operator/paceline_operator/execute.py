"""Carries out a plan's actions: every one is tried, errors are collected. Decides only whether a name is free."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable

from paceline_api.kube import Conflict, KubeClient, KubeError, Manifest, kind_of
from paceline_api.names import FIELD_MANAGER, FIELD_MANAGER_STATUS, INTERNAL_TOKEN_SECRET
from paceline_operator.cache import Cache
from paceline_operator.metrics import OperatorMetrics
from paceline_operator.planner.additions import additions
from paceline_operator.planner.manifests import ANNOTATION_INTENT, dig
from paceline_operator.planner.model import Action, Apply, Create, Delete, Strip

log = logging.getLogger(__name__)

ADMITTED_MAX = 4096


class NameTaken(Exception):
    """An object of somebody else has the name of a child."""


class Executor:
    """Writes through the client. What an apply answers goes into the cache, ahead of the watch."""

    def __init__(self, client: KubeClient, cache: Cache, metrics: OperatorMetrics) -> None:
        self._client = client
        self._cache = cache
        self._metrics = metrics
        # Additions that came back in the very answer to their removal, by the Deployment's uid: the cluster's admission
        # wants them, and removing them again and again would never end.
        self._admitted: OrderedDict[str, frozenset[str]] = OrderedDict()

    def run(self, actions: Iterable[Action]) -> tuple[str, ...]:
        """One line for each action that failed, in order."""
        errors: list[str] = []
        for action in actions:
            try:
                self._act(action)
            except (KubeError, NameTaken) as error:
                errors.append(f"{_subject(action)}: {error}")
        return tuple(errors)

    def write_status(self, manifest: Manifest) -> None:
        """Nothing if the object is gone meanwhile. Raises KubeError."""
        try:
            written = self._client.apply_status(manifest, field_manager=FIELD_MANAGER_STATUS)
        except KubeError as error:
            if error.status == 404:
                return
            raise
        kind = kind_of(manifest)
        self._metrics.wrote("status", kind.kind)
        self._cache.put(kind, written)

    def _act(self, action: Action) -> None:
        if isinstance(action, Apply):
            self._apply(action)
        elif isinstance(action, Create):
            self._create(action.manifest)
        elif isinstance(action, Strip):
            self._strip(action)
        else:
            self._delete(action)

    def _apply(self, action: Apply) -> None:
        kind, metadata = kind_of(action.manifest), action.manifest["metadata"]
        if not action.known:
            live = self._client.get(kind, metadata["namespace"], metadata["name"])
            if live is not None and dig(live, "metadata", "annotations", ANNOTATION_INTENT) is None:
                raise NameTaken("exists already and is not of Paceline; delete it, or rename the object that needs it")
        applied = self._client.apply(action.manifest, field_manager=FIELD_MANAGER)
        self._metrics.wrote("apply", kind.kind)
        self._cache.put(kind, applied)

    def _strip(self, action: Strip) -> None:
        """Writes the pod spec as a whole, on top of what is live now. What is added elsewhere stays."""
        intent = action.manifest
        kind, metadata = kind_of(intent), intent["metadata"]
        cached = self._cache.get(kind, metadata["namespace"], metadata["name"])
        uid = str(dig(cached, "metadata", "uid"))
        if set(action.added) <= self._admitted.get(uid, frozenset()):
            return
        live = self._client.get(kind, metadata["namespace"], metadata["name"])
        added = () if live is None else additions(live, intent)
        if live is None or not added:
            return
        template = {**live["spec"]["template"], "spec": intent["spec"]["template"]["spec"]}
        log.warning("%s %s: removing %s", kind.kind, metadata["name"], ", ".join(added))
        replaced = self._client.replace({**live, "spec": {**live["spec"], "template": template}})
        self._metrics.wrote("replace", kind.kind)
        self._cache.put(kind, replaced)
        if left := additions(replaced, intent):
            log.warning("%s %s: the cluster adds %s, it stays", kind.kind, metadata["name"], ", ".join(left))
            self._admitted[str(live["metadata"]["uid"])] = frozenset(left)
            if len(self._admitted) > ADMITTED_MAX:
                self._admitted.popitem(last=False)

    def _create(self, manifest: Manifest) -> None:
        try:
            created = self._client.create(manifest)
        except Conflict:
            return
        self._metrics.wrote("create", str(manifest["kind"]))
        # Of Secrets only the internal token is watched: another one would stay in the cache when it is gone.
        if manifest["metadata"]["name"] == INTERNAL_TOKEN_SECRET:
            self._cache.put(kind_of(manifest), created)

    def _delete(self, action: Delete) -> None:
        try:
            deleted = self._client.delete(action.kind, action.namespace, action.name, uid=action.uid)
        except Conflict:
            return  # The name belongs to a younger object; the next snapshot will show it.
        if deleted:
            self._metrics.wrote("delete", action.kind.kind)


def _subject(action: Action) -> str:
    if isinstance(action, Delete):
        return f"{action.kind.kind} {action.name}"
    return f"{action.manifest['kind']} {action.manifest['metadata']['name']}"
