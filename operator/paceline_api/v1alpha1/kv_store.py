"""KVStore: where attention state (KV) lives outside the device."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from paceline_api.v1alpha1.base import (
    BaseStatus,
    Built,
    Cel,
    Duration,
    LocalRef,
    LongText,
    Naming,
    Part,
    Quantity,
    Resource,
    SecretKeyRef,
    Text,
    Unbuilt,
)


class Mode(StrEnum):
    EMBEDDED = "embedded"
    NODE = "node"
    BOTH = "both"


class ReusePolicy(StrEnum):
    MEASURED = "measured"
    ALWAYS = "always"
    NEVER = "never"


class MemoryTier(Part):
    """KV in the engine's CPU memory."""

    capacity: Quantity = Field(description="Bytes of one engine replica's memory tier, such as 8Gi.")


class DiskTier(Part):
    """KV on a volume."""

    cel: ClassVar[tuple[Cel, ...]] = (
        Cel(
            "has(self.path) != has(self.volumeClaimTemplate)",
            "set exactly one of path and volumeClaimTemplate",
        ),
    )

    capacity: Quantity = Field(description="Physical bytes the tier may use.")
    path: LongText | None = Field(default=None, description="Folder on an ephemeral volume.")
    volume_claim_template: (
        Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] | None
    ) = Field(default=None, description="Claim for a persistent volume.")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.volume_claim_template is None):
            raise PydanticCustomError("xor", "{message}", {"message": self.cel[0].message})
        return self


class S3Tier(Part):
    """KV in an S3-compatible object store."""

    bucket: Text = Field(description="Bucket.")
    prefix: LongText | None = Field(default=None, description="Key prefix.")
    endpoint: LongText | None = Field(default=None, description="Endpoint URL of an S3-compatible server.")
    region: Text | None = Field(default=None, description="Region.")
    credentials_secret_ref: LocalRef | None = Field(default=None, description="Secret with access and secret key.")
    storage_class: Text | None = Field(default=None, description="S3 storage class.")


class Encryption(Part):
    """Encryption of KV at rest."""

    key_secret_ref: SecretKeyRef = Field(description="Secret with the key.")


class Reuse(Part):
    """When stored KV is loaded instead of computed again."""

    policy: ReusePolicy = Field(description="measured compares predicted load and compute times.")


class KVStoreSpec(Part):
    """The desired store."""

    cel: ClassVar[tuple[Cel, ...]] = (
        Cel("has(self.memory) || has(self.disk) || has(self.s3)", "name at least one tier: memory, disk or s3"),
    )

    memory: MemoryTier | None = Field(default=None, description="Tier in CPU memory.")
    disk: Annotated[DiskTier | None, Unbuilt("the disk tier")] = Field(default=None, description="Tier on disk.")
    s3: Annotated[S3Tier | None, Unbuilt("the S3 tier")] = Field(default=None, description="Tier in S3.")
    mode: Annotated[Mode | None, Built(("embedded",))] = Field(
        default=None, description="embedded: inside each engine. Default: embedded."
    )
    ttl: Annotated[Duration | None, Unbuilt("expiry of stored KV")] = Field(default=None, description="Longest life.")
    encryption: Annotated[Encryption | None, Unbuilt("encryption of stored KV")] = Field(
        default=None, description="Encryption at rest."
    )
    reuse: Annotated[Reuse | None, Unbuilt("the reuse-or-recompute decision")] = Field(
        default=None, description="When stored KV is loaded."
    )

    @model_validator(mode="after")
    def _some_tier(self) -> Self:
        if self.memory is None and self.disk is None and self.s3 is None:
            raise PydanticCustomError("tier", "{message}", {"message": self.cel[0].message})
        return self


class KVStoreStatus(BaseStatus):
    """The observed store."""


class KVStore(Resource):
    """Where attention state lives outside the device."""

    naming = Naming("KVStore", "kvstores", "kvstore", "pkv")

    spec: KVStoreSpec
    status: KVStoreStatus | None = None
