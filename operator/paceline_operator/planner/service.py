"""Plan of an InferenceService: its children, its conditions. Blockers are an ordered chain; the first one decides.

While a spec is invalid its children stay as they are: an invalid change never takes a working fleet down. While only
its KVStore is missing, engines that run keep their pod template, and everything else is maintained. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from paceline_api.conditions import Fact, Type
from paceline_api.kube import DEPLOYMENT, Manifest
from paceline_api.names import DEFAULT_ROUTER, LABEL_RUNTIME, engine_name
from paceline_api.runtimes import PACELINE
from paceline_api.v1alpha1 import InferenceService
from paceline_api.validation import InvalidObject, parse
from paceline_operator.planner.children import ROLE, EngineChildren, selector_text, wanted_replicas
from paceline_operator.planner.kv_settings import StorePart, engine_part, read_store
from paceline_operator.planner.manifests import being_deleted, difference, dig
from paceline_operator.planner.model import Action, Plan, PlanSettings, ServiceObserved
from paceline_operator.planner.pods import config_hash_of
from paceline_operator.planner.runtimes.registry import runtime_of
from paceline_operator.planner.spec_problem import spec_problem
from paceline_operator.planner.status import (
    Rollout,
    Verdict,
    reconciling,
    rollout_verdict,
    stalled,
    status_change,
)
from paceline_operator.planner.token import NOT_FOUND


def router_of(service: Manifest) -> str:
    """Name of the router that a service refers to, valid or not."""
    return str(dig(service, "spec", "routing", "routerRef", "name") or DEFAULT_ROUTER)


def served_name_of(service: Manifest) -> str:
    return str(dig(service, "spec", "model", "servedName") or service["metadata"]["name"])


def plan_service(observed: ServiceObserved, now: float, settings: PlanSettings) -> Plan:
    """Nothing for a service that is being deleted: garbage collection removes what it owns."""
    if being_deleted(observed.manifest):
        return Plan()
    service, blocker = _parsed(observed.manifest)
    store, store_blocker = _store(service, observed)
    live = _deployment(observed)
    blocker = blocker or _runtime_changed(service, observed)
    if live is None:
        # Pods could not start without the token, and would be rolled when it comes.
        blocker = blocker or store_blocker or _token_problem(observed)
    if service is None or blocker is not None:
        wanted = int(dig(live, "spec", "replicas") or 0)
        return _finish(observed, Rollout(wanted, None, live, observed.pods), (), blocker, now)
    desired = EngineChildren(observed, service, store, settings, keeps=store_blocker is not None).render()
    actions = difference(desired, observed.children)
    deployment = next(item for item in desired if item["kind"] == DEPLOYMENT.kind)
    template_hash = config_hash_of(deployment["spec"]["template"])
    rollout = Rollout(wanted_replicas(service), template_hash, live, observed.pods)
    verdict = store_blocker or _name_taken(observed) or _token_problem(observed) or _failed(observed.errors)
    return _finish(observed, rollout, actions, verdict, now)


def _parsed(manifest: Manifest) -> tuple[InferenceService | None, Verdict | None]:
    try:
        service = parse(manifest)
    except InvalidObject as error:
        return None, stalled("InvalidSpec", f"{error}; correct the field and apply again")
    assert isinstance(service, InferenceService)
    problem = spec_problem(service)
    return service, stalled(*problem) if problem else None


def _store(service: InferenceService | None, observed: ServiceObserved) -> tuple[StorePart | None, Verdict | None]:
    """The engines' part of the store, or why there is none yet though the service names one."""
    if service is None or service.spec.kv_store_ref is None:
        return None, None
    name = service.spec.kv_store_ref.name
    if observed.kv_store is None:
        return None, reconciling(
            "KVStoreNotFound", f"spec.kvStoreRef: there is no KVStore {name} in this namespace; create it", warning=True
        )
    store, problem = read_store(observed.kv_store)
    if store is None:
        return None, reconciling("KVStoreInvalid", f"KVStore {name}: {problem}", warning=True)
    namespace = str(observed.manifest["metadata"]["namespace"])
    part = engine_part(store, namespace, engine_name(service.metadata.name), observed.quotas)
    missing = part.missing(observed.store_data)
    if missing is not None:
        return None, replace(missing, message=f"KVStore {name}: {missing.message}")
    return part, None


def _runtime_changed(service: InferenceService | None, observed: ServiceObserved) -> Verdict | None:
    """Engines of two kinds behind one Service would be asked in one of their two languages."""
    live = _deployment(observed)
    if service is None or live is None or not observed.pods:
        return None
    running = str(dig(live, "metadata", "labels", LABEL_RUNTIME) or PACELINE)
    if running == runtime_of(service):
        return None
    return stalled(
        "RuntimeChanged",
        f"spec.engine.runtime: engines of runtime {running} run; scale to 0 first, or make a second InferenceService",
    )


