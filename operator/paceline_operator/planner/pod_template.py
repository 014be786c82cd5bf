"""spec.engine.podTemplate: what it may say, and how it is laid over the pod that the operator makes.

An allow-list: whoever may write an InferenceService gets nothing through the operator that a pod of the `restricted`
level could not have. No host path, network or process namespace, no privilege, no ServiceAccount but the engines' own,
no Secret (`credentialsSecretRef` names the one there is). Everything that is not listed is refused by name. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from paceline_api.kube import Manifest
from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import EngineSpec, Runtime

ENGINE = "engine"
_WHERE = "spec.engine.podTemplate"
_POD_FIELDS = frozenset(
    {
        "affinity", "containers", "imagePullSecrets", "nodeSelector", "priorityClassName", "runtimeClassName",
        "schedulerName", "securityContext", "tolerations", "topologySpreadConstraints", "volumes",
    }
)  # fmt: skip
_CONTAINER_FIELDS = frozenset(
    {
        "env", "envFrom", "imagePullPolicy", "livenessProbe", "name", "readinessProbe", "securityContext",
        "startupProbe", "volumeMounts", "workingDir",
    }
)  # fmt: skip
_CUSTOM_FIELDS = frozenset({"command", "args", "lifecycle"})
_VOLUME_KINDS = frozenset({"configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim"})
_USERS = frozenset({"runAsUser", "runAsGroup", "fsGroup"})
_OUR_VOLUMES = frozenset({"tmp", "internal-token", "model-cache", "model", "chat-template", "shared-memory"})
_OUR_VOLUMES_PREFIX = "kv-"
_OUR_DOMAINS = ("paceline.dev", "kubernetes.io", "k8s.io")
_HANDLERS = frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"})

Problems = Iterator[tuple[str, str]]


def pod_template_problem(service: InferenceService) -> str | None:
    """The first thing that a podTemplate may not say, as "spec.engine.podTemplate.field: why"; None if it is fine."""
    engine = service.spec.engine or EngineSpec()
    if engine.pod_template is None:
        return None
    try:
        found = next(_template_problems(engine.pod_template, engine.runtime is Runtime.CUSTOM), None)
    except (TypeError, AttributeError, ValueError):
        return f"{_WHERE}: it is not shaped like a pod template; see kubectl explain deployment.spec.template"
    return None if found is None else f"{_WHERE}{found[0]}: {found[1]}"


def merged(template: Manifest, override: Manifest | None) -> Manifest:
    """The pod template with an accepted override laid over it. The operator's own labels and variables stay."""
    if not override:
        return template
    metadata, spec = dict(template["metadata"]), dict(template["spec"])
    for key in ("labels", "annotations"):
        wanted_keys: Manifest = _mapping(_mapping(override.get("metadata")).get(key))
        metadata[key] = wanted_keys | metadata.get(key, {})
    wanted: Manifest = dict(override.get("spec") or {})
    containers: list[Manifest] = wanted.pop("containers", None) or []
    spec["volumes"] = [*spec["volumes"], *(wanted.pop("volumes", None) or [])]
    spec["securityContext"] = spec["securityContext"] | (wanted.pop("securityContext", None) or {})
    for key in ("containers", "initContainers"):
        if key in spec:
            spec[key] = [_container(container, containers, key == "containers") for container in spec[key]]
    return {"metadata": metadata, "spec": spec | wanted}


def _container(container: Manifest, overrides: list[Manifest], main: bool) -> Manifest:
    """The engine's container gets everything, those before it what they run with."""
    if not overrides:
        return container
    wanted = dict(overrides[0])
    result = dict(container)
    result["env"] = _by_name(container.get("env", []), wanted.pop("env", None) or [])
    for key in ("envFrom", "volumeMounts"):
        if listed := wanted.pop(key, None):
            result[key] = [*container.get(key, []), *listed]
    result["securityContext"] = container["securityContext"] | (wanted.pop("securityContext", None) or {})
    if main:
        result |= wanted
    return result


def _by_name(given: list[Manifest], wanted: list[Manifest]) -> list[Manifest]:
    names = {item["name"] for item in wanted}
    return [*(item for item in given if item["name"] not in names), *wanted]


def _template_problems(template: Manifest, custom: bool) -> Problems:
    yield from _unknown(template, frozenset({"metadata", "spec"}), "")
    metadata = _mapping(template.get("metadata"))
    yield from _unknown(metadata, frozenset({"labels", "annotations"}), ".metadata")
    for kind in ("labels", "annotations"):
        for key, value in _mapping(metadata.get(kind)).items():
            if key.partition("/")[0].endswith(_OUR_DOMAINS) and "/" in key:
                yield f".metadata.{kind}[{key}]", "the operator and Kubernetes own keys of this domain; use another"
            if not isinstance(value, str):
                yield f".metadata.{kind}[{key}]", f"must be text, not {value!r}; quote it"
    yield from _pod_problems(_mapping(template.get("spec")), custom)


