"""Names, labels, annotations, ports and paths that more than one part of Paceline must agree on."""

from __future__ import annotations

import hashlib
import re

NAME_LENGTH_MAX = 63
_HASH_LENGTH = 8

MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"
LABEL_SERVICE = "paceline.dev/inference-service"
LABEL_ROUTER = "paceline.dev/router"
LABEL_STORE = "paceline.dev/kv-store"
LABEL_ROLE = "paceline.dev/role"
LABEL_RUNTIME = "paceline.dev/runtime"
LABEL_MODEL_HASH = "paceline.dev/model-hash"
ANNOTATION_MODEL = "paceline.dev/model"
ANNOTATION_CONFIG_HASH = "paceline.dev/config-hash"
LABEL_SLICE_SERVICE = "kubernetes.io/service-name"

FIELD_MANAGER = "paceline-operator"
FIELD_MANAGER_STATUS = "paceline-operator-status"

DEFAULT_ROUTER = "default"
INTERNAL_TOKEN_SECRET = "paceline-internal"
INTERNAL_TOKEN_KEY = "token"
INTERNAL_TOKEN_DIR = "/var/run/paceline/internal"
INTERNAL_TOKEN_FILE = f"{INTERNAL_TOKEN_DIR}/{INTERNAL_TOKEN_KEY}"
API_KEY_SECRET_KEY = "apiKey"
MODEL_CACHE_DIR = "/var/cache/paceline"
MODEL_VOLUME_DIR = "/var/lib/paceline/model"
CHAT_TEMPLATE_DIR = "/etc/paceline/chat-template"
CHAT_TEMPLATE_KEY = "chat_template.jinja"
KV_SETTINGS_DIR = "/var/run/paceline/kv-store"
KV_SETTINGS_KEY = "kv-store.json"
KV_CREDENTIALS_DIR = "/var/run/paceline/kv-s3"
KV_CA_DIR = "/var/run/paceline/kv-ca"
KV_KEYS_DIR = "/var/run/paceline/kv-keys"
KV_TOKEN_DIR = "/var/run/paceline/kv-token"
KV_DISK_DIR = "/var/lib/paceline/kv"
KV_DISK_VOLUME = "kv-store-disk"

ENGINE_HTTP_PORT = 8000
ENGINE_ADMIN_PORT = 8001
ENGINE_METRICS_PORT = 8002
ROUTER_HTTP_PORT = 8080
ROUTER_ADMIN_PORT = 8081
ROUTER_METRICS_PORT = 8082
KV_PORT = 7460
KV_ADMIN_PORT = 7461
OPERATOR_METRICS_PORT = 8083
OPERATOR_HEALTH_PORT = 8084

PORT_HTTP = "http"
PORT_ADMIN = "admin"
PORT_METRICS = "metrics"
PORT_KV = "kv"
ENV_HOST = "PACELINE_HOST"


def port_env(port_name: str) -> str:
    """The environment variable that carries the number of a named container port."""
    return "PACELINE_PORT_" + port_name.upper().replace("-", "_")


def short_hash(text: str) -> str:
    """Eight hex digits of SHA-256: enough to keep the truncated names of one namespace apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]


def truncated(name: str, length_max: int = NAME_LENGTH_MAX) -> str:
    """`name`, or its head and a hash of the whole when it is longer than a DNS label may be."""
    if len(name) <= length_max:
        return name
    head = name[: length_max - _HASH_LENGTH - 1].rstrip("-.")
    return f"{head}-{short_hash(name)}"


def child_name(parent: str, role: str) -> str:
    """Deterministic name of a child object; names with dots become DNS labels (Services allow no dots)."""
    name = f"{parent}-{role}"
    label = name.replace(".", "-")
    if label == name:
        return truncated(name)
    return f"{truncated(label, NAME_LENGTH_MAX - _HASH_LENGTH - 1)}-{short_hash(name)}"


def engine_name(service: str) -> str:
    """Name of the engine Deployment, Service, ServiceAccount, ConfigMap and PDB of an InferenceService."""
    return child_name(service, "engine")


def router_name(router: str) -> str:
    """Name of the router fleet's Deployment, Service, ServiceAccount, Role and PDB in a namespace."""
    return child_name(f"paceline-{router}", "router")


def kv_name(store: str) -> str:
    """Name of a KVStore's node server: DaemonSet, Service, ServiceAccount, ConfigMap and token Secret."""
    return child_name(store, "kv")


def kv_address(namespace: str, store: str, port: int) -> str:
    """Where engines reach their node's server."""
    return f"tcp://{kv_name(store)}.{namespace}.svc:{port}"


def label_value(text: str) -> str:
    """`text` as a label value: at most 63 characters of [A-Za-z0-9._-], hashed when anything had to change."""
    clean = re.sub(r"[^A-Za-z0-9._-]", "-", text).strip("-._")
    if clean == text and len(text) <= NAME_LENGTH_MAX:
        return text
    head = clean[: NAME_LENGTH_MAX - _HASH_LENGTH - 1].rstrip("-._")
    return f"{head}-{short_hash(text)}" if head else short_hash(text)
