"""The children of an InferenceService: ServiceAccount, ConfigMap, Service, PodDisruptionBudget and engine Deployment.

Each child depends only on what it must: the promise and the routing of a service reach the router through the API and
never an engine's pod template. Single replicas get no PodDisruptionBudget: it would block a node drain for ever. Pure.
"""

from __future__ import annotations

import math

from paceline_api.kube import (
    CONFIG_MAP,
    DEPLOYMENT,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Manifest,
)
from paceline_api.names import (
    ANNOTATION_MODEL,
    CHAT_TEMPLATE_DIR,
    CHAT_TEMPLATE_KEY,
    ENGINE_ADMIN_PORT,
    ENGINE_HTTP_PORT,
    ENGINE_METRICS_PORT,
    LABEL_MODEL_HASH,
    LABEL_ROLE,
    LABEL_RUNTIME,
    LABEL_SERVICE,
    MODEL_CACHE_DIR,
    MODEL_VOLUME_DIR,
    PORT_ADMIN,
    PORT_HTTP,
    PORT_METRICS,
    engine_name,
    label_value,
    short_hash,
)
from paceline_api.quantity import parse_duration_s
from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import EngineSpec, RolloutStrategy
from paceline_operator.planner import pods
from paceline_operator.planner.engine_args import engine_args, model_claim
from paceline_operator.planner.kv_settings import ANNOTATION_STORE_HASH, StorePart, with_extra, with_older
from paceline_operator.planner.manifests import child, common_labels, dig, owner_reference, text_hash
from paceline_operator.planner.model import PlanSettings, ServiceObserved
from paceline_operator.planner.pod_template import merged
from paceline_operator.planner.pods import config_hash_of
from paceline_operator.planner.runtimes.pod import first_containers, foreign_container
from paceline_operator.planner.runtimes.registry import foreign_of
from paceline_operator.planner.status import Rollout
from paceline_operator.planner.token import with_token_hash

ROLE = "engine"
ENGINE_CONTAINER = "engine"
PORTS = {PORT_HTTP: ENGINE_HTTP_PORT, PORT_ADMIN: ENGINE_ADMIN_PORT, PORT_METRICS: ENGINE_METRICS_PORT}
# Beyond the drain: time for the engine to stop its core process and flush.
GRACE_BEYOND_DRAIN_S = 30
# A large checkpoint is converted and loaded in this time, or the container is started again.
STARTUP_BUDGET_S = 1800
DEFAULT_DRAIN = "120s"
_CACHE_VOLUME = "model-cache"
_MODEL_VOLUME = "model"
_TEMPLATE_VOLUME = "chat-template"
_SHARED_VOLUME = "shared-memory"
_SHARED_MEMORY = "1Gi"


def selector(service: str) -> dict[str, str]:
    """What selects the engine pods of a service: fixed keys only, never users' labels."""
    return {LABEL_SERVICE: label_value(service), LABEL_ROLE: ROLE}


def selector_text(service: str) -> str:
    return ",".join(f"{key}={value}" for key, value in selector(service).items())


def wanted_replicas(service: InferenceService) -> int:
    return 1 if service.spec.replicas is None else service.spec.replicas


def drain_timeout_s(service: InferenceService) -> int:
    """Whole seconds, rounded up."""
    rollout = service.spec.rollout
    text = rollout.drain_timeout if rollout and rollout.drain_timeout else DEFAULT_DRAIN
    return math.ceil(parse_duration_s(text))


