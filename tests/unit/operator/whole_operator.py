"""Waiting for a whole operator over a fake cluster, and what its tests share."""

from operator_samples import (
    ready_status,
    wait_until,
)

from paceline_api.kube import (
    INFERENCE_SERVICE,
    ROUTER,
)
from paceline_operator.feed import WATCHED_KINDS, field_selector
from paceline_operator.settings import Settings

FLEET = "paceline-default-router"
FAST = Settings(resync_s=3600, first_resync_s=3600, status_interval_s=0.0)


def settle(cluster, operator):
    """Until neither the operator nor the Deployment controller has anything left to do."""

    def quiet() -> bool:
        before = cluster.writes()
        cluster.run_deployments()
        # In this order: what the cache learns is queued after it is in the cache.
        is_done = caught_up(cluster, operator) and operator.idle and operator.queue.retries == 0
        return is_done and cluster.writes() == before

    wait_until("everything has settled", quiet)


def become_ready(cluster, name="chat"):
    def ready() -> bool:
        cluster.run_deployments()
        return ready_status(cluster.get(INFERENCE_SERVICE, name)) == "True"

    wait_until(f"{name} is Ready", ready)


def become_ready_router(cluster):
    def ready() -> bool:
        cluster.run_deployments()
        return ready_status(cluster.get(ROUTER, "default")) == "True"

    wait_until("the router is Ready", ready)


def caught_up(cluster, operator) -> bool:
    return all(
        {item["metadata"]["resourceVersion"] for item in operator.cache.list(kind)}
        == {
            item["metadata"]["resourceVersion"]
            for item in cluster.store.list(kind, None, field_selector=field_selector(kind)).items
        }
        for kind in WATCHED_KINDS
    )
