"""What a process needs of a KVStore: its settings document, volumes, and resources on top of its own.

The document is what `paceline_kvstore.config.parse_settings` reads. Secrets are mounted, and the document has only
their paths. An engine in mode node has the node server as its only tier; in mode both it has memory in front. Pure.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from paceline_api.kube import CONFIG_MAP, SECRET, Kind, Manifest
from paceline_api.names import (
    KV_CA_DIR,
    KV_CREDENTIALS_DIR,
    KV_DISK_DIR,
    KV_DISK_VOLUME,
    KV_KEYS_DIR,
    KV_PORT,
    KV_SETTINGS_DIR,
    KV_SETTINGS_KEY,
    KV_TOKEN_DIR,
    kv_address,
    kv_name,
    short_hash,
)
from paceline_api.quantity import parse_bytes, parse_duration_s, parse_quantity
from paceline_api.v1alpha1 import KVStore, Tenant
from paceline_api.v1alpha1.kv_store import AccessMode, ClaimSpec, DiskTier, MemoryTier, Mode, ReusePolicy, S3Tier
from paceline_api.validation import InvalidObject, parse
from paceline_operator.planner.manifests import being_deleted, dig, text_hash
from paceline_operator.planner.status import Verdict, reconciling

ANNOTATION_STORE_HASH = "paceline.dev/kv-store-hash"
TOKEN_KEY = "token"
CREDENTIAL_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
MEMORY, DISK_SPACE = "memory", "ephemeral-storage"
_KEYS_KEY, _CA_KEY = "keys", "ca.crt"
_READ_BY_OWNER_AND_GROUP = 0o440
# The tier keeps its files within the capacity; the kubelet counts folders and blocks too, and evicts a pod above.
_VOLUME_SPARE = 64 << 20
_SETTINGS_VOLUME = "kv-store-settings"
_KEY_PREFIX = "kv-store-"
Pair = tuple[Manifest, Manifest]
Held = Mapping[str, str]
"""The keys of a Secret or ConfigMap that have a value, with a hash of it."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Keys of a Secret or ConfigMap. `rolls`: processes read it once, so that a change must start them anew.

    `field` is where the store names it, empty for the token that the operator makes.
    """

    field: str
    kind: Kind
    name: str
    keys: tuple[str, ...]
    rolls: bool = True

    @property
    def label(self) -> str:
        return f"{self.kind.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class StorePart:
    """One process's part of a store. `extra` is bytes by resource, on top of what the process needs by itself."""

    settings: Manifest
    references: tuple[Reference, ...]
    pairs: tuple[Pair, ...]
    extra: Mapping[str, int]

    @property
    def text(self) -> str:
        """The settings document, as the ConfigMap holds it."""
        return _text(self.settings)

    @property
    def key(self) -> str:
        """The document's key in the ConfigMap: another document has another."""
        return _key(self.settings)

    def hash(self, held: Mapping[str, Held | None]) -> str:
        """Changes when processes must start anew. `held`: what the objects hold that the references name, by label."""
        rolling = [(held.get(item.label) or {}).get(item.keys[0]) for item in self.references if item.rolls]
        return text_hash([self.settings, rolling])

    def missing(self, held: Mapping[str, Held | None]) -> Verdict | None:
        """What pods would wait for: an object or a key of it."""
        for item in self.references:
            keys = held.get(item.label)
            absent = [key for key in item.keys if key not in (keys or ())]
            if not item.field and absent:
                return reconciling("KVStoreTokenNotFound", _own_token_message(item, keys))
            if keys is None:
                message = f"{item.field}: there is no {item.label} in this namespace; create it"
                return reconciling(f"{item.kind.kind}NotFound", message, warning=True)
            if absent:
                message = f"{item.field}: {item.label} has no key {absent[0]} with a value; add it"
                return reconciling(f"{item.kind.kind}KeyNotFound", message, warning=True)
        return None


def _own_token_message(token: Reference, keys: Held | None) -> str:
    if keys is None:
        return f"there is no {token.label} in this namespace yet; the operator makes it"
    return (
        f"{token.label} has no value under the key {token.keys[0]}: if it is yours and for something else, give the "
        "KVStore another name; else delete it, and it is made anew"
    )


