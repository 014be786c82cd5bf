"""Plan of a KVStore: the servers of its nodes, if it has any, and whether all is there that it names. Pure."""

from __future__ import annotations

from paceline_api.kube import DAEMON_SET, Manifest
from paceline_api.names import kv_address
from paceline_api.v1alpha1 import KVStore
from paceline_operator.planner.kv_node import NodeChildren, is_observed
from paceline_operator.planner.kv_settings import engine_part, read_store, store_port
from paceline_operator.planner.manifests import being_deleted, difference, dig
from paceline_operator.planner.model import Action, Plan, PlanSettings, StoreObserved
from paceline_operator.planner.pods import config_hash_of
from paceline_operator.planner.status import Rollout, Verdict, reconciling, stalled, status_change

# Users' Secrets and ConfigMaps are not watched: a missing one is looked for again after this long.
RECHECK_S = 10.0
_TOKEN_MADE_S = 0.1


def plan_store(observed: StoreObserved, now: float, settings: PlanSettings) -> Plan:
    """Nothing for a store that is being deleted: garbage collection removes what it owns."""
    if being_deleted(observed.manifest):
        return Plan()
    store, problem = read_store(observed.manifest)
    if store is None:
        verdict = stalled("InvalidSpec", f"{problem}; correct the field and apply again")
        return _finish(observed, (), verdict, {}, now)
    if store.spec.on_nodes:
        return _plan_nodes(observed, store, now, settings)
    actions = difference([], observed.children)
    missing = engine_part(store, _namespace(observed), "").missing(observed.data)
    verdict = (
        missing or _failed(observed) or Verdict(True, "Valid", f"each engine that refers to it has {_tiers(store)}")
    )
    return _finish(observed, actions, verdict, {}, now, RECHECK_S if missing else None)


def _plan_nodes(observed: StoreObserved, store: KVStore, now: float, settings: PlanSettings) -> Plan:
    children = NodeChildren(observed, store, settings)
    fields: Manifest = {"address": kv_address(_namespace(observed), store.metadata.name, store_port(store))}
    live = next((item for item in observed.children if item["kind"] == DAEMON_SET.kind), None)
    fields |= _counts(live)
    missing = children.part.missing(observed.data)
    if missing is not None:
        # Pods that run are left alone; new ones could not start.
        makes = not children.token.field and observed.data.get(children.token.label) is None
        actions: tuple[Action, ...] = (children.token_secret(observed.new_token),) if makes else ()
        verdict = _failed(observed) or missing
        return _finish(observed, actions, verdict, fields, now, _TOKEN_MADE_S if makes else RECHECK_S)
    desired = children.render()
    template = next(item for item in desired if item["kind"] == DAEMON_SET.kind)["spec"]["template"]
    verdict = _failed(observed) or _servers(observed, live, config_hash_of(template))
    return _finish(observed, difference(desired, observed.children), verdict, fields, now)


def _counts(live: Manifest | None) -> Manifest:
    return {
        "nodes": int(dig(live, "status", "desiredNumberScheduled") or 0),
        "readyNodes": int(dig(live, "status", "numberReady") or 0),
    }


def _servers(observed: StoreObserved, live: Manifest | None, template_hash: str) -> Verdict:
    counts = _counts(live)
    nodes, ready = counts["nodes"], counts["readyNodes"]
    if is_observed(live, template_hash):
        if nodes == 0:
            message = "no node takes a server; see spec.node.nodeSelector and spec.node.tolerations"
            return Verdict(False, "NoNodes", message, warning=True)
        if int(dig(live, "status", "updatedNumberScheduled") or 0) == nodes and ready >= nodes:
            return Verdict(True, "Serving", "the server of every node is ready")
    rollout = Rollout(nodes, template_hash, live, observed.pods)
    if rollout.problem is not None:
        reason = "NodeServerUnschedulable" if rollout.unschedulable else "NodeServerFailing"
        return reconciling(reason, rollout.problem, warning=True)
    return reconciling("RollingOut" if ready else "NodeServersStarting", f"{ready} of {nodes} node servers are ready")


def _tiers(store: KVStore) -> str:
    spec = store.spec
    named = [
        spec.memory and f"{spec.memory.capacity} of memory",
        spec.disk and f"{spec.disk.capacity} on disk",
        spec.s3 and f"the bucket {spec.s3.bucket}",
    ]
    return ", ".join(part for part in named if part)


def _failed(observed: StoreObserved) -> Verdict | None:
    return reconciling("ApplyFailed", "; ".join(observed.errors), warning=True) if observed.errors else None


def _namespace(observed: StoreObserved) -> str:
    return str(observed.manifest["metadata"]["namespace"])


def _finish(
    observed: StoreObserved,
    actions: tuple[Action, ...],
    verdict: Verdict,
    fields: Manifest,
    now: float,
    recheck_s: float | None = None,
) -> Plan:
    change = status_change(observed.manifest, verdict, [], fields, now)
    return Plan(actions, change.manifest, change.urgent, change.events, recheck_s)
