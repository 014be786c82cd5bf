"""Router: the gateway fleet of a namespace."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from paceline_api.v1alpha1.base import (
    READY_COLUMNS,
    BaseStatus,
    Column,
    LongText,
    Naming,
    ObjectName,
    Part,
    Resource,
    Text,
    Unbuilt,
)


class Exposure(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class TlsSpec(Part):
    """Server certificate."""

    secret_name: ObjectName = Field(description="Secret of type kubernetes.io/tls.")


class JwtIssuerSpec(Part):
    """Who issues the tokens that stand in for API keys."""

    issuer: LongText = Field(description="OIDC issuer URL.")
    audience: Text = Field(description="Audience that a token must carry.")


class QueueSpec(Part):
    """Bounds of the router's queue."""

    max_requests: Annotated[int, Field(ge=1, le=100_000)] | None = Field(default=None, description="Requests held.")
    max_wait: Text | None = Field(default=None, description="Longest wait of one request.")


class RouterSpec(Part):
    """The desired gateway. Without a Router object a namespace gets one with the defaults."""

    replicas: Annotated[int, Field(ge=1, le=100)] | None = Field(default=None, description="Router pods. Default: 1.")
    expose: Exposure | None = Field(default=None, description="Type of the router's Service. Default: ClusterIP.")
    tls: Annotated[TlsSpec | None, Unbuilt("TLS at the router")] = Field(default=None, description="Certificate.")
    jwt: Annotated[JwtIssuerSpec | None, Unbuilt("JWT authentication")] = Field(
        default=None, description="Tokens in place of API keys."
    )
    anonymous_tenant: ObjectName | None = Field(
        default=None,
        description="Tenant that requests without credentials count as. Only requests from the router's own loopback "
        "address are let in this way. Default: none, such requests are refused.",
    )
    max_body_bytes: Annotated[int, Field(ge=1024, le=33_554_432)] | None = Field(
        default=None, description="Largest request body, in bytes. Default: 33554432."
    )
    queue: Annotated[QueueSpec | None, Unbuilt("the router's fair queue")] = Field(
        default=None, description="Bounds of the queue."
    )


class RouterStatus(BaseStatus):
    """The observed gateway."""

    replicas: Annotated[int, Field(ge=0)] | None = Field(default=None, description="Router pods that exist.")
    ready_replicas: Annotated[int, Field(ge=0)] | None = Field(default=None, description="Router pods that are ready.")
    url: LongText | None = Field(default=None, description="OpenAI-compatible base URL.")


class Router(Resource):
    """The gateway fleet that serves every InferenceService of a namespace that refers to it."""

    naming = Naming("Router", "routers", "router", "prouter")
    columns = (*READY_COLUMNS, Column("URL", "string", ".status.url", "OpenAI-compatible base URL.", 1))

    spec: RouterSpec = RouterSpec()
    status: RouterStatus | None = None
