"""Questions about normalised schemas: can a value fit two of them, can a finite value fit one at all. Pure."""

from __future__ import annotations

import itertools
import json
from typing import Any

Schema = dict[str, Any]


def may_overlap(branches: list[Schema], defs: dict[str, Schema]) -> bool:
    """Whether any two of these schemas might have a value in common; unsure means yes."""
    return any(not _disjoint(_follow(a, defs), _follow(b, defs)) for a, b in itertools.combinations(branches, 2))


def _follow(schema: Schema, defs: dict[str, Schema]) -> Schema:
    for _ in range(len(defs) + 1):
        if "$ref" not in schema:
            return schema
        schema = defs.get(str(schema["$ref"]).removeprefix("#/$defs/"), {})
    return {}


def _disjoint(a: Schema, b: Schema) -> bool:
    if "enum" in a and "enum" in b:
        return not {_text(value) for value in a["enum"]} & {_text(value) for value in b["enum"]}
    kinds_a, kinds_b = _kinds(a), _kinds(b)
    if kinds_a is not None and kinds_b is not None and not kinds_a & kinds_b:
        return True
    if a.get("type") == b.get("type") == "object":
        shared = set(a.get("required", ())) & set(b.get("required", ()))
        return any(_disjoint(a["properties"][name], b["properties"][name]) for name in shared)
    return False


def _kinds(schema: Schema) -> set[str] | None:
    """JSON types of a schema's values; None if they are not known."""
    if "enum" in schema:
        return {_kind_of(value) for value in schema["enum"]}
    if "type" not in schema:
        return None
    name = str(schema["type"])
    return {"number" if name == "integer" else name}


def _kind_of(value: Any) -> str:
    names: dict[type, str] = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def _text(value: Any) -> str:
    """Equal for equal JSON values; 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(float(value))
    return json.dumps(value, sort_keys=True)


def endless(defs: dict[str, Schema]) -> set[str]:
    """Names of definitions that no finite value fits: each of their values would contain another one for ever."""
    finite: set[str] = set()
    while True:
        more = {name for name, schema in defs.items() if name not in finite and _is_finite(schema, finite)}
        if not more:
            return set(defs) - finite
        finite |= more


def _is_finite(schema: Schema, finite: set[str]) -> bool:
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix("#/$defs/") in finite
    if "anyOf" in schema:
        return any(_is_finite(branch, finite) for branch in schema["anyOf"])
    needed: list[Any] = [schema["properties"][name] for name in schema.get("required", ())]
    if schema.get("minProperties") and "properties" not in schema:
        needed += [schema["additionalProperties"]] if schema.get("additionalProperties") else []
        needed += schema.get("patternProperties", {}).values()
    least, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
    needed += prefix[:least]
    needed += [schema["items"]] if least > len(prefix) else []
    return all(_is_finite(part, finite) for part in needed)