def held_by(manifest: Manifest | None) -> Held | None:
    """Of a Secret or ConfigMap as the API has it. Hashes are keyed with the uid, which only its readers know."""
    if manifest is None:
        return None
    data: Manifest = {**(manifest.get("binaryData") or {}), **(manifest.get("data") or {})}
    uid = manifest["metadata"].get("uid")
    return {key: text_hash([uid, key, value]) for key, value in data.items() if value}


def quotas_of(tenants: Iterable[Manifest]) -> dict[str, int]:
    """Bytes of the tenants that have a quota of their own. One that is going or not valid has none."""
    quotas: dict[str, int] = {}
    for manifest in tenants:
        if being_deleted(manifest) or dig(manifest, "spec", "kvQuota") is None:
            continue
        with contextlib.suppress(InvalidObject):
            tenant = parse(manifest)
            assert isinstance(tenant, Tenant)
            if tenant.spec.kv_quota is not None:
                quotas[tenant.metadata.name] = parse_bytes(tenant.spec.kv_quota)
    return quotas


def engine_part(
    store: KVStore, namespace: str, config_map: str, quotas: Mapping[str, int] = MappingProxyType({})
) -> StorePart:
    """What an engine has; the settings are under KV_SETTINGS_KEY of that ConfigMap. quotas: bytes by tenant."""
    spec, builder = store.spec, _Builder(store, config_map)
    if spec.mode is not Mode.NODE:
        builder.on_memory(spec.memory)
    if spec.on_nodes:
        builder.on_node(namespace)
    else:
        builder.on_tiers()
    if spec.mode is not Mode.NODE:
        builder.on_limits(quotas)
    builder.settings["reuse"] = (spec.reuse.policy if spec.reuse else ReusePolicy.MEASURED).value
    return builder.part()


def server_part(store: KVStore, config_map: str, quotas: Mapping[str, int] = MappingProxyType({})) -> StorePart:
    """What the server of each node has."""
    node, builder = store.spec.node, _Builder(store, config_map)
    builder.on_memory((node and node.memory) or store.spec.memory)
    builder.on_tiers()
    builder.on_limits(quotas)
    return builder.part()


def engine_references(manifest: Manifest) -> tuple[Reference, ...]:
    """What engines mount for a store; nothing where it is not valid."""
    store, _ = read_store(manifest)
    return () if store is None else engine_part(store, "", "").references


def store_references(manifest: Manifest) -> tuple[Reference, ...]:
    """What engines and the node server mount for a store."""
    store, _ = read_store(manifest)
    return () if store is None else references_of(store)


def references_of(store: KVStore) -> tuple[Reference, ...]:
    """`store_references` of a store that is valid."""
    servers = server_part(store, "").references if store.spec.on_nodes else ()
    return (*servers, *engine_part(store, "", "").references)


def settings_flag() -> str:
    return f"--kv-store-config={KV_SETTINGS_DIR}/{KV_SETTINGS_KEY}"


def with_older(data: Mapping[str, str], live: Manifest | None, *, settled: bool) -> dict[str, str]:
    """The ConfigMap's data, with the documents of pods that run until they are replaced.

    A container that starts again reads its volume anew. It must find the settings that its pod was made with: others
    may name files that it has not, or be the very ones that new pods can't start with.
    """
    older: Mapping[str, str] = {} if settled else dig(live, "data") or {}
    return {key: text for key, text in older.items() if key.startswith(_KEY_PREFIX)} | dict(data)


def store_port(store: KVStore) -> int:
    node = store.spec.node
    return node.port if node and node.port else KV_PORT


def token_reference(store: KVStore) -> Reference:
    """The node server's token: the user's Secret, or the one that the operator makes."""
    given = store.spec.node.token_secret_ref if store.spec.node else None
    if given is None:
        return Reference("", SECRET, kv_name(store.metadata.name), (TOKEN_KEY,))
    return Reference("spec.node.tokenSecretRef", SECRET, given.name, (given.key or TOKEN_KEY,))


