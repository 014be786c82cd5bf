"""Plan of a router fleet, one per (namespace, router name).

A fleet exists while an InferenceService refers to the name or a Router object has it. It belongs to every referring
service together, and to the Router object, which controls it: garbage collection takes it with the last of them, so
that deleting the Router object under running services interrupts nothing.
The namespace's internal token is created here, once, and never written again; a Secret of somebody else that has its
name is left alone. Pure: the token is an argument.
"""

from __future__ import annotations

import base64

from paceline_api.kube import (
    DEPLOYMENT,
    POD_DISRUPTION_BUDGET,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Manifest,
)
from paceline_api.names import (
    INTERNAL_TOKEN_KEY,
    INTERNAL_TOKEN_SECRET,
    LABEL_ROLE,
    LABEL_ROUTER,
    PORT_ADMIN,
    PORT_HTTP,
    PORT_METRICS,
    ROUTER_ADMIN_PORT,
    ROUTER_HTTP_PORT,
    ROUTER_METRICS_PORT,
    label_value,
    router_name,
)
from paceline_api.v1alpha1 import Router, RouterSpec
from paceline_api.validation import InvalidObject, parse
from paceline_operator.planner import pods
from paceline_operator.planner.manifests import (
    being_deleted,
    child,
    common_labels,
    covers,
    difference,
    dig,
    owner_reference,
    sealed,
)
from paceline_operator.planner.model import (
    Action,
    Apply,
    Create,
    FleetObserved,
    Plan,
    PlanSettings,
)
from paceline_operator.planner.pods import config_hash_of
from paceline_operator.planner.service import router_of
from paceline_operator.planner.status import (
    Rollout,
    Verdict,
    reconciling,
    rollout_verdict,
    stalled,
    status_change,
)
from paceline_operator.planner.token import NOT_FOUND, hash_of, token_of, with_token_hash

FLEET_ROLE = "router"
PORTS = {PORT_HTTP: ROUTER_HTTP_PORT, PORT_ADMIN: ROUTER_ADMIN_PORT, PORT_METRICS: ROUTER_METRICS_PORT}
SERVICE_PORT = 80
# A stream may run as long as an engine may drain, and a little more.
GRACE_S = 150
# Time for EndpointSlices to leave proxies' tables before the router stops accepting.
ENDPOINT_LAG_S = 2
STARTUP_BUDGET_S = 120
_READ = ["get", "list", "watch"]


def selector(router: str) -> dict[str, str]:
    return {LABEL_ROUTER: label_value(router), LABEL_ROLE: FLEET_ROLE}


def fleet_url(namespace: str, router: str, service: Manifest | None) -> str:
    """OpenAI-compatible base URL: a load balancer's address where there is one, else the cluster-internal name."""
    ingress: list[Manifest] = dig(service, "status", "loadBalancer", "ingress") or []
    if not ingress:
        return f"http://{router_name(router)}.{namespace}.svc/v1"
    first = ingress[0]
    host = str(first.get("hostname") or first.get("ip"))
    listed: list[Manifest] = first.get("ports") or []
    port = int(listed[0]["port"]) if listed else SERVICE_PORT
    return f"http://{host}/v1" if port == SERVICE_PORT else f"http://{host}:{port}/v1"


def plan_fleet(observed: FleetObserved, now: float, settings: PlanSettings) -> Plan:
    router = observed.router if observed.router and not being_deleted(observed.router) else None
    referring = [item for item in observed.services if router_of(item) == observed.name and not being_deleted(item)]
    if router is None and not referring:
        return Plan(actions=difference([], observed.children))
    spec, blocker = _spec(router)
    blocker = blocker or _token_problem(observed)
    if spec is None or (blocker is not None and _deployment(observed) is None):
        return _finish(observed, router, Rollout(0, None, _deployment(observed), observed.pods), (), blocker, now)
    owners = [owner_reference(item, controller=False) for item in _sorted(referring)]
    if router is not None:
        owners.insert(0, owner_reference(router, controller=True))
    desired = _Fleet(observed, spec, owners, settings).render()
    actions = _token(observed) + difference(desired, observed.children)
    deployment = next(item for item in desired if item["kind"] == DEPLOYMENT.kind)
    rollout = Rollout(
        spec.replicas or 1, config_hash_of(deployment["spec"]["template"]), _deployment(observed), observed.pods
    )
    return _finish(observed, router, rollout, actions, blocker or _missing_tenant(observed, spec), now)


