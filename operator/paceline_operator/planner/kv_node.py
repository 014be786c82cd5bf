"""The children of a KVStore with a server on each node: DaemonSet, Service, ConfigMap, ServiceAccount, token Secret.

The Service leads to the caller's own node only, so that KV never crosses the network and the token never leaves the
node. Pure.
"""

from __future__ import annotations

import base64

from paceline_api.kube import CONFIG_MAP, DAEMON_SET, SECRET, SERVICE, SERVICE_ACCOUNT, Kind, Manifest
from paceline_api.names import (
    KV_ADMIN_PORT,
    KV_SETTINGS_DIR,
    KV_SETTINGS_KEY,
    KV_TOKEN_DIR,
    LABEL_ROLE,
    LABEL_STORE,
    PORT_ADMIN,
    PORT_KV,
    kv_name,
    label_value,
)
from paceline_api.v1alpha1 import KVStore
from paceline_operator.planner import pods
from paceline_operator.planner.kv_settings import (
    ANNOTATION_STORE_HASH,
    TOKEN_KEY,
    Reference,
    StorePart,
    server_part,
    store_port,
    token_pair,
    token_reference,
    with_extra,
    with_older,
)
from paceline_operator.planner.manifests import child, common_labels, dig, owner_reference, sealed
from paceline_operator.planner.model import Create, PlanSettings, StoreObserved
from paceline_operator.planner.pods import config_hash_of

ROLE = "kv"
CONTAINER = "kvstore"
DRAIN_S = 30
GRACE_S = 2 * DRAIN_S
# A large disk tier is scanned in this time, or the container is started again.
STARTUP_BUDGET_S = 600
# The process itself, and chunks that are being received.
_OWN_MEMORY = "768Mi"
_OWN_CPU = "250m"


def is_observed(live: Manifest | None, template_hash: str) -> bool:
    """Whether the DaemonSet has this template, and its controller knows."""
    seen = int(dig(live, "status", "observedGeneration") or 0)
    if live is None or seen < int(dig(live, "metadata", "generation") or 0):
        return False
    return config_hash_of(live["spec"]["template"]) == template_hash


class NodeChildren:
    """Renders the children of one store. Everything is derived from what is passed in."""

    def __init__(self, observed: StoreObserved, store: KVStore, settings: PlanSettings) -> None:
        self._observed = observed
        self._store = store
        self._settings = settings
        self._name = kv_name(store.metadata.name)
        self._namespace = str(observed.manifest["metadata"]["namespace"])
        self._owners = [owner_reference(observed.manifest, controller=True)]
        label = label_value(store.metadata.name)
        self._selector = {LABEL_STORE: label, LABEL_ROLE: ROLE}
        self._labels = common_labels("paceline-kvstore", label, "kvstore") | self._selector
        self._part = server_part(store, self._name, observed.quotas)
        self._token = token_reference(store)
        self._ports = {PORT_KV: store_port(store), PORT_ADMIN: KV_ADMIN_PORT}

    @property
    def part(self) -> StorePart:
        """What the server reads; its references include the token."""
        return StorePart(
            self._part.settings,
            (*self._part.references, self._token),
            (*self._part.pairs, token_pair(self._token)),
            self._part.extra,
        )

    @property
    def token(self) -> Reference:
        return self._token

    def token_secret(self, token: str) -> Create:
        """The Secret that the operator makes, once."""
        data = {TOKEN_KEY: base64.b64encode(token.encode()).decode()}
        return Create({**sealed(self._child(SECRET)), "type": "Opaque", "data": data})

    def render(self) -> list[Manifest]:
        """Every child but the token, in no particular order."""
        daemon_set = self._daemon_set()
        return [
            self._child(SERVICE_ACCOUNT, automountServiceAccountToken=False),
            self._child(CONFIG_MAP, data=self._data(daemon_set)),
            self._service(),
            daemon_set,
        ]

    def _child(self, kind: Kind, **content: object) -> Manifest:
        return child(kind, self._namespace, self._name, labels=self._labels, owners=self._owners, **content)

    def _data(self, daemon_set: Manifest) -> dict[str, str]:
        live = self._live(DAEMON_SET)
        nodes, updated = (int(dig(live, "status", f"{name}NumberScheduled") or 0) for name in ("desired", "updated"))
        settled = is_observed(live, config_hash_of(daemon_set["spec"]["template"])) and updated >= nodes
        return with_older({self._part.key: self._part.text}, self._live(CONFIG_MAP), settled=settled)

    def _live(self, kind: Kind) -> Manifest | None:
        return next((item for item in self._observed.children if item["kind"] == kind.kind), None)

    def _service(self) -> Manifest:
        port = {"name": PORT_KV, "port": self._ports[PORT_KV], "targetPort": PORT_KV, "protocol": "TCP"}
        spec = {
            "type": "ClusterIP",
            "internalTrafficPolicy": "Local",
            "selector": self._selector,
            "ports": [port],
        }
        return self._child(SERVICE, spec=spec)

    def _daemon_set(self) -> Manifest:
        current = pods.Pin(pods.TEMPLATE_VERSION, self._settings.image_kvstore)
        pin, template = pods.pinned(self._live(DAEMON_SET), self._template, current)
        daemon_set = self._child(
            DAEMON_SET,
            spec={
                "selector": {"matchLabels": self._selector},
                # While a node's server is replaced its engines compute what they would have loaded.
                "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
                "revisionHistoryLimit": 3,
                "template": template,
            },
        )
        daemon_set["metadata"]["annotations"] = pin.annotations()
        return daemon_set

    def _template(self, pin: pods.Pin) -> Manifest:
        node = self._store.spec.node
        pairs = [pods.tmp_volume(), *self.part.pairs]
        spec = pods.pod_spec(
            service_account=self._name,
            automount=False,
            grace_s=GRACE_S,
            selector=None,
            container=self._container(pin, [mount for _, mount in pairs]),
            volumes=[volume for volume, _ in pairs],
        )
        if node is not None and node.node_selector:
            spec["nodeSelector"] = node.node_selector
        if node is not None and node.tolerations:
            spec["tolerations"] = [item.model_dump(exclude_none=True) for item in node.tolerations]
        annotations = {ANNOTATION_STORE_HASH: self.part.hash(self._observed.data)}
        return {"metadata": {"labels": self._labels, "annotations": annotations}, "spec": spec}

    def _container(self, pin: pods.Pin, mounts: list[Manifest]) -> Manifest:
        node = self._store.spec.node
        own = {"requests": {"cpu": _OWN_CPU, "memory": _OWN_MEMORY}}
        return {
            "name": CONTAINER,
            "image": (node and node.image) or pin.image,
            "command": ["paceline-kvstore"],
            "args": [
                "serve",
                f"--config={KV_SETTINGS_DIR}/{KV_SETTINGS_KEY}",
                *pods.port_flags(self._ports),
                f"--token-file={KV_TOKEN_DIR}/{TOKEN_KEY}",
                f"--drain-timeout={DRAIN_S}s",
            ],
            "env": pods.base_env(self._ports, token_file=None),
            "ports": pods.ports(self._ports),
            "resources": with_extra(own, self._part.extra),
            "securityContext": pods.container_security(),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
            **pods.probes(STARTUP_BUDGET_S, port=PORT_ADMIN),
        }