def token_pair(token: Reference) -> Pair:
    return _files("kv-store-token", KV_TOKEN_DIR, token, TOKEN_KEY)


def read_store(manifest: Manifest) -> tuple[KVStore | None, str]:
    """The store, or None and what is wrong with it."""
    try:
        store = parse(manifest)
    except InvalidObject as error:
        return None, str(error)
    assert isinstance(store, KVStore)
    problem = store_problem(store)
    return (None, problem) if problem else (store, "")


def store_problem(store: KVStore) -> str | None:
    """What no schema can say: "field: why and what to do"; None if all is well."""
    disk = store.spec.disk
    asked = disk and disk.volume_claim_template and _storage(disk.volume_claim_template.spec)
    if disk is None or not asked or parse_quantity(asked) >= parse_quantity(disk.capacity):
        return None
    return (
        "spec.disk.volumeClaimTemplate.spec.resources.requests.storage: "
        f"{asked} is less than spec.disk.capacity, {disk.capacity}; ask for more, or leave it out"
    )


def with_extra(resources: Manifest | None, extra: Mapping[str, int]) -> Manifest | None:
    """A container's resources with the store's memory and disk space on top.

    A request that is not there counts as the limit, as in Kubernetes; a limit that is not there stays away.
    """
    if not extra:
        return resources
    requests, limits = (dict((resources or {}).get(part) or {}) for part in ("requests", "limits"))
    for name, size in extra.items():
        own = requests.get(name, limits.get(name, "0"))
        requests[name] = _sum(own, size)
        if name in limits:
            limits[name] = _sum(limits[name], size)
    return {"requests": requests} | ({"limits": limits} if limits else {})


def _sum(quantity: str, size: int) -> str:
    return str(int(parse_quantity(quantity)) + size)


