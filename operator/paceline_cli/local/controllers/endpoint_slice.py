"""The EndpointSlice controller: Services with a selector -> EndpointSlices of their Pods.

As kube-controller-manager: pods are grouped by the port numbers that a Service's targetPorts have on them (named
targetPorts may differ from pod to pod, and on a laptop always do), terminating pods stay listed as not ready, finished
ones go. Names are `<service>-<hash of the ports>`, so a group keeps its object.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from paceline_api.kube import ENDPOINT_SLICE, POD, SERVICE, Manifest
from paceline_api.names import LABEL_SLICE_SERVICE
from paceline_cli.local.controllers.pods import is_finished, is_ready, is_terminating
from paceline_cli.local.selectors import matches_labels
from paceline_cli.local.store import ObjectStore

MANAGED_BY_LABEL = "endpointslice.kubernetes.io/managed-by"
MANAGED_BY = "endpointslice-controller.k8s.io"
ENDPOINTS_MAX = 100
"""Endpoints a slice; the default of kube-controller-manager."""

_Port = tuple[str, str, int]
"""(name, protocol, number)."""


class EndpointSliceController:
    """Writes slices by server-side apply, so an unchanged one costs no write."""

    kinds = (SERVICE, POD, ENDPOINT_SLICE)

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def reconcile(self) -> float | None:
        """Never needs a timer."""
        pods = self._store.list(POD, None).items
        for service in self._store.list(SERVICE, None).items:
            if (service.get("spec") or {}).get("selector"):
                self._reconcile(service, pods)
        return None

    def _reconcile(self, service: Manifest, pods: Sequence[Manifest]) -> None:
        namespace = service["metadata"]["namespace"]
        wanted = slices(service, [pod for pod in pods if pod["metadata"]["namespace"] == namespace])
        names = {manifest["metadata"]["name"] for manifest in wanted}
        for manifest in wanted:
            self._store.apply(manifest, field_manager=MANAGED_BY)
        selector = f"{LABEL_SLICE_SERVICE}={service['metadata']['name']},{MANAGED_BY_LABEL}={MANAGED_BY}"
        for manifest in self._store.list(ENDPOINT_SLICE, namespace, label_selector=selector).items:
            if manifest["metadata"]["name"] not in names:
                self._store.delete(ENDPOINT_SLICE, namespace, manifest["metadata"]["name"])


def slices(service: Manifest, pods: Iterable[Manifest]) -> list[Manifest]:
    """The slices of one Service; one without endpoints where no pod is there yet."""
    spec = service["spec"]
    groups: dict[tuple[_Port, ...], list[Manifest]] = defaultdict(list)
    for pod in sorted(pods, key=lambda p: p["metadata"]["name"]):
        address = (pod.get("status") or {}).get("podIP")
        if address and not is_finished(pod) and matches_labels(spec["selector"], pod["metadata"].get("labels")):
            groups[_ports(spec, pod)].append(_endpoint(service, pod, address))
    if not groups:
        return [_slice(service, (), [], 0)]
    return [
        _slice(service, ports, endpoints[start : start + ENDPOINTS_MAX], start // ENDPOINTS_MAX)
        for ports, endpoints in sorted(groups.items())
        for start in range(0, len(endpoints), ENDPOINTS_MAX)
    ]


def _ports(spec: Manifest, pod: Manifest) -> tuple[_Port, ...]:
    found = []
    for port in spec.get("ports") or []:
        protocol, target = port.get("protocol", "TCP"), port.get("targetPort", port["port"])
        if isinstance(target, str):
            target = _named_port(pod, target, protocol)
        # A pod without a port of that name is listed without it, as the real controller does.
        if target:
            found.append((port.get("name", ""), protocol, target))
    return tuple(found)


def _named_port(pod: Manifest, name: str, protocol: str) -> int | None:
    return next(
        (
            port["containerPort"]
            for container in pod["spec"]["containers"]
            for port in container.get("ports") or []
            if port.get("name") == name and port.get("protocol", "TCP") == protocol
        ),
        None,
    )


def _endpoint(service: Manifest, pod: Manifest, address: str) -> Manifest:
    serving, terminating = is_ready(pod), is_terminating(pod)
    ready = bool(service["spec"].get("publishNotReadyAddresses")) or (serving and not terminating)
    meta = pod["metadata"]
    endpoint: dict[str, Any] = {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
        "targetRef": {"kind": "Pod", "namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
    }
    if node := pod["spec"].get("nodeName"):
        endpoint["nodeName"] = node
    return endpoint


def _slice(service: Manifest, ports: tuple[_Port, ...], endpoints: list[Manifest], index: int) -> Manifest:
    meta = service["metadata"]
    digest = hashlib.sha256(json.dumps([ports, index]).encode()).hexdigest()[:5]
    owner = {
        "apiVersion": "v1",
        "kind": "Service",
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": meta["namespace"],
            "name": f"{meta['name']}-{digest}",
            "labels": {
                **(meta.get("labels") or {}),
                LABEL_SLICE_SERVICE: meta["name"],
                MANAGED_BY_LABEL: MANAGED_BY,
            },
            "ownerReferences": [owner],
        },
        "addressType": "IPv4",
        "ports": [{"name": name, "protocol": protocol, "port": port} for name, protocol, port in ports],
        "endpoints": endpoints,
    }
