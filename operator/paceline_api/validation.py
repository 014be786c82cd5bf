"""Reads API objects with errors that a person can act on: field path, what is wrong, what to do.

The same models stand behind the CRDs, so what this accepts the API server accepts, and the other way round. Pure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from paceline_api import API_VERSION
from paceline_api.kube import Manifest
from paceline_api.v1alpha1 import RESOURCES, Resource

_BY_KIND: dict[str, type[Resource]] = {resource.naming.kind: resource for resource in RESOURCES}
Location = tuple[int | str, ...]
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with an object. `path` is the way to the field, as keys and list indices."""

    path: Location
    message: str

    @property
    def field(self) -> str:
        text = ""
        for part in self.path:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
        return text

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.path else self.message


class InvalidObject(ValueError):
    """The object is not valid; `problems` has every reason, in the order of the object's fields."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


def is_ours(manifest: Manifest) -> bool:
    """Whether the manifest claims to be of this API group, whatever its version and kind."""
    return str(manifest.get("apiVersion", "")).startswith("paceline.dev/")


def parse(manifest: Manifest) -> Resource:
    """The typed object; InvalidObject with every problem otherwise."""
    if manifest.get("apiVersion") != API_VERSION:
        raise InvalidObject(
            [Problem(("apiVersion",), f"is {manifest.get('apiVersion')!r}; this version reads {API_VERSION}")]
        )
    kind = str(manifest.get("kind"))
    model = _BY_KIND.get(kind)
    if model is None:
        raise InvalidObject([Problem(("kind",), f"is {kind!r}; known kinds are {', '.join(sorted(_BY_KIND))}")])
    try:
        # As the API server reads it: JSON types, not coerced, and only the names of the schema.
        return model.model_validate_json(json.dumps(manifest, default=str), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidObject([_problem(model, item) for item in error.errors(include_url=False)]) from None


def _problem(model: type[BaseModel], error: Any) -> Problem:
    path: Location = tuple(part for part in error["loc"] if not _is_union_tag(part))
    kind = str(error["type"])
    if kind == "extra_forbidden":
        return Problem(path, _unknown_field(model, path))
    if kind == "missing":
        return Problem(path, "is required")
    if kind == "string_pattern_mismatch":
        return Problem(path, f"{error['input']!r} does not match {error['ctx']['pattern']}")
    message = str(error["msg"])
    return Problem(path, message[0].lower() + message[1:])


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and ("[" in part or "(" in part)


def _unknown_field(model: type[BaseModel], path: Location) -> str:
    known = _fields_at(model, path[:-1])
    close = get_close_matches(str(path[-1]), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known fields here: {', '.join(known)}" if known else ""
    return f"unknown field; {hint}".rstrip("; ")


def _fields_at(model: type[BaseModel], path: Location) -> list[str]:
    schema = model.model_json_schema(by_alias=True)
    definitions: Schema = schema.get("$defs", {})
    node: Schema = schema
    for part in path:
        node = _resolved(node, definitions)
        children: Schema = node if isinstance(part, int) else node.get("properties", {})
        node = children.get("items" if isinstance(part, int) else part, {})
    return list(_resolved(node, definitions).get("properties", {}))


def _resolved(node: Schema, definitions: Schema) -> Schema:
    current: Schema = node
    while True:
        options = cast(list[Schema], current.get("anyOf", []))
        if "$ref" in current:
            current = cast(Schema, definitions[str(current["$ref"]).rsplit("/", 1)[-1]])
        elif options:
            current = next(option for option in options if option.get("type") != "null")
        else:
            return current