class _Builder:
    """Collects settings, volumes and references that belong together."""

    def __init__(self, store: KVStore, config_map: str) -> None:
        self.settings: Manifest = {}
        self._store = store
        self._references: list[Reference] = []
        self._config_map = config_map
        self._pairs: list[Pair] = []
        self._extra: dict[str, int] = {}

    def part(self) -> StorePart:
        item = {"key": _key(self.settings), "path": KV_SETTINGS_KEY}
        document = _mounted(
            _SETTINGS_VOLUME, KV_SETTINGS_DIR, {"configMap": {"name": self._config_map, "items": [item]}}
        )
        return StorePart(self.settings, tuple(self._references), (document, *self._pairs), self._extra)

    def on_memory(self, memory: MemoryTier | None) -> None:
        if memory is not None:
            capacity = self._extra[MEMORY] = parse_bytes(memory.capacity)
            self.settings["memory"] = {"capacity": capacity}

    def on_node(self, namespace: str) -> None:
        token = token_reference(self._store)
        address = kv_address(namespace, self._store.metadata.name, store_port(self._store))
        self.settings["node"] = {"address": address, "tokenFile": f"{KV_TOKEN_DIR}/{TOKEN_KEY}"}
        self._references.append(token)
        self._pairs.append(token_pair(token))

    def on_tiers(self) -> None:
        spec = self._store.spec
        if spec.disk is not None:
            self._on_disk(spec.disk)
        if spec.s3 is not None:
            self._on_s3(spec.s3)
        if spec.encryption is not None:
            given = spec.encryption.key_secret_ref
            keys = Reference("spec.encryption.keySecretRef", SECRET, given.name, (given.key or _KEYS_KEY,))
            self.settings["encryptionKeyFile"] = f"{KV_KEYS_DIR}/{_KEYS_KEY}"
            self._add(keys, _files("kv-store-keys", KV_KEYS_DIR, keys, _KEYS_KEY))
        if spec.encoding is not None:
            self.settings["encoding"] = spec.encoding.value

    def on_limits(self, quotas: Mapping[str, int]) -> None:
        spec = self._store.spec
        if spec.ttl is not None:
            self.settings["ttl"] = parse_duration_s(spec.ttl)
        if spec.tenant_quota is not None:
            self.settings["defaultQuota"] = parse_bytes(spec.tenant_quota)
        # Only what has such a tier: quotas of others would roll pods for nothing.
        if quotas and {"memory", "disk"} & self.settings.keys():
            self.settings["tenantQuotas"] = dict(sorted(quotas.items()))

    def _on_disk(self, disk: DiskTier) -> None:
        capacity, folder = parse_bytes(disk.capacity), disk.path or KV_DISK_DIR
        size = str(capacity + capacity // 20 + _VOLUME_SPARE)
        # Below the mount: a volume's own file system may keep folders of its own at its root.
        self.settings["disk"] = {"path": f"{folder}/store", "capacity": capacity}
        if disk.volume_claim_template is not None:
            claim = _claim(disk.volume_claim_template.spec, size)
            volume: Manifest = {"name": KV_DISK_VOLUME, "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
        else:
            volume = {"name": KV_DISK_VOLUME, "emptyDir": {"sizeLimit": size}}
            self._extra[DISK_SPACE] = int(size)
        self._pairs.append((volume, {"name": KV_DISK_VOLUME, "mountPath": folder}))

    def _on_s3(self, s3: S3Tier) -> None:
        settings: Manifest = {"bucket": s3.bucket}
        given = {"prefix": s3.prefix, "endpoint": s3.endpoint, "region": s3.region, "storageClass": s3.storage_class}
        settings |= {name: value for name, value in given.items() if value is not None}
        if s3.capacity is not None:
            settings["capacity"] = parse_bytes(s3.capacity)
        if s3.credentials_secret_ref is not None:
            name = s3.credentials_secret_ref.name
            reference = Reference("spec.s3.credentialsSecretRef", SECRET, name, CREDENTIAL_KEYS, rolls=False)
            volume = {"secretName": name, "defaultMode": _READ_BY_OWNER_AND_GROUP}
            self._add(reference, _mounted("kv-store-s3", KV_CREDENTIALS_DIR, {"secret": volume}))
            settings["credentialsDir"] = KV_CREDENTIALS_DIR
        if s3.ca_config_map_ref is not None:
            ref = s3.ca_config_map_ref
            ca = Reference("spec.s3.caConfigMapRef", CONFIG_MAP, ref.name, (ref.key or _CA_KEY,))
            self._add(ca, _files("kv-store-ca", KV_CA_DIR, ca, _CA_KEY))
            settings["caFile"] = f"{KV_CA_DIR}/{_CA_KEY}"
        self.settings["s3"] = settings

    def _add(self, reference: Reference, pair: Pair) -> None:
        self._references.append(reference)
        self._pairs.append(pair)


def _files(volume: str, folder: str, reference: Reference, path: str) -> Pair:
    """The one key of a reference, as a file of that name."""
    items = [{"key": reference.keys[0], "path": path}]
    if reference.kind == SECRET:
        source: Manifest = {
            "secret": {"secretName": reference.name, "defaultMode": _READ_BY_OWNER_AND_GROUP, "items": items}
        }
    else:
        source = {"configMap": {"name": reference.name, "items": items}}
    return _mounted(volume, folder, source)


def _mounted(volume: str, folder: str, source: Manifest) -> Pair:
    return {"name": volume, **source}, {"name": volume, "mountPath": folder, "readOnly": True}


def _text(settings: Manifest) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _key(settings: Manifest) -> str:
    return f"{_KEY_PREFIX}{short_hash(_text(settings))}.json"


def _storage(claim: ClaimSpec) -> str | None:
    return claim.resources.requests.storage if claim.resources and claim.resources.requests else None


def _claim(claim: ClaimSpec, size: str) -> Manifest:
    modes = claim.access_modes or [AccessMode.READ_WRITE_ONCE]
    spec: Manifest = {
        "accessModes": [mode.value for mode in modes],
        "resources": {"requests": {"storage": _storage(claim) or size}},
        "volumeMode": "Filesystem",
    }
    return spec if claim.storage_class_name is None else {**spec, "storageClassName": claim.storage_class_name}