def _name_taken(observed: ServiceObserved) -> Verdict | None:
    mine, name = _age(observed.manifest), served_name_of(observed.manifest)
    older = [peer for peer in observed.peers if served_name_of(peer) == name and _age(peer) < mine]
    if not older:
        return None
    owner = min(older, key=_age)["metadata"]["name"]
    return stalled(
        "ServedNameTaken",
        f"InferenceService {owner} is older and serves {name!r} on the same router; set another spec.model.servedName",
    )


def _token_problem(observed: ServiceObserved) -> Verdict | None:
    if observed.token.problem is None:
        return None
    reason, message = observed.token.problem
    if reason != NOT_FOUND:
        return stalled(reason, message)
    return reconciling(reason, message) if _deployment(observed) is None else None


def _age(manifest: Manifest) -> tuple[str, str]:
    return str(dig(manifest, "metadata", "creationTimestamp") or ""), str(manifest["metadata"]["name"])


def _failed(errors: tuple[str, ...]) -> Verdict | None:
    return reconciling("ApplyFailed", "; ".join(errors), warning=True) if errors else None


def _deployment(observed: ServiceObserved) -> Manifest | None:
    name = engine_name(observed.manifest["metadata"]["name"])
    wanted = (DEPLOYMENT.kind, name)
    return next((item for item in observed.children if (item["kind"], item["metadata"]["name"]) == wanted), None)


def _finish(
    observed: ServiceObserved, rollout: Rollout, actions: tuple[Action, ...], verdict: Verdict | None, now: float
) -> Plan:
    verdict = verdict or rollout_verdict(rollout, "Engines") or _serving(observed, rollout)
    facts = [_model_ready(rollout), _engines_available(rollout), _scaling(rollout)]
    change = status_change(observed.manifest, verdict, facts, _fields(observed, rollout), now)
    return Plan(actions=actions, status=change.manifest, urgent=change.urgent, events=change.events)


def _serving(observed: ServiceObserved, rollout: Rollout) -> Verdict:
    if rollout.wanted == 0:
        return Verdict(False, "ScaledToZero", "spec.replicas is 0: no engine runs, requests are refused")
    if not observed.router.ready:
        return reconciling("RouterNotReady", f"no pod of router {router_of(observed.manifest)} is ready yet")
    return Verdict(True, "Serving", "every wanted replica of this generation is ready")


def _model_ready(rollout: Rollout) -> Fact:
    if any(pod.ready for pod in rollout.current_pods):
        return Fact(Type.MODEL_READY, True, "ModelLoaded", "an engine has loaded the model")
    if rollout.wanted == 0:
        return Fact(Type.MODEL_READY, None, "NoReplicas", "no engine runs that could load the model")
    if rollout.problem is not None:
        return Fact(Type.MODEL_READY, False, "EnginesFailing", rollout.problem)
    return Fact(Type.MODEL_READY, False, "Loading", "no engine of this generation has loaded the model yet")


def _engines_available(rollout: Rollout) -> Fact:
    if rollout.count("readyReplicas"):
        return Fact(Type.ENGINES_AVAILABLE, True, "EnginesReady", "at least one engine serves")
    return Fact(Type.ENGINES_AVAILABLE, False, "NoEngineReady", "no engine serves")


def _scaling(rollout: Rollout) -> Fact:
    replicas = rollout.count("replicas")
    if rollout.observed and replicas == rollout.wanted:
        return Fact(Type.SCALING, False, "AtTarget", f"{rollout.wanted} replicas are wanted and exist")
    reason = "ScalingDown" if replicas > rollout.wanted else "ScalingUp" if replicas < rollout.wanted else "RollingOut"
    return Fact(Type.SCALING, True, reason, f"{rollout.wanted} replicas are wanted")


def _fields(observed: ServiceObserved, rollout: Rollout) -> Manifest:
    name = str(observed.manifest["metadata"]["name"])
    ready = rollout.count("readyReplicas")
    fields: Manifest = {
        "replicas": rollout.count("replicas"),
        "readyReplicas": ready,
        "selector": selector_text(name),
        "model": {
            "servedName": served_name_of(observed.manifest),
            "source": str(dig(observed.manifest, "spec", "model", "source") or ""),
        },
        "endpoints": [{"role": ROLE, "service": engine_name(name), "ready": ready}],
    }
    if observed.router.url is not None:
        fields["url"] = observed.router.url
    return fields
