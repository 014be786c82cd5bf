"""KVStore: where attention state (KV) lives outside the device.

What the rules here let through, `paceline_operator.planner.kv_settings` turns into a settings document that
`paceline_kvstore.config.parse_settings` accepts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from paceline_api.names import KV_ADMIN_PORT, KV_PORT
from paceline_api.v1alpha1.base import (
    READY_COLUMNS,
    BaseStatus,
    Cel,
    Column,
    Duration,
    LocalRef,
    Naming,
    ObjectName,
    Part,
    Resource,
    Size,
    Text,
)

_KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"
_FOLDER_PATTERN = r"^/(var/lib|data|mnt|srv)(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)+$"
_MODEL_FOLDER = "/var/lib/paceline/model"


LabelValue = Annotated[str, StringConstraints(max_length=63)]
DataKey = Annotated[str, StringConstraints(pattern=_KEY_PATTERN, max_length=253)]


class Mode(StrEnum):
    EMBEDDED = "embedded"
    NODE = "node"
    BOTH = "both"


class Encoding(StrEnum):
    NONE = "none"
    ZSTD = "zstd"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def is_lossy(self) -> bool:
        """Whether numbers come back near those that were computed, not equal."""
        return self in (Encoding.INT8, Encoding.FP8)


class ReusePolicy(StrEnum):
    MEASURED = "measured"
    ALWAYS = "always"
    NEVER = "never"


def _refused(rule: Cel) -> PydanticCustomError:
    return PydanticCustomError("rule", "{message}", {"message": rule.message})


class MemoryTier(Part):
    """KV in CPU memory."""

    capacity: Size = Field(description="Bytes of one process's memory tier, such as 8Gi; on top of its own memory.")


class ClaimRequests(Part):
    """What a claim asks for."""

    storage: Size | None = Field(
        default=None, description="Size of the volume. Default: the capacity, 5 % of it and 64Mi."
    )


class ClaimResources(Part):
    """Resources of a claim."""

    requests: ClaimRequests | None = Field(default=None, description="What the claim asks for.")


class AccessMode(StrEnum):
    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"


class ClaimSpec(Part):
    """The part of a PersistentVolumeClaim's spec that a pod's own volume needs."""

    storage_class_name: ObjectName | None = Field(default=None, description="StorageClass. Default: the cluster's.")
    access_modes: (
        Annotated[
            list[AccessMode], Field(min_length=1, max_length=1, json_schema_extra={"x-kubernetes-list-type": "atomic"})
        ]
        | None
    ) = Field(default=None, description="Default: ReadWriteOnce.")
    resources: ClaimResources | None = Field(default=None, description="Resources of the claim.")


class ClaimTemplate(Part):
    """A claim that is made for each pod and goes with it (a generic ephemeral volume)."""

    spec: ClaimSpec = Field(description="The claim.")


class DiskTier(Part):
    """KV on a volume of each pod's own. It outlives the container, not the pod."""

    cel: ClassVar[tuple[Cel, ...]] = (
        Cel("!has(self.path) || !has(self.volumeClaimTemplate)", "set path or volumeClaimTemplate, not both"),
        Cel(
            f"!has(self.path) || !self.path.startsWith('{_MODEL_FOLDER}')",
            f"path: {_MODEL_FOLDER} is where models are mounted; choose another folder",
        ),
    )

    capacity: Size = Field(description="Physical bytes that the tier may use.")
    path: Annotated[str, StringConstraints(pattern=_FOLDER_PATTERN, max_length=253)] | None = Field(
        default=None,
        description="Where the pod's ephemeral volume (emptyDir) is mounted: a folder below /var/lib, /data, /mnt or "
        "/srv. Default: /var/lib/paceline/kv.",
    )
    volume_claim_template: ClaimTemplate | None = Field(
        default=None, description="A volume of a StorageClass in place of the node's own disk."
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.path is not None and self.volume_claim_template is not None:
            raise _refused(self.cel[0])
        if self.path is not None and self.path.startswith(_MODEL_FOLDER):
            raise _refused(self.cel[1])
        return self


class ConfigMapKeyRef(Part):
    """One key of a ConfigMap in the same namespace."""

    name: ObjectName = Field(description="Name of the ConfigMap, in this namespace.")
    key: DataKey | None = Field(default=None, description="Key inside the ConfigMap. Default: ca.crt.")


class S3Tier(Part):
    """KV in an S3-compatible object store, shared by all that name the same bucket and prefix."""

    bucket: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", max_length=63)] = Field(
        description="Bucket."
    )
    prefix: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*$", max_length=512)] | None
    ) = Field(default=None, description="Key prefix, without a / at either end. Default: paceline.")
    endpoint: Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+(/\S*)?$", max_length=1024)] | None = Field(
        default=None, description="Endpoint URL of an S3-compatible server. Default: AWS."
    )
    region: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]+$", max_length=64)] | None = Field(
        default=None, description="Region. Default: us-east-1, or what the environment says."
    )
    credentials_secret_ref: LocalRef | None = Field(
        default=None,
        description="Secret with the keys AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if any, AWS_SESSION_TOKEN; "
        "read again every 20 seconds. Default: the chain of the AWS SDK.",
    )
    storage_class: Annotated[str, StringConstraints(pattern=r"^[A-Z0-9_]+$", max_length=64)] | None = Field(
        default=None, description="S3 storage class."
    )
    capacity: Size | None = Field(default=None, description="Most bytes that one process adds. Default: no bound.")
    ca_config_map_ref: ConfigMapKeyRef | None = Field(
        default=None,
        description="ConfigMap with the certificate authorities (PEM) that sign the endpoint's certificate.",
    )


