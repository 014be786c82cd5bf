"""Building blocks of the API models: strict base classes, units, and the markers that the CRD generator reads.

Three markers carry rules that JSON Schema cannot say. `Unbuilt` refuses a field whose feature does not exist yet,
`Built` narrows an enum to the values that do, `Cel` is a cross-field rule in the API server's own language; each
has the same meaning in pydantic and in the generated CRD. Must not do I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from paceline_api.quantity import DURATION_PATTERN, QUANTITY_PATTERN, parse_duration_s

UNBUILT_KEY = "x-paceline-unbuilt"
BUILT_KEY = "x-paceline-built"
INT_OR_STRING_KEY = "x-kubernetes-int-or-string"
RULES_KEY = "x-kubernetes-validations"
_SIZE_MIN = 1_000_000
_SIZE_PATTERN = r"^([1-9][0-9]{6,17}|[1-9][0-9]{0,8}(M|G|T|P|Mi|Gi|Ti|Pi))$"
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"


@dataclass(frozen=True, slots=True)
class Cel:
    """A validation rule of the object it is declared on. `field` is the child the message points at, if any."""

    rule: str
    message: str
    field: str = ""


@dataclass(frozen=True)
class Unbuilt:
    """Marks a field of the API whose feature this version does not have: setting it is an error, never ignored."""

    feature: str

    def message(self) -> str:
        return f"not built yet: {self.feature}; remove the field"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def refuse(value: object) -> object:
            if value is None:
                return None
            raise PydanticCustomError("unbuilt", "{message}", {"message": self.message()})

        return core_schema.no_info_after_validator_function(refuse, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        json_schema = dict(handler.resolve_ref_schema(handler(schema)))
        json_schema[UNBUILT_KEY] = self.message()
        return json_schema


@dataclass(frozen=True)
class Built:
    """Marks an enum of which only `values` are built; the others are refused with a message that says so."""

    values: tuple[str, ...]

    def message(self) -> str:
        return f"not built yet: this version has only {', '.join(self.values)}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def refuse(value: object) -> object:
            if value is None or str(value) in self.values:
                return value
            raise PydanticCustomError(
                "unbuilt", "{value} is {message}", {"value": str(value), "message": self.message()}
            )

        return core_schema.no_info_after_validator_function(refuse, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        json_schema = dict(handler.resolve_ref_schema(handler(schema)))
        json_schema[BUILT_KEY] = {"values": list(self.values), "message": self.message()}
        return json_schema


class Part(BaseModel):
    """A part of a spec or status: camelCase in YAML, unknown fields refused, immutable once read."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, use_enum_values=False
    )
    cel: ClassVar[tuple[Cel, ...]] = ()


def _text_of_number(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _positive_duration(text: str) -> str:
    if parse_duration_s(text) <= 0:
        raise PydanticCustomError("duration", "must be longer than zero")
    return text


Quantity = Annotated[
    str,
    BeforeValidator(_text_of_number),
    StringConstraints(pattern=QUANTITY_PATTERN, max_length=32),
    WithJsonSchema({INT_OR_STRING_KEY: True, "pattern": QUANTITY_PATTERN, "maxLength": 32}),
]
"""A Kubernetes quantity, such as 512Mi. Bytes where it sizes memory."""

Size = Annotated[
    str,
    BeforeValidator(_text_of_number),
    StringConstraints(pattern=_SIZE_PATTERN, max_length=18),
    WithJsonSchema(
        {
            INT_OR_STRING_KEY: True,
            "pattern": _SIZE_PATTERN,
            "maxLength": 18,
            RULES_KEY: [
                {
                    "rule": f"type(self) != int || self >= {_SIZE_MIN}",
                    "message": f"must be at least {_SIZE_MIN} bytes, such as 512Mi",
                }
            ],
        }
    ),
]
"""Whole bytes, at least a million, such as 512Mi."""

Duration = Annotated[
    str,
    StringConstraints(pattern=DURATION_PATTERN, max_length=32),
    AfterValidator(_positive_duration),
    Field(json_schema_extra={RULES_KEY: [{"rule": "self.matches('[1-9]')", "message": "must be longer than zero"}]}),
]
"""A Go-style duration, such as 800ms or 2m."""

Percent = Annotated[str, StringConstraints(pattern=r"^(100|[1-9]?[0-9](\.[0-9]{1,3})?)$", max_length=8)]
"""A percentage as text, such as "99" or "99.5"."""

Decimal2 = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]{1,4})?$", max_length=16)]
"""A non-negative decimal as text, such as "3.00"."""

ObjectName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=253)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=256)]
LongText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Argument = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class LocalRef(Part):
    """A reference to an object in the same namespace."""

    name: ObjectName = Field(description="Name of the object, in this namespace.")


class SecretKeyRef(Part):
    """One key of a Secret in the same namespace."""

    name: ObjectName = Field(description="Name of the Secret, in this namespace.")
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] | None = Field(
        default=None, description="Key inside the Secret. Default: apiKey."
    )


class Slo(Part):
    """A latency promise. A limit that is not set is not judged."""

    ttft: Duration | None = Field(default=None, description="Time to first token, from the router's accept.")
    tpot: Duration | None = Field(
        default=None, description="Time per output token after the first; not judged for one token."
    )
    e2e: Duration | None = Field(
        default=None, alias="e2e", description="End to end, from the router's accept to the last token."
    )
    target: Percent | None = Field(
        default=None, description='Share of requests that must meet the limits, in percent. Default: "99".'
    )


class Condition(Part):
    """A condition as Kubernetes defines it. `lastTransitionTime` moves only when `status` flips."""

    type: Annotated[str, StringConstraints(max_length=316)]
    status: Annotated[str, StringConstraints(pattern=r"^(True|False|Unknown)$")]
    observed_generation: int | None = Field(default=None, ge=0)
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=1024)]
    message: Annotated[str, StringConstraints(max_length=32768)]


Conditions = Annotated[
    list[Condition],
    Field(
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]


class BaseStatus(Part):
    """What every status has."""

    observed_generation: int | None = Field(default=None, ge=0, description="metadata.generation last acted on.")
    conditions: Conditions | None = Field(default=None, description="Conditions, one a type.")


class Metadata(BaseModel):
    """The part of ObjectMeta that the product reads. Everything else a user or tool puts there is left alone."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True)

    name: Annotated[str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=253)]
    namespace: str | None = None
    uid: str | None = None
    generation: int | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A printer column of `kubectl get`. Priority 1 shows with `-o wide` only."""

    name: str
    type: str
    path: str
    description: str
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Naming:
    """How a kind is addressed by the API and by kubectl."""

    kind: str
    plural: str
    singular: str
    short: str


READY_COLUMNS = (
    Column("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', "Whether it is ready."),
    Column("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why."),
    Column("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
)


class Resource(BaseModel):
    """An object of the API. Subclasses declare `spec` and `status`, names, columns and rules on the whole object."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    naming: ClassVar[Naming]
    columns: ClassVar[tuple[Column, ...]] = READY_COLUMNS
    scale: ClassVar[bool] = False
    cel: ClassVar[tuple[Cel, ...]] = ()

    api_version: str
    kind: str
    metadata: Metadata