def _pod_problems(spec: Manifest, custom: bool) -> Problems:
    yield from _unknown(spec, _POD_FIELDS, ".spec")
    security = _mapping(spec.get("securityContext"))
    yield from _unknown(security, _USERS, ".spec.securityContext")
    for key, value in security.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f".spec.securityContext.{key}", "must be a number above 0: engines never run as root"
    volumes = _listed(spec.get("volumes"))
    for index, volume in enumerate(volumes):
        yield from _volume_problems(volume, f".spec.volumes[{index}]")
    containers = _listed(spec.get("containers"))
    if len(containers) > 1:
        yield ".spec.containers[1]", f"only the container named {ENGINE} can be changed; sidecars are not allowed"
    names = {str(volume.get("name")) for volume in volumes}
    for container in containers[:1]:
        yield from _container_problems(container, names, custom)


def _volume_problems(volume: Manifest, where: str) -> Problems:
    name = str(volume.get("name", ""))
    if not name or name in _OUR_VOLUMES or name.startswith(_OUR_VOLUMES_PREFIX):
        yield f"{where}.name", f"{name!r} is a volume of the operator's own; choose another name"
    yield from _unknown(volume, _VOLUME_KINDS | {"name"}, where)


def _container_problems(container: Manifest, volumes: set[str], custom: bool) -> Problems:
    where = ".spec.containers[0]"
    if container.get("name") != ENGINE:
        yield f"{where}.name", f"must be {ENGINE}, the container that there is; sidecars are not allowed"
    allowed = _CONTAINER_FIELDS | _CUSTOM_FIELDS if custom else _CONTAINER_FIELDS
    hint = "" if custom else "; runtime custom may set it"
    for key in container:
        if key not in allowed:
            yield f"{where}.{key}", "not allowed here" + (hint if key in _CUSTOM_FIELDS else "")
    security = _mapping(container.get("securityContext"))
    yield from _unknown(security, frozenset({"readOnlyRootFilesystem"}), f"{where}.securityContext")
    for index, item in enumerate(_listed(container.get("env"))):
        yield from _variable_problems(item, f"{where}.env[{index}]")
    for index, item in enumerate(_listed(container.get("envFrom"))):
        yield from _unknown(item, frozenset({"configMapRef", "prefix"}), f"{where}.envFrom[{index}]")
    for index, mount in enumerate(_listed(container.get("volumeMounts"))):
        if mount.get("name") not in volumes:
            yield f"{where}.volumeMounts[{index}].name", "names no volume of this podTemplate"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if (wanted := container.get(probe)) is not None:
            yield from _handler_problems(_mapping(wanted), f"{where}.{probe}")
    for hook, handler in _mapping(container.get("lifecycle")).items():
        yield from _handler_problems(_mapping(handler), f"{where}.lifecycle.{hook}")


def _variable_problems(item: Manifest, where: str) -> Problems:
    name = str(item.get("name", ""))
    if not name or name.startswith("PACELINE_"):
        yield f"{where}.name", f"{name!r}: the operator sets variables that begin with PACELINE_"
    yield from _unknown(item, frozenset({"name", "value", "valueFrom"}), where)
    sources = frozenset({"configMapKeyRef", "fieldRef", "resourceFieldRef"})
    yield from _unknown(_mapping(item.get("valueFrom")), sources, f"{where}.valueFrom")


def _handler_problems(handler: Manifest, where: str) -> Problems:
    if not _HANDLERS & handler.keys():
        yield where, f"must have one of {', '.join(sorted(_HANDLERS))}"
    if "host" in _mapping(handler.get("httpGet")) or "host" in _mapping(handler.get("tcpSocket")):
        yield f"{where}.host", "only the pod itself may be asked; remove it"


def _unknown(given: Manifest, allowed: frozenset[str], where: str) -> Problems:
    for key in given:
        if key not in allowed:
            yield f"{where}.{key}", f"not allowed here; allowed are {', '.join(sorted(allowed))}"


def _mapping(value: Any) -> Manifest:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError
    return cast(Manifest, value)


def _listed(value: Any) -> list[Manifest]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in cast("list[Any]", value)):
        raise TypeError
    return cast("list[Manifest]", value)


def allowed_text() -> str:
    """What is allowed, for the reference page."""
    return (
        "Laid over the engine pods' template; everything else is refused with reason `PodTemplateRefused`.\n\n"
        "- `metadata`: labels and annotations outside the domains of Kubernetes and paceline.dev\n"
        f"- `spec`: {_names(_POD_FIELDS)}\n"
        f"- `spec.securityContext`: {_names(_USERS)}, above 0\n"
        f"- `spec.volumes`: {_names(_VOLUME_KINDS)}\n"
        f"- `spec.containers`: only `{ENGINE}`: {_names(_CONTAINER_FIELDS)}; of its securityContext "
        f"`readOnlyRootFilesystem`; with runtime `custom` also {_names(_CUSTOM_FIELDS)}\n"
        "- no Secret, anywhere: `model.credentialsSecretRef` names the one that engines get\n"
    )


def _names(names: frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
