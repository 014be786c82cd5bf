"""`KubeClient` over the official `kubernetes` client.

It uses the dynamic client's request call with paths built from `Kind`, without API discovery: the kinds are known, and
discovery costs tens of requests at start. Objects stay plain dicts; the generated models are never involved, which
keeps deserialisation off every path. Calls block; they are safe from several threads (urllib3 pools connections).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast

import urllib3.exceptions
import yaml
from kubernetes import client as official
from kubernetes import config as official_config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError

from paceline_api.kube import (
    Conflict,
    Expired,
    Invalid,
    Kind,
    KubeError,
    Manifest,
    ObjectList,
    WatchEvent,
    kind_of,
)

REQUEST_TIMEOUT_S = (5.0, 30.0)
LIST_CHUNK = 500
_DEFAULT_KUBECONFIG = "~/.kube/config"
# What the official loader lets through for files that are no kubeconfig.
_UNREADABLE = (
    official_config.ConfigException,
    OSError,
    yaml.YAMLError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
)
_APPLY = "application/apply-patch+yaml"
_ERRORS: dict[int, type[KubeError]] = {409: Conflict, 410: Expired, 400: Invalid, 422: Invalid}


class ClusterUnreachable(KubeError):
    """No usable connection to the API server. `status` is 0."""

    def __init__(self, message: str) -> None:
        super().__init__(0, "ClusterUnreachable", message)


class _NoDiscovery:
    """Stands in for the dynamic client's discoverer: paths come from `Kind`."""

    def __init__(self, client: DynamicClient, cache_file: str | None) -> None:
        del client, cache_file


