"""What the pods of both fleets share: restricted rights, ports, probes, volumes, and the pin of the template.

The pin: an upgraded operator brings a new template or default image, but does not roll fleets with it. Each Deployment
records with which template version and default image it was rendered; as long as that rendering still gives the pod
template that runs, it is kept. Any change of the spec that changes the template anyway moves to the current ones. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline_api.kube import Manifest
from paceline_api.names import (
    ANNOTATION_CONFIG_HASH,
    ENV_HOST,
    INTERNAL_TOKEN_DIR,
    INTERNAL_TOKEN_FILE,
    INTERNAL_TOKEN_KEY,
    INTERNAL_TOKEN_SECRET,
    port_env,
)
from paceline_operator.planner.manifests import dig, text_hash

ANNOTATION_TEMPLATE_VERSION = "paceline.dev/template-version"
ANNOTATION_DEFAULT_IMAGE = "paceline.dev/default-image"
TEMPLATE_VERSION = "1"
KNOWN_TEMPLATE_VERSIONS = frozenset({TEMPLATE_VERSION})

USER_ID = 65532
ENV_TOKEN_FILE = "PACELINE_INTERNAL_TOKEN_FILE"
TMP_VOLUME = "tmp"
TOKEN_VOLUME = "internal-token"
_READ_BY_OWNER_AND_GROUP = 0o440


@dataclass(frozen=True, slots=True)
class Pin:
    """Template version and default image that a Deployment is rendered with."""

    version: str
    image: str

    def annotations(self) -> dict[str, str]:
        return {ANNOTATION_TEMPLATE_VERSION: self.version, ANNOTATION_DEFAULT_IMAGE: self.image}


def pinned(live: Manifest | None, render: Callable[[Pin], Manifest], current: Pin) -> tuple[Pin, Manifest]:
    """The pin to use and the pod template it renders, sealed with its config hash."""
    old = pin_of(live)
    if old is not None:
        template = with_config_hash(render(old))
        running = dig(live, "spec", "template", "metadata", "annotations", ANNOTATION_CONFIG_HASH)
        if running == config_hash_of(template):
            return old, template
    return current, with_config_hash(render(current))


def pin_of(live: Manifest | None) -> Pin | None:
    """What a Deployment says it was rendered with, as far as this operator knows that version."""
    annotations: Manifest = dig(live, "metadata", "annotations") or {}
    version = str(annotations.get(ANNOTATION_TEMPLATE_VERSION, ""))
    image = str(annotations.get(ANNOTATION_DEFAULT_IMAGE, ""))
    return Pin(version, image) if version in KNOWN_TEMPLATE_VERSIONS and image else None


def with_config_hash(template: Manifest) -> Manifest:
    """The pod template with its own hash as an annotation, by which pods of one revision are recognised."""
    metadata: Manifest = template["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_CONFIG_HASH: text_hash(template)}
    return {**template, "metadata": {**metadata, "annotations": annotations}}


def config_hash_of(template: Manifest) -> str:
    return str(dig(template, "metadata", "annotations", ANNOTATION_CONFIG_HASH) or "")


def pod_spec(
    *,
    service_account: str,
    automount: bool,
    grace_s: int,
    selector: dict[str, str] | None,
    container: Manifest,
    volumes: list[Manifest],
) -> Manifest:
    """A pod that passes the `restricted` Pod Security level; those of `selector`, if given, spread over nodes."""
    spread: Manifest = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector},
    }
    return {
        "serviceAccountName": service_account,
        "automountServiceAccountToken": automount,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            # The mounted token is readable by owner and group only.
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"topologySpreadConstraints": [spread]} if selector else {}),
        "containers": [container],
        "volumes": volumes,
    }


def container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def ports(numbers: Mapping[str, int]) -> list[Manifest]:
    return [{"name": name, "containerPort": number, "protocol": "TCP"} for name, number in numbers.items()]


def base_env(numbers: Mapping[str, int], token_file: str | None = INTERNAL_TOKEN_FILE) -> list[Manifest]:
    """Host, ports by name, the internal token's file, and places to write: the root file system is read-only."""
    values = {ENV_HOST: "0.0.0.0"}
    values |= {port_env(name): str(number) for name, number in numbers.items()}
    values |= {ENV_TOKEN_FILE: token_file} if token_file else {}
    values |= {"HOME": "/tmp", "TMPDIR": "/tmp"}
    return [{"name": name, "value": value} for name, value in values.items()]


def port_flags(numbers: Mapping[str, int]) -> list[str]:
    """`--host` and one flag a port, as references to the variables of `base_env`."""
    flags = {"http": "--port", "kv": "--port", "admin": "--admin-port", "metrics": "--metrics-port"}
    return [f"--host=$({ENV_HOST})", *(f"{flags[name]}=$({port_env(name)})" for name in numbers)]


def token_flag() -> str:
    return f"--internal-token-file={INTERNAL_TOKEN_FILE}"


def literal(text: str) -> str:
    """A user's text as one argument: `$(` would otherwise be expanded by the kubelet."""
    return text.replace("$(", "$$(")


def http_probe(path: str, port: str, *, period_s: int, timeout_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def probes(startup_budget_s: int, port: str = "http") -> Manifest:
    """Started when it first could serve; then ready = would serve now, live = makes progress or is idle."""
    return {
        "startupProbe": http_probe("/health/ready", port, period_s=1, timeout_s=2, failures=startup_budget_s),
        "readinessProbe": http_probe("/health/ready", port, period_s=2, timeout_s=2, failures=2),
        "livenessProbe": http_probe("/health/live", port, period_s=10, timeout_s=5, failures=6),
    }


def tmp_volume() -> tuple[Manifest, Manifest]:
    """(volume, mount)."""
    return {"name": TMP_VOLUME, "emptyDir": {}}, {"name": TMP_VOLUME, "mountPath": "/tmp"}


def token_volume() -> tuple[Manifest, Manifest]:
    """(volume, mount) of the namespace's internal token."""
    volume: Manifest = {
        "name": TOKEN_VOLUME,
        "secret": {
            "secretName": INTERNAL_TOKEN_SECRET,
            "defaultMode": _READ_BY_OWNER_AND_GROUP,
            "items": [{"key": INTERNAL_TOKEN_KEY, "path": INTERNAL_TOKEN_KEY}],
        },
    }
    return volume, {"name": TOKEN_VOLUME, "mountPath": INTERNAL_TOKEN_DIR, "readOnly": True}


def disruption_budget_spec(selector: dict[str, str]) -> Manifest:
    """One at a time; a pod that does not run anyway never blocks a node drain."""
    return {
        "maxUnavailable": 1,
        "selector": {"matchLabels": selector},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