class KeyFileRef(Part):
    """The key of a Secret that holds encryption keys."""

    name: ObjectName = Field(description="Name of the Secret, in this namespace.")
    key: DataKey | None = Field(default=None, description="Key inside the Secret. Default: keys.")


class Encryption(Part):
    """Encryption (AES-256-GCM) of what goes to disk and S3."""

    key_secret_ref: KeyFileRef = Field(
        description="Secret with encryption keys of 64 hexadecimal digits, one a line: the first seals, the others "
        "still open. A change rolls the pods."
    )


class Reuse(Part):
    """When stored KV is loaded instead of computed again."""

    policy: ReusePolicy = Field(description="measured compares predicted load and compute times.")


class TokenRef(Part):
    """The key of a Secret that holds a token."""

    name: ObjectName = Field(description="Name of the Secret, in this namespace.")
    key: DataKey | None = Field(default=None, description="Key inside the Secret. Default: token.")


class Toleration(Part):
    """A taint that the node server's pods tolerate, as Kubernetes names its fields."""

    cel: ClassVar[tuple[Cel, ...]] = (
        Cel(
            "(has(self.operator) && self.operator == 'Exists') ? !has(self.value) : has(self.key)",
            "operator Equal needs a key; operator Exists takes no value",
        ),
    )

    key: Text | None = Field(default=None, description="Taint's key; without one, every taint (operator Exists).")
    operator: Annotated[str, StringConstraints(pattern="^(Exists|Equal)$", max_length=6)] | None = Field(
        default=None, description="Exists or Equal. Default: Equal."
    )
    value: Text | None = Field(default=None, description="Taint's value.")
    effect: (
        Annotated[str, StringConstraints(pattern="^(NoSchedule|PreferNoSchedule|NoExecute)$", max_length=16)] | None
    ) = Field(default=None, description="Taint's effect. Default: all.")

    @model_validator(mode="after")
    def _operator_fits(self) -> Self:
        if self.value is not None if self.operator == "Exists" else self.key is None:
            raise _refused(self.cel[0])
        return self