class OfficialKubeClient:
    """See `KubeClient` for the contract of each call."""

    def __init__(self, api_client: official.ApiClient) -> None:
        self._dynamic = DynamicClient(api_client, discoverer=_NoDiscovery)

    @classmethod
    def connect(cls, kubeconfig: Path | None = None) -> OfficialKubeClient:
        """From a kubeconfig file, from the pod's ServiceAccount, or from the user's default kubeconfig.

        Raises ClusterUnreachable, naming the file, when none of them can be read.
        """
        # Each failed attempt would be a warning; the error that is raised after the last says it once.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        configuration = official.Configuration()
        in_cluster = kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ
        path = "" if in_cluster else str(kubeconfig or os.environ.get("KUBECONFIG") or _DEFAULT_KUBECONFIG)
        try:
            if in_cluster:
                official_config.load_incluster_config(client_configuration=configuration)
            else:
                official_config.load_kube_config(config_file=path, client_configuration=configuration)
        except _UNREADABLE as error:
            raise ClusterUnreachable(
                f"no cluster configuration: {_why(path, error)}; pass --kubeconfig FILE or run inside a pod"
            ) from error
        configuration.connection_pool_maxsize = 16
        return cls(official.ApiClient(configuration))

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        try:
            return self._json("GET", _path(kind, namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def list(
        self, kind: Kind, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
    ) -> ObjectList:
        items: list[Manifest] = []
        token = ""
        while True:
            query = _query(labelSelector=label_selector, fieldSelector=field_selector, limit=str(LIST_CHUNK))
            query += _query(**{"continue": token})
            page = self._json("GET", _path(kind, namespace), query_params=query)
            type_meta = {"apiVersion": kind.api_version, "kind": kind.kind}
            items.extend({**type_meta, **item} for item in page.get("items") or [])
            metadata = page.get("metadata", {})
            token = metadata.get("continue", "")
            if not token:
                return ObjectList(items, str(metadata.get("resourceVersion", "")))

    def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        timeout_s: int = 300,
    ) -> Iterator[WatchEvent]:
        query = _query(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=resource_version,
            labelSelector=label_selector,
            fieldSelector=field_selector,
            timeoutSeconds=str(timeout_s),
        )
        response = self._request(
            "GET", _path(kind, namespace), query_params=query, _request_timeout=(5.0, timeout_s + 10.0)
        )
        try:
            yield from _events(response)
        finally:
            response.close()
            response.release_conn()

    def apply(self, manifest: Manifest, *, field_manager: str) -> Manifest:
        return self._apply(manifest, field_manager, "")

    def apply_status(self, manifest: Manifest, *, field_manager: str) -> Manifest:
        return self._apply(manifest, field_manager, "/status")

    def _apply(self, manifest: Manifest, field_manager: str, subresource: str) -> Manifest:
        metadata = manifest["metadata"]
        path = _path(kind_of(manifest), metadata["namespace"], metadata["name"]) + subresource
        query = _query(fieldManager=field_manager, force="true")
        return self._json("PATCH", path, body=json.dumps(manifest), query_params=query, content_type=_APPLY)

    def create(self, manifest: Manifest) -> Manifest:
        path = _path(kind_of(manifest), manifest["metadata"]["namespace"])
        return self._json("POST", path, body=manifest)

    def replace(self, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        return self._json("PUT", _path(kind_of(manifest), metadata["namespace"], metadata["name"]), body=manifest)

    def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None) -> bool:
        options: Manifest = {"propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            self._json("DELETE", _path(kind, namespace, name), body=options)
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return True

    def served(self, kind: Kind) -> bool:
        """Whether the API server knows this kind, which is to say whether its CRD is installed and served."""
        prefix = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.version}"
        try:
            resources = self._json("GET", prefix).get("resources", [])
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return any(resource.get("name") == kind.plural for resource in resources)

    def _json(self, method: str, path: str, **options: Any) -> Manifest:
        response = self._request(method, path, **options)
        try:
            return cast(Manifest, json.loads(response.data or b"{}"))
        except (urllib3.exceptions.HTTPError, HTTPException) as error:
            raise ClusterUnreachable(f"{method} {path}: {error}") from error

    def _request(self, method: str, path: str, **options: Any) -> Any:
        options.setdefault("_request_timeout", REQUEST_TIMEOUT_S)
        try:
            return self._dynamic.request(method, path, serialize=False, **options)
        except (ApiException, DynamicApiError) as error:
            raise _translated(error, f"{method} {path}") from error
        except (urllib3.exceptions.HTTPError, HTTPException, OSError) as error:
            raise ClusterUnreachable(f"{method} {path}: {error}") from error


def _why(path: str, error: Exception) -> str:
    """One line, with the file's name, on why a configuration was not loaded."""
    files = path.split(os.pathsep) if path else []
    if files and not any(Path(file).expanduser().exists() for file in files):
        return f"{path} does not exist"
    text = " ".join(str(error).split())
    if not isinstance(error, official_config.ConfigException | OSError):
        text = f"{path} is not a kubeconfig ({text or type(error).__name__})"
    return text if not path or path in text else f"{path}: {text}"


def _path(kind: Kind, namespace: str | None, name: str = "") -> str:
    prefix = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.version}"
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"{prefix}{scope}/{kind.plural}" + (f"/{name}" if name else "")


def _query(**parameters: str) -> list[tuple[str, str]]:
    return [(key, value) for key, value in parameters.items() if value]


def _translated(error: Any, call: str) -> KubeError:
    status = int(error.status or 0)
    if status == 0:
        return ClusterUnreachable(f"{call}: {error.reason}")
    body = error.body.decode() if isinstance(error.body, bytes) else error.body
    try:
        answer = json.loads(body or "{}")
    except ValueError:
        answer = {}
    reason = str(answer.get("reason") or error.reason or "Unknown")
    message = str(answer.get("message") or body or error.reason)
    return _ERRORS.get(status, KubeError)(status, reason, message)


def _events(response: Any) -> Iterator[WatchEvent]:
    buffer = b""
    try:
        for piece in response.stream(amt=None, decode_content=True):
            buffer += piece
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                if line.strip() and (event := _event(json.loads(line))):
                    yield event
    except (urllib3.exceptions.HTTPError, HTTPException, OSError) as error:
        raise ClusterUnreachable(f"watch broke off: {error}") from error


def _event(document: dict[str, Any]) -> WatchEvent | None:
    """None for a bookmark that only moves the version on; bookmarks carry no object to hand over."""
    kind, item = document["type"], document["object"]
    if kind == "ERROR":
        status = int(item.get("code", 500))
        raise _ERRORS.get(status, KubeError)(status, str(item.get("reason")), str(item.get("message")))
    if kind == "BOOKMARK":
        return None
    return WatchEvent(kind, item)