class EngineChildren:
    """Renders the children of one service. Everything is derived from what is passed in.

    `store` is the engines' part of the service's KVStore. `keeps`: it has one that can't be used now; the pod template
    that runs, and what it mounts, are kept then.
    """

    def __init__(
        self,
        observed: ServiceObserved,
        service: InferenceService,
        store: StorePart | None,
        settings: PlanSettings,
        *,
        keeps: bool = False,
    ) -> None:
        self.service = service
        self._observed = observed
        self._live = next((item for item in observed.children if item["kind"] == DEPLOYMENT.kind), None)
        self._keeps = keeps and self._live is not None
        self._store = store
        self._settings = settings
        self._name = engine_name(service.metadata.name)
        self._namespace = str(observed.manifest["metadata"]["namespace"])
        self._owners = [owner_reference(observed.manifest, controller=True)]
        self._selector = selector(service.metadata.name)
        self._engine = service.spec.engine or EngineSpec()
        name = label_value(service.metadata.name)
        self._labels = common_labels("paceline-engine", name, "engine") | self._selector
        self._foreign = foreign_of(service)
        self._ports = PORTS
        if self._foreign is not None:
            self._ports = {PORT_HTTP: ENGINE_HTTP_PORT}
            self._labels |= {LABEL_RUNTIME: self._foreign.name.value}
        self._model_labels = {LABEL_MODEL_HASH: short_hash(service.served_name())}
        self._model_annotations = {ANNOTATION_MODEL: service.served_name()}

    def render(self) -> list[Manifest]:
        """Every child, in no particular order."""
        children = [self._child(SERVICE_ACCOUNT, automountServiceAccountToken=False), self._service()]
        deployment = self._deployment()
        if data := self._data(config_hash_of(deployment["spec"]["template"])):
            children.append(self._child(CONFIG_MAP, data=data))
        if wanted_replicas(self.service) >= 2:
            children.append(self._child(POD_DISRUPTION_BUDGET, spec=pods.disruption_budget_spec(self._selector)))
        children.append(deployment)
        return children

    def _child(self, kind: Kind, **content: object) -> Manifest:
        return child(kind, self._namespace, self._name, labels=self._labels, owners=self._owners, **content)

    def _data(self, template_hash: str) -> dict[str, str]:
        """What the pods mount of the service's own ConfigMap."""
        live = next((item for item in self._observed.children if item["kind"] == CONFIG_MAP.kind), None)
        if self._keeps:
            return dig(live, "data") or {}
        template = self.service.spec.model.chat_template
        data = {} if template is None else {CHAT_TEMPLATE_KEY: template}
        if self._store is not None:
            data[self._store.key] = self._store.text
        rollout = Rollout(wanted_replicas(self.service), template_hash, self._live, self._observed.pods)
        return with_older(data, live, settled=rollout.done)

    def _service(self) -> Manifest:
        # Ports by name, so that EndpointSlices carry each pod's real ones. The admin port stays inside the pod network.
        exposed = [
            {"name": name, "port": PORTS[name], "targetPort": name, "protocol": "TCP"}
            for name in (PORT_HTTP, PORT_METRICS)
            if name in self._ports
        ]
        return self._child(SERVICE, spec={"type": "ClusterIP", "selector": self._selector, "ports": exposed})

    def _deployment(self) -> Manifest:
        image = self._settings.image_engine if self._foreign is None else self._foreign.image
        current = pods.Pin(pods.TEMPLATE_VERSION, image or str(self._engine.image))
        if self._keeps and self._live is not None:
            pin, template = pods.pin_of(self._live) or current, self._live["spec"]["template"]
        else:
            pin, template = pods.pinned(self._live, self._template, current)
        template = with_token_hash(template, self._live, self._observed.token.hash)
        deployment = self._child(
            DEPLOYMENT,
            spec={
                "replicas": wanted_replicas(self.service),
                "selector": {"matchLabels": self._selector},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": self._rolling_update()},
                "revisionHistoryLimit": 3,
                "progressDeadlineSeconds": STARTUP_BUDGET_S + 60,
                "template": template,
            },
        )
        deployment["metadata"]["annotations"] = self._model_annotations | pin.annotations()
        deployment["metadata"]["labels"] = self._labels | self._model_labels
        return deployment

    def _rolling_update(self) -> Manifest:
        rollout = self.service.spec.rollout
        in_place = rollout is not None and rollout.strategy is RolloutStrategy.IN_PLACE
        return {"maxSurge": 0, "maxUnavailable": 1} if in_place else {"maxSurge": 1, "maxUnavailable": 0}

    def _template(self, pin: pods.Pin) -> Manifest:
        volumes, mounts = self._volumes()
        container = self._container(pin, mounts)
        spec = pods.pod_spec(
            service_account=self._name,
            automount=False,
            grace_s=drain_timeout_s(self.service) + GRACE_BEYOND_DRAIN_S,
            selector=self._selector,
            container=container,
            volumes=volumes,
        )
        if self._foreign is not None and (first := first_containers(self._foreign, self.service, container)):
            spec["initContainers"] = first
        annotations = dict(self._model_annotations)
        if self.service.spec.model.chat_template is not None:
            annotations["paceline.dev/chat-template-hash"] = text_hash(self.service.spec.model.chat_template)
        if self._store is not None:
            annotations[ANNOTATION_STORE_HASH] = self._store.hash(self._observed.store_data)
        metadata = {"labels": self._labels | self._model_labels, "annotations": annotations}
        return merged({"metadata": metadata, "spec": spec}, self._engine.pod_template)

    def _container(self, pin: pods.Pin, mounts: list[Manifest]) -> Manifest:
        container = self._own_container(pin, mounts) if self._foreign is None else self._other_container(pin, mounts)
        if self.service.spec.model.credentials_secret_ref is not None:
            container["envFrom"] = [{"secretRef": {"name": self.service.spec.model.credentials_secret_ref.name}}]
        own = self._engine.resources
        resources = None if own is None else own.model_dump(exclude_none=True)
        if self._store is not None:
            resources = with_extra(resources, self._store.extra)
        if resources is not None:
            container["resources"] = resources
        return container

    def _other_container(self, pin: pods.Pin, mounts: list[Manifest]) -> Manifest:
        assert self._foreign is not None
        container = foreign_container(
            self._foreign,
            self.service,
            name=ENGINE_CONTAINER,
            image=self._engine.image or pin.image,
            ports=self._ports,
            drain_s=drain_timeout_s(self.service),
            startup_budget_s=STARTUP_BUDGET_S,
        )
        return container | {"volumeMounts": mounts}

    def _own_container(self, pin: pods.Pin, mounts: list[Manifest]) -> Manifest:
        drain_s = drain_timeout_s(self.service)
        return {
            "name": ENGINE_CONTAINER,
            "image": self._engine.image or pin.image,
            "command": ["paceline-engine"],
            "args": ["serve", *engine_args(self.service, self._store is not None, PORTS, drain_s)],
            "env": [*pods.base_env(PORTS), {"name": "PACELINE_CACHE_DIR", "value": MODEL_CACHE_DIR}],
            "ports": pods.ports(PORTS),
            "securityContext": pods.container_security(),
            "lifecycle": {"preStop": {"exec": {"command": _drain_command(drain_s)}}},
            # The last lines of the log become the message of the Ready condition when an engine cannot start.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
            **pods.probes(STARTUP_BUDGET_S),
        }

    def _volumes(self) -> tuple[list[Manifest], list[Manifest]]:
        cache: tuple[Manifest, Manifest] = (
            {"name": _CACHE_VOLUME, "emptyDir": {}},
            {"name": _CACHE_VOLUME, "mountPath": MODEL_CACHE_DIR},
        )
        token = self._foreign is None or self._foreign.launch(self.service).token_file
        pairs = [pods.tmp_volume(), *([pods.token_volume()] if token else []), cache]
        if self.service.spec.model.chat_template is not None:
            pairs.append(
                (
                    {"name": _TEMPLATE_VOLUME, "configMap": {"name": self._name}},
                    {"name": _TEMPLATE_VOLUME, "mountPath": CHAT_TEMPLATE_DIR, "readOnly": True},
                )
            )
        if (self._engine.tensor_parallel_size or 1) > 1:
            # NCCL's buffers are larger than the 64 MiB that a container has by itself.
            memory = {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}
            pairs.append(
                ({"name": _SHARED_VOLUME, "emptyDir": memory}, {"name": _SHARED_VOLUME, "mountPath": "/dev/shm"})
            )
        claim = model_claim(self.service)
        if claim is not None:
            pairs.append(
                (
                    {"name": _MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
                    {"name": _MODEL_VOLUME, "mountPath": MODEL_VOLUME_DIR, "readOnly": True},
                )
            )
        pairs += self._store.pairs if self._store is not None else ()
        return [volume for volume, _ in pairs], [mount for _, mount in pairs]


def _drain_command(drain_s: int) -> list[str]:
    # A hook's command is not expanded by the kubelet, so the shell reads the port and the token's place.
    line = (
        f'exec paceline-engine drain --admin-port="$PACELINE_PORT_ADMIN" --timeout={drain_s}s '
        f'--internal-token-file="${pods.ENV_TOKEN_FILE}"'
    )
    return ["/bin/sh", "-c", line]
