"""What others have added to a pod template: fields and list entries that neither the intent nor the API server set.

Server-side apply leaves fields of other managers alone, so a hand-added `hostNetwork`, node selector or privileged
sidecar would stay for ever. This finds them; the executor writes the pod spec as a whole to take them out. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from paceline_api.kube import DAEMON_SET, DEPLOYMENT, Manifest

# Keys of the lists that the API server merges, as far as a pod template of ours has them.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "protocol"),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
# What the API server writes where an intent says nothing.
_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "dnsPolicy": ("ClusterFirst",),
    "restartPolicy": ("Always",),
    "schedulerName": ("default-scheduler",),
    "terminationMessagePath": ("/dev/termination-log",),
    "terminationMessagePolicy": ("File",),
    "imagePullPolicy": ("IfNotPresent", "Always"),
    "successThreshold": (1,),
    "procMount": ("Default",),
    "defaultMode": (0o644,),
    "protocol": ("TCP",),
    "apiVersion": ("v1",),
    "scheme": ("HTTP",),
    "timeoutSeconds": (1,),
    "periodSeconds": (10,),
    "failureThreshold": (3,),
}
_EMPTY: tuple[object, ...] = (None, {}, [], "")


def additions(live: Manifest, intent: Manifest) -> tuple[str, ...]:
    """Paths in the pod template of a live workload that are neither ours nor defaults; none for other kinds."""
    if intent["kind"] not in (DEPLOYMENT.kind, DAEMON_SET.kind):
        return ()
    return tuple(
        _added(live["spec"]["template"]["spec"], intent["spec"]["template"]["spec"], "spec.template.spec", "spec")
    )


def _added(live: Any, intent: Any, where: str, key: str) -> Iterator[str]:
    if isinstance(live, dict) and isinstance(intent, dict):
        yield from _added_keys(cast(Manifest, live), cast(Manifest, intent), where)
    elif isinstance(live, list) and isinstance(intent, list) and key in _KEYS:
        yield from _added_items(cast("list[Manifest]", live), cast("list[Manifest]", intent), where, _KEYS[key])


def _added_keys(live: Manifest, intent: Manifest, where: str) -> Iterator[str]:
    for key, value in live.items():
        if key in intent:
            yield from _added(value, intent[key], f"{where}.{key}", key)
        elif key == "serviceAccount" and value == intent.get("serviceAccountName"):
            continue  # The old name of the same field, filled in by the API server.
        elif value not in _EMPTY and value not in _DEFAULTS.get(key, ()):
            yield f"{where}.{key}"


def _added_items(live: list[Manifest], intent: list[Manifest], where: str, keys: tuple[str, ...]) -> Iterator[str]:
    wanted = {_key(item, keys): item for item in intent}
    for item in live:
        key = _key(item, keys)
        path = f"{where}[{'/'.join(map(str, key))}]"
        if key in wanted:
            yield from _added_keys(item, wanted[key], path)
        else:
            yield path


def _key(item: Manifest, keys: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(item.get(key) for key in keys)