def _spec(router: Manifest | None) -> tuple[RouterSpec | None, Verdict | None]:
    if router is None:
        return RouterSpec(), None
    try:
        parsed = parse(router)
    except InvalidObject as error:
        return None, stalled("InvalidSpec", f"{error}; correct the field and apply again")
    assert isinstance(parsed, Router)
    return parsed.spec, None


def _token_problem(observed: FleetObserved) -> Verdict | None:
    problem = token_of(observed.token_secret).problem
    return None if problem is None or problem[0] == NOT_FOUND else stalled(*problem)


def _sorted(items: list[Manifest] | tuple[Manifest, ...]) -> list[Manifest]:
    return sorted(items, key=lambda item: str(item["metadata"]["name"]))


def _missing_tenant(observed: FleetObserved, spec: RouterSpec) -> Verdict | None:
    if observed.errors:
        return reconciling("ApplyFailed", "; ".join(observed.errors), warning=True)
    name = spec.anonymous_tenant
    if name is None or name in {item["metadata"]["name"] for item in observed.tenants}:
        return None
    return reconciling(
        "TenantNotFound", f"spec.anonymousTenant: there is no Tenant {name} in this namespace; create it", warning=True
    )


def _deployment(observed: FleetObserved) -> Manifest | None:
    wanted = (DEPLOYMENT.kind, router_name(observed.name))
    return next((item for item in observed.children if (item["kind"], item["metadata"]["name"]) == wanted), None)


def _finish(
    observed: FleetObserved,
    router: Manifest | None,
    rollout: Rollout,
    actions: tuple[Action, ...],
    blocker: Verdict | None,
    now: float,
) -> Plan:
    if router is None:
        return Plan(actions=actions)
    verdict = blocker or rollout_verdict(rollout, "Router") or Verdict(True, "Serving", "every wanted replica is ready")
    service = next((item for item in observed.children if item["kind"] == SERVICE.kind), None)
    fields: Manifest = {
        "replicas": rollout.count("replicas"),
        "readyReplicas": rollout.count("readyReplicas"),
        "url": fleet_url(observed.namespace, observed.name, service),
    }
    change = status_change(router, verdict, [], fields, now)
    return Plan(actions=actions, status=change.manifest, urgent=change.urgent, events=change.events)


def _token(observed: FleetObserved) -> tuple[Action, ...]:
    """Creates the token with its owners, or keeps the owners current without touching the data."""
    everyone = [item for item in (*observed.routers, *observed.services) if not being_deleted(item)]
    owners = [owner_reference(item, controller=False) for item in _sorted(everyone)]
    labels = common_labels("paceline-internal", "paceline", "internal-token")
    intent = child(SECRET, observed.namespace, INTERNAL_TOKEN_SECRET, labels=labels, owners=owners)
    live = observed.token_secret
    if live is None:
        data = {INTERNAL_TOKEN_KEY: _encoded(observed.new_token)}
        return (Create({**sealed(intent), "type": "Opaque", "data": data}),)
    if token_of(live).problem is not None:
        return ()
    intent = sealed(intent)
    if covers(live, intent):
        return ()
    # The uid makes the API server refuse the apply if the Secret is gone: an apply must never create it empty.
    metadata = {**intent["metadata"], "uid": live["metadata"]["uid"]}
    return (Apply({**intent, "metadata": metadata}),)


def _encoded(token: str) -> str:
    return base64.b64encode(token.encode()).decode()


