"""The whole operator when calls are refused, watches are silent, and lists or resyncs break."""

import threading
import time

import pytest
from operator_samples import (
    NAMESPACE,
    ready_status,
    service,
    tenant,
    wait_until,
)
from prometheus_client import CollectorRegistry
from whole_operator import become_ready, settle

from paceline_api.kube import (
    CONFIG_MAP,
    INFERENCE_SERVICE,
    ROLE,
    SERVICE,
    TENANT,
    KubeError,
)
from paceline_operator.settings import Clock, Settings


class Refusing:
    """A client that refuses some calls for a while."""

    def __init__(self, store) -> None:
        self._store = store
        self.refuse = True
        self.refused = threading.Event()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def apply(self, manifest, *, field_manager):
        if self.refuse and manifest["kind"] == "Deployment":
            self.refused.set()
            raise KubeError(403, "Forbidden", "exceeded quota")
        return self._store.apply(manifest, field_manager=field_manager)


def test_a_refused_write_is_told_retried_and_does_not_hold_up_the_rest(cluster, start):
    client = Refusing(cluster.store)
    start(client)
    cluster.put(service())
    wait_until(
        "the condition tells",
        lambda: "exceeded quota" in str(cluster.get(INFERENCE_SERVICE, "chat").get("status")),
    )
    assert "chat-engine" in cluster.names(SERVICE)
    client.refuse = False
    become_ready(cluster)


class Deaf:
    """A client whose watches deliver nothing while `gap` is set: the worst a connection can do."""

    def __init__(self, store) -> None:
        self._store = store
        self.gap = threading.Event()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def watch(self, *arguments, **options):
        for event in self._store.watch(*arguments, **options):
            if not self.gap.is_set():
                yield event


def test_a_child_deleted_during_a_watch_gap_comes_back_with_the_resync_and_is_counted(cluster, start):
    client, registry = Deaf(cluster.store), CollectorRegistry()
    operator = start(client, registry=registry)
    cluster.put(service(model={"source": "file:///m", "chatTemplate": "x"}))
    settle(cluster, operator)
    client.gap.set()
    cluster.store.delete(CONFIG_MAP, NAMESPACE, "chat-engine")
    wait_until("the operator is idle", lambda: operator.idle)
    assert "chat-engine" not in cluster.names(CONFIG_MAP)
    operator.resync()
    wait_until("the child is back", lambda: "chat-engine" in cluster.names(CONFIG_MAP))
    assert registry.get_sample_value("paceline_operator_ghosts_total", {"kind": "ConfigMap"}) == 1


class Broken:
    """A client whose list of Roles fails with `error` while it is set."""

    def __init__(self, store) -> None:
        self._store = store
        self.error: Exception | None = None

    def __getattr__(self, name):
        return getattr(self._store, name)

    def list(self, kind, namespace, **options):
        if kind == ROLE and self.error is not None:
            raise self.error
        return self._store.list(kind, namespace, **options)


def test_a_kind_that_cannot_be_listed_does_not_hold_up_the_resync_of_the_others(cluster, start):
    client = Broken(cluster.store)
    operator = start(client)
    cluster.put(service())
    cluster.put(tenant(apiKeySecretRefs=[{"name": "key"}]))
    wait_until("it says what is missing", lambda: ready_status(cluster.get(TENANT, "team")) == "False")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key", "namespace": NAMESPACE}}
    cluster.store.create({**secret, "data": {"apiKey": "c2VjcmV0"}})
    client.error = KubeError(403, "Forbidden", "no rights to list")
    with pytest.raises(KubeError, match="roles: no rights to list"):
        operator.resync()
    wait_until("the tenant was looked at", lambda: ready_status(cluster.get(TENANT, "team")) == "True")
    assert operator.problem is None


def test_a_resync_that_breaks_is_a_problem_of_the_process(cluster, start):
    client = Broken(cluster.store)
    operator = start(client, settings=Settings(resync_s=1, first_resync_s=0.2))
    client.error = ValueError("not JSON")
    wait_until("the process should end", lambda: operator.problem == "the resync has ended: ValueError('not JSON')")


def test_a_resync_that_hangs_is_a_problem_of_the_process(cluster, start):
    now, hang = [0.0], threading.Event()

    class Hanging(Broken):
        def list(self, kind, namespace, **options):
            if kind == ROLE and self.error is not None:
                self.error = None
                hang.wait(10)
            return self._store.list(kind, namespace, **options)

    client = Hanging(cluster.store)
    operator = start(client, settings=Settings(resync_s=1, first_resync_s=0.2), clock=Clock(time.time, lambda: now[0]))
    client.error = ValueError()
    now[0] = 1.0
    wait_until("the list hangs", lambda: client.error is None)
    try:
        now[0] = 200.0
        wait_until(
            "only the resync makes no progress",
            lambda: operator.problem == "thread resync has made no progress for 199 s",
        )
    finally:
        hang.set()


def test_what_vanished_between_the_first_lists_and_the_watches_is_found_soon(cluster, start):
    first = start()
    cluster.put(service())
    settle(cluster, first)
    first.stop()

    class Gap(Deaf):
        """Deletes a child as soon as the first list of its kind was answered; the watch starts after it."""

        def list(self, kind, namespace, **options):
            listed = self._store.list(kind, namespace, **options)
            if kind == SERVICE and not self.gap.is_set():
                self.gap.set()
                self._store.delete(SERVICE, NAMESPACE, "chat-engine")
            return listed

    start(Gap(cluster.store), settings=Settings(resync_s=3600, first_resync_s=0.2))
    wait_until("the child is back", lambda: "chat-engine" in cluster.names(SERVICE))
