"""Secrets and ConfigMaps of the object store, as the process node reads them."""

import base64
from collections.abc import Mapping

from paceline_api.kube import CONFIG_MAP, SECRET
from paceline_cli.local.store import ObjectStore
from paceline_cli.node.pod import Pod, PodRefused


class StoreContent:
    """A `ContentSource`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def secret(self, namespace: str, name: str) -> Mapping[str, bytes] | None:
        """Decoded data."""
        found = self._store.get(SECRET, namespace, name)
        if found is None:
            return None
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}

    async def config_map(self, namespace: str, name: str) -> Mapping[str, bytes] | None:
        """data and binaryData."""
        found = self._store.get(CONFIG_MAP, namespace, name)
        if found is None:
            return None
        binary = {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}
        return {key: value.encode() for key, value in (found.get("data") or {}).items()} | binary

    async def service_account_token(self, pod: Pod, audience: str, expiration: int) -> bytes:
        """Refused: there is one local token, in the kubeconfig that KUBECONFIG names."""
        raise PodRefused(
            "spec.volumes", "serviceAccountToken: the local API issues no tokens; processes read the file in KUBECONFIG"
        )
