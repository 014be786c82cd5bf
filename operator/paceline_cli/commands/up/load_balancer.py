"""Stands in for a cloud's load balancer: writes each router's stable address into its Service's status.

The operator reads it there, so that `status.url` of routers and services is the URL that works on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline_api.kube import SERVICE
from paceline_cli.local.service_proxy import ServiceProxy
from paceline_cli.local.store import ObjectStore

FIELD_MANAGER = "paceline-load-balancer"


class LoadBalancer:
    """A controller (see `paceline_cli.local.controllers.base`). `proxies` must be listening: (Service name, proxy)."""

    kinds = (SERVICE,)

    def __init__(
        self, store: ObjectStore, namespace: str, host: str, proxies: Sequence[tuple[str, ServiceProxy]]
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._host = host
        self._proxies = proxies

    def reconcile(self) -> float | None:
        """Writes only where a Service is new. Never needs a timer."""
        for name, proxy in self._proxies:
            if self._store.get(SERVICE, self._namespace, name) is not None:
                ports = [{"port": proxy.port, "protocol": "TCP"}]
                manifest = {
                    "apiVersion": SERVICE.api_version,
                    "kind": SERVICE.kind,
                    "metadata": {"name": name, "namespace": self._namespace},
                    "status": {"loadBalancer": {"ingress": [{"ip": self._host, "ports": ports}]}},
                }
                self._store.apply_status(manifest, field_manager=FIELD_MANAGER)
        return None
