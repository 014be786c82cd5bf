"""Tenant: who may ask, for what, with which promise."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline_api.v1alpha1.base import (
    BaseStatus,
    Naming,
    ObjectName,
    Part,
    Resource,
    SecretKeyRef,
    Size,
    Slo,
    Text,
    Unbuilt,
)


class Limits(Part):
    """Quotas of a tenant over all router replicas."""

    requests_per_minute: Annotated[int, Field(ge=1)] | None = Field(default=None, description="Requests a minute.")
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Prompt and output tokens a minute."
    )
    max_concurrent: Annotated[int, Field(ge=1)] | None = Field(default=None, description="Requests at once.")


class JwtClaims(Part):
    """Which tokens are this tenant's."""

    subject_claim: Text = Field(description="Claim that names the tenant.")
    values: Annotated[
        list[Text], Field(min_length=1, max_length=64, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = Field(description="Values of the claim that are this tenant.")


class ServiceOverride(Part):
    """A promise for one service in place of the tenant's general one."""

    service: ObjectName = Field(description="Name of the InferenceService.")
    slo: Slo = Field(description="The promise.")


class TenantSpec(Part):
    """The desired tenant."""

    priority: Annotated[Annotated[int, Field(ge=-1000, le=1000)] | None, Unbuilt("the router's fair queue")] = Field(
        default=None, description="Higher is served first."
    )
    weight: Annotated[Annotated[int, Field(ge=1, le=1000)] | None, Unbuilt("the router's fair queue")] = Field(
        default=None, description="Share among tenants of one priority."
    )
    slo: Slo | None = Field(default=None, description="Latency promise; the service's own where not set.")
    service_overrides: (
        Annotated[
            list[ServiceOverride],
            Field(
                max_length=64,
                json_schema_extra={
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["service"],
                },
            ),
        ]
        | None
    ) = Field(default=None, description="Promises for single services.")
    limits: Annotated[Limits | None, Unbuilt("tenant quotas")] = Field(default=None, description="Quotas.")
    api_key_secret_refs: (
        Annotated[
            list[SecretKeyRef],
            Field(
                max_length=16,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None
    ) = Field(default=None, description="Secrets that hold the tenant's API keys. Several allow rotation.")
    jwt: Annotated[JwtClaims | None, Unbuilt("JWT authentication")] = Field(default=None, description="Token claims.")
    services: (
        Annotated[list[ObjectName], Field(max_length=256, json_schema_extra={"x-kubernetes-list-type": "set"})] | None
    ) = Field(default=None, description="InferenceServices that the tenant may use. Default: all of the namespace.")
    kv_quota: Size | None = Field(
        default=None,
        description="Most bytes of the tenant's KV in each memory and disk tier of each store; a change rolls the pods "
        "that hold such tiers. Default: the store's tenantQuota.",
    )
    kv_sharing_group: Annotated[ObjectName | None, Unbuilt("shared KV between tenants")] = Field(
        default=None, description="Tenants of one group reuse one another's KV."
    )


class BurnRate(Part):
    """How fast the error budget is spent; 1 is exactly on budget."""

    window: Text
    value: Text


class TenantStatus(BaseStatus):
    """The observed tenant."""

    attainment: Text | None = Field(default=None, description="Share of good requests in the period, in percent.")
    error_budget_remaining: Text | None = Field(default=None, description="Budget left in the period, in percent.")
    burn_rates: (
        Annotated[
            list[BurnRate],
            Field(
                max_length=8,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["window"]},
            ),
        ]
        | None
    ) = Field(default=None, description="Burn rates by window.")


class Tenant(Resource):
    """A user or team with credentials and a latency promise."""

    naming = Naming("Tenant", "tenants", "tenant", "ptenant")

    spec: TenantSpec = TenantSpec()
    status: TenantStatus | None = None