class _Fleet:
    """Renders the children of one fleet."""

    def __init__(
        self, observed: FleetObserved, spec: RouterSpec, owners: list[Manifest], settings: PlanSettings
    ) -> None:
        self._observed = observed
        self._spec = spec
        self._owners = owners
        self._settings = settings
        self._name = router_name(observed.name)
        self._selector = selector(observed.name)
        self._labels = common_labels("paceline-router", label_value(observed.name), "router") | self._selector

    def render(self) -> list[Manifest]:
        children = [
            self._child(SERVICE_ACCOUNT, automountServiceAccountToken=False),
            self._child(ROLE, rules=self._rules()),
            self._role_binding(),
            self._service(),
            self._deployment(),
        ]
        if (self._spec.replicas or 1) >= 2:
            children.append(self._child(POD_DISRUPTION_BUDGET, spec=pods.disruption_budget_spec(self._selector)))
        return children

    def _child(self, kind: Kind, **content: object) -> Manifest:
        return child(kind, self._observed.namespace, self._name, labels=self._labels, owners=self._owners, **content)

    def _rules(self) -> list[Manifest]:
        """Reads what routing needs; of Secrets only those that Tenants name."""
        rules: list[Manifest] = [
            {"apiGroups": ["paceline.dev"], "resources": ["inferenceservices", "routers", "tenants"], "verbs": _READ},
            {"apiGroups": [""], "resources": ["pods"], "verbs": _READ},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": _READ},
        ]
        secrets = key_secret_names(self._observed.tenants)
        if secrets:  # An empty list of names would mean every Secret.
            rules.append({"apiGroups": [""], "resources": ["secrets"], "resourceNames": secrets, "verbs": _READ})
        return rules

    def _role_binding(self) -> Manifest:
        return self._child(
            ROLE_BINDING,
            roleRef={"apiGroup": ROLE.group, "kind": ROLE.kind, "name": self._name},
            subjects=[
                {"kind": SERVICE_ACCOUNT.kind, "name": self._name, "namespace": self._observed.namespace},
            ],
        )

    def _service(self) -> Manifest:
        exposure = self._spec.expose.value if self._spec.expose else "ClusterIP"
        port = {"name": PORT_HTTP, "port": SERVICE_PORT, "targetPort": PORT_HTTP, "protocol": "TCP"}
        return self._child(SERVICE, spec={"type": exposure, "selector": self._selector, "ports": [port]})

    def _deployment(self) -> Manifest:
        current = pods.Pin(pods.TEMPLATE_VERSION, self._settings.image_router)
        live = _deployment(self._observed)
        pin, template = pods.pinned(live, self._template, current)
        template = with_token_hash(template, live, self._token_hash(live))
        deployment = self._child(
            DEPLOYMENT,
            spec={
                "replicas": self._spec.replicas or 1,
                "selector": {"matchLabels": self._selector},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "revisionHistoryLimit": 3,
                "progressDeadlineSeconds": STARTUP_BUDGET_S + 60,
                "template": template,
            },
        )
        deployment["metadata"]["annotations"] = pin.annotations()
        return deployment

    def _token_hash(self, live: Manifest | None) -> str:
        if self._observed.token_secret is None and live is None:
            return hash_of(_encoded(self._observed.new_token))
        return token_of(self._observed.token_secret).hash

    def _template(self, pin: pods.Pin) -> Manifest:
        pairs = [pods.tmp_volume(), pods.token_volume()]
        container: Manifest = {
            "name": "router",
            "image": pin.image,
            "command": ["paceline-router"],
            "args": [
                f"--namespace={self._observed.namespace}",
                f"--name={self._observed.name}",
                *pods.port_flags(PORTS),
                pods.token_flag(),
            ],
            "env": pods.base_env(PORTS),
            "ports": pods.ports(PORTS),
            "securityContext": pods.container_security(),
            "lifecycle": {"preStop": {"sleep": {"seconds": ENDPOINT_LAG_S}}},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [mount for _, mount in pairs],
            **pods.probes(STARTUP_BUDGET_S),
        }
        spec = pods.pod_spec(
            service_account=self._name,
            automount=True,
            grace_s=GRACE_S,
            selector=self._selector,
            container=container,
            volumes=[volume for volume, _ in pairs],
        )
        return {"metadata": {"labels": self._labels}, "spec": spec}


def key_secret_names(tenants: tuple[Manifest, ...]) -> list[str]:
    """Names of the Secrets that Tenants keep API keys in, sorted."""
    names: set[str] = set()
    for tenant in tenants:
        references: list[Manifest] = dig(tenant, "spec", "apiKeySecretRefs") or []
        for reference in references:
            names.add(str(reference["name"]))
    return sorted(names)