class NodeServer(Part):
    """The server that the engines of a node share: a DaemonSet behind a Service that leads to the caller's own node."""

    cel: ClassVar[tuple[Cel, ...]] = (
        Cel(
            f"!has(self.port) || self.port != {KV_ADMIN_PORT}",
            f"port {KV_ADMIN_PORT} is the server's admin port; choose another",
        ),
    )

    port: Annotated[int, Field(ge=1024, le=65535)] | None = Field(
        default=None, description=f"Port for engines. Default: {KV_PORT}."
    )
    memory: MemoryTier | None = Field(default=None, description="The server's memory tier. Default: spec.memory's.")
    token_secret_ref: TokenRef | None = Field(
        default=None, description="Secret with the token that engines show. Default: one that the operator makes, once."
    )
    image: Text | None = Field(default=None, description="Container image. Default: the operator's.")
    node_selector: Annotated[dict[Text, LabelValue], Field(max_length=16)] | None = Field(
        default=None, description="Labels of the nodes that get a server. Default: every node."
    )
    tolerations: (
        Annotated[list[Toleration], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"})] | None
    ) = Field(default=None, description="Taints that the server tolerates, such as those of GPU nodes.")

    @model_validator(mode="after")
    def _own_port(self) -> Self:
        if self.port == KV_ADMIN_PORT:
            raise _refused(self.cel[0])
        return self


_ON_NODES = "has(self.mode) && self.mode in ['node', 'both']"


class KVStoreSpec(Part):
    """The desired store."""

    cel: ClassVar[tuple[Cel, ...]] = (
        Cel("has(self.memory) || has(self.disk) || has(self.s3)", "name at least one tier: memory, disk or s3"),
        Cel(f"!has(self.node) || ({_ON_NODES})", "node belongs to mode node or both; set mode, or remove node"),
        Cel(
            "!has(self.mode) || self.mode != 'both' || has(self.memory)",
            "mode both keeps memory in the engines too; set memory, or use mode node",
        ),
        Cel(
            "!has(self.encryption) || has(self.disk) || has(self.s3)",
            "encryption seals what goes to disk and S3; name one of them, or remove encryption",
        ),
        Cel(
            "!has(self.encoding) || self.encoding == 'none' || has(self.disk) || has(self.s3)",
            "encoding is for what goes to disk and S3; name one of them, or remove encoding",
        ),
        Cel(
            f"!has(self.encoding) || !(self.encoding in ['int8', 'fp8']) || !({_ON_NODES})",
            "engines must know that numbers are near, not equal: int8 and fp8 need mode embedded",
        ),
    )

    memory: MemoryTier | None = Field(default=None, description="Tier in CPU memory.")
    disk: DiskTier | None = Field(default=None, description="Tier on a volume.")
    s3: S3Tier | None = Field(default=None, description="Tier in S3.")
    mode: Mode | None = Field(
        default=None,
        description="embedded: all tiers are inside each engine. node: all are in one server a node. both: memory in "
        "the engines, and a server a node with memory, disk and S3 behind it. Default: embedded.",
    )
    node: NodeServer | None = Field(default=None, description="The server of each node, in mode node or both.")
    ttl: Duration | None = Field(
        default=None,
        description="Longest life of a chunk in memory and on disk; in S3 if it is encrypted, else the bucket's "
        "lifecycle rules say it. Default: no end.",
    )
    encryption: Encryption | None = Field(default=None, description="Encryption of what goes to disk and S3.")
    encoding: Encoding | None = Field(
        default=None,
        description="How disk and S3 keep chunks. zstd: smaller, the same bytes back. int8, fp8: smaller still, with "
        "numbers near those that were computed, so that texts may differ. All cost time on a core. Default: none.",
    )
    reuse: Reuse | None = Field(default=None, description="When stored KV is loaded.")
    tenant_quota: Size | None = Field(
        default=None,
        description="Most bytes of each tenant's KV in each of memory and disk, for tenants without a kvQuota; over "
        "it, the tenant's own oldest goes. Default: no bound.",
    )

    @property
    def on_nodes(self) -> bool:
        """Whether there is a server on each node."""
        return self.mode in (Mode.NODE, Mode.BOTH)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.memory is None and self.disk is None and self.s3 is None:
            raise _refused(self.cel[0])
        if self.node is not None and not self.on_nodes:
            raise _refused(self.cel[1])
        if self.mode is Mode.BOTH and self.memory is None:
            raise _refused(self.cel[2])
        if self.encryption is not None and self.disk is None and self.s3 is None:
            raise _refused(self.cel[3])
        return self

    @model_validator(mode="after")
    def _encoding_fits(self) -> Self:
        encoding = self.encoding or Encoding.NONE
        if encoding is not Encoding.NONE and self.disk is None and self.s3 is None:
            raise _refused(self.cel[4])
        if encoding.is_lossy and self.on_nodes:
            raise _refused(self.cel[5])
        return self


class KVStoreStatus(BaseStatus):
    """The observed store."""

    nodes: Annotated[int, Field(ge=0)] | None = Field(default=None, description="Nodes that should have a server.")
    ready_nodes: Annotated[int, Field(ge=0)] | None = Field(default=None, description="Nodes whose server is ready.")
    address: Text | None = Field(default=None, description="Where engines reach their node's server.")


class KVStore(Resource):
    """Where attention state lives outside the device."""

    naming = Naming("KVStore", "kvstores", "kvstore", "pkv")
    columns = (
        Column("Mode", "string", ".spec.mode", "Where the tiers are."),
        Column("Nodes", "integer", ".status.readyNodes", "Nodes whose server is ready."),
        *READY_COLUMNS,
    )

    spec: KVStoreSpec
    status: KVStoreStatus | None = None
