"""Checks a JSON Schema against what is enforced and rewrites it into forms that the grammar compiler gets right.

The compiler silently ignores what it does not know, and keywords without a `type` beside them; so nothing reaches it
that is not written here. The result may be narrower than the input, never wider: what is valid under it is valid under
the input. Standard: JSON Schema draft 2020-12. Pure, no xgrammar.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, cast

from paceline_engine.structured.claims import (
    ANNOTATIONS,
    ENFORCED,
    LARGEST_INTEGER,
    MAX_DEPTH,
    MAX_ENUM_VALUES,
    MAX_MULTIPLE,
    MAX_NODES,
    REFUSED,
)
from paceline_engine.structured.disjoint import endless, may_overlap
from paceline_engine.structured.formats import PATTERNS
from paceline_engine.structured.patterns import PatternRefused, of_length, searchable

Schema = dict[str, Any]

# Stands in the schema where a pattern is; the compiler's grammar then has the EBNF there.
PATTERN_MARK = "paceline-pattern-"

_KEYWORDS: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties", "patternProperties", "propertyNames"})
    | {"minProperties", "maxProperties"},
}
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_COMBINERS = ("anyOf", "oneOf", "allOf", "$ref")


class SchemaRefused(ValueError):
    """A schema that is wrong or can't be enforced. `pointer` is where (RFC 6901)."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(f"{pointer or '/'}: {reason}")
        self.pointer = pointer
        self.reason = reason


def normalise(schema: Any, patterns: list[str]) -> Schema:
    """The schema for the compiler, with marks for patterns, whose EBNF is added to `patterns`. Raises SchemaRefused."""
    return _Normaliser(schema, patterns).run()


class _Normaliser:
    """One pass over one schema; every place that a $ref names becomes an entry of $defs."""

    def __init__(self, root: Any, patterns: list[str]) -> None:
        self._root = root
        self._patterns = patterns
        self._names: dict[str, str] = {}
        self._defs: dict[str, Schema] = {}
        self._num_nodes = 0
        self._makers: dict[str, Callable[[Schema, str, int], Schema]] = {
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "array": self._array,
            "object": self._object,
        }

    def run(self) -> Schema:
        """The whole schema."""
        body = self._schema(self._root, "", 0)
        without_end = endless({**self._defs, "": body})
        if without_end:
            names = {name: target for target, name in self._names.items()}
            at = names.get(next(iter(sorted(without_end, reverse=True))), "#").removeprefix("#")
            raise SchemaRefused(at, "no finite value fits: it always contains another one of itself")
        return body | ({"$defs": self._defs} if self._defs else {})

    def _schema(self, schema: Any, at: str, depth: int) -> Schema:
        self._num_nodes += 1
        if depth > MAX_DEPTH:
            raise SchemaRefused(at, f"nested deeper than {MAX_DEPTH}")
        if self._num_nodes > MAX_NODES:
            raise SchemaRefused(at, f"more than {MAX_NODES} subschemas")
        if schema is True:
            return {}
        if schema is False:
            raise SchemaRefused(at, "no value is valid here")
        if not isinstance(schema, dict):
            raise SchemaRefused(at, "a schema must be an object, true or false")
        given = {name: value for name, value in schema.items() if _matters(name, value, at)}
        combiner = next((name for name in _COMBINERS if name in given), None)
        if combiner is not None:
            return self._combined(combiner, given, at, depth)
        types = _types(given, at)
        if "enum" in given or "const" in given:
            return _values(given, types, at)
        made = [self._typed(name, given, at, depth) for name in types]
        return made[0] if len(made) == 1 else {"anyOf": made} if made else {}

    def _typed(self, name: str, given: Schema, at: str, depth: int) -> Schema:
        mine = _KEYWORDS.get("number" if name == "integer" else name, frozenset())
        keywords = {key: value for key, value in given.items() if key in mine}
        return {"type": name} | (self._makers[name](keywords, at, depth) if name in self._makers else {})

    def _combined(self, name: str, given: Schema, at: str, depth: int) -> Schema:
        other = next((key for key in given if key != name), None)
        if other is not None:
            raise SchemaRefused(f"{at}/{_escape(other)}", f"not supported beside {name}: move it into the subschemas")
        if name == "$ref":
            return {"$ref": f"#/$defs/{self._reference(given[name], at, depth)}"}
        branches = given[name]
        at = f"{at}/{name}"
        if not isinstance(branches, list) or not branches:
            raise SchemaRefused(at, "must be a list of at least one schema")
        if name == "allOf" and len(branches) > 1:
            raise SchemaRefused(at, "more than one schema is not supported: merge them into one")
        made = [
            self._schema(branch, f"{at}/{index}", depth + 1)
            for index, branch in enumerate(branches)
            if branch is not False or len(branches) == 1
        ]
        if not made:
            raise SchemaRefused(at, "no value is valid here")
        if name == "oneOf" and may_overlap(made, self._defs):
            raise SchemaRefused(
                at, "a value might fit two of the schemas: use anyOf, or tell them apart by type or const"
            )
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _reference(self, target: Any, at: str, depth: int) -> str:
        """Name in $defs of the schema that `target` points to."""
        at = f"{at}/$ref"
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise SchemaRefused(at, "only references into the same schema (#/...) are supported")
        if target in self._names:
            return self._names[target]
        name = self._names[target] = f"d{len(self._names)}"
        place: Any = self._root
        seen: set[str] = {target}
        while True:
            place = _resolve(self._root, target, at)
            if not isinstance(place, dict) or "$ref" not in place:
                break
            target = place["$ref"] if isinstance(place["$ref"], str) else ""
            if target in seen:
                raise SchemaRefused(at, "the reference leads back to itself")
            seen.add(target)
            if target in self._names and self._names[target] != name:
                self._defs[name] = {"$ref": f"#/$defs/{self._names[target]}"}
                return name
        self._defs[name] = {}
        self._defs[name] = self._schema(place, target.removeprefix("#"), depth + 1)
        return name

    def _mark(self, ebnf: str) -> str:
        self._patterns.append(ebnf)
        return f"^{PATTERN_MARK}{len(self._patterns) - 1}$"

    def _string(self, given: Schema, at: str, _depth: int) -> Schema:
        lengths = [key for key in ("minLength", "maxLength") if key in given]
        chosen = [key for key in ("pattern", "format") if key in given]
        if len(chosen) + bool(lengths) > 1:
            raise SchemaRefused(f"{at}/{(lengths or chosen)[-1]}", f"not supported together with {chosen[0]}")
        try:
            if lengths:
                least, most = _count(given, "minLength", at) or 0, _count(given, "maxLength", at)
                if most is not None and most < least:
                    raise SchemaRefused(f"{at}/maxLength", f"is less than minLength {least}")
                return {"pattern": self._mark(of_length(least, most))}
            if chosen:
                name = given[chosen[0]]
                if not isinstance(name, str):
                    raise SchemaRefused(f"{at}/{chosen[0]}", "must be a string")
                return {"pattern": self._mark(searchable(name if chosen == ["pattern"] else f"^{_format(name, at)}$"))}
        except PatternRefused as error:
            raise SchemaRefused(f"{at}/{(lengths or chosen)[-1]}", str(error)) from error
        return {}

    def _integer(self, given: Schema, at: str, _depth: int) -> Schema:
        bounds = {key: _number(given, key, at) for key in given}
        step = bounds.pop("multipleOf", None)
        if step is not None:
            if bounds or step != int(step) or not 1 <= step <= MAX_MULTIPLE:
                raise SchemaRefused(f"{at}/multipleOf", ENFORCED["multipleOf"])
            return {"multipleOf": int(step)}
        low = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
        low += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
        high = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
        high += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
        if low and high and max(low) > min(high):
            raise SchemaRefused(at, "no integer lies between these bounds")
        if any(abs(bound) > LARGEST_INTEGER for bound in low + high):
            raise SchemaRefused(at, "bounds of 2^53 or more are not supported")
        return {"minimum": max([*low, -LARGEST_INTEGER]), "maximum": min([*high, LARGEST_INTEGER])}

    def _number(self, given: Schema, at: str, _depth: int) -> Schema:
        if "multipleOf" in given:
            raise SchemaRefused(f"{at}/multipleOf", ENFORCED["multipleOf"])
        bounds = {key: _number(given, key, at) for key in given}
        for key, bound in bounds.items():
            if bound and not 1e-6 <= abs(bound) < 1e15:
                raise SchemaRefused(f"{at}/{key}", "bounds must be 0 or between 1e-6 and 1e15 in size")
        low, high = (
            max(bounds.get("minimum", -math.inf), bounds.get("exclusiveMinimum", -math.inf)),
            min(bounds.get("maximum", math.inf), bounds.get("exclusiveMaximum", math.inf)),
        )
        if low > high or (low == high and any(key.startswith("exclusive") for key in bounds)):
            raise SchemaRefused(at, "no number lies between these bounds")
        return dict(bounds)

    def _array(self, given: Schema, at: str, depth: int) -> Schema:
        least, most = _count(given, "minItems", at), _count(given, "maxItems", at)
        if least is not None and most is not None and most < least:
            raise SchemaRefused(f"{at}/maxItems", f"is less than minItems {least}")
        made: Schema = {}
        prefix = given.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise SchemaRefused(f"{at}/prefixItems", "must be a list of schemas")
        prefix = prefix[: len(prefix) if most is None else most]
        if prefix:
            made["prefixItems"] = [
                self._schema(item, f"{at}/prefixItems/{index}", depth + 1) for index, item in enumerate(prefix)
            ]
        items = given.get("items", True)
        if isinstance(items, list):
            raise SchemaRefused(f"{at}/items", "a list is the old form of prefixItems: use that")
        if items is False:
            if (least or 0) > len(prefix):
                raise SchemaRefused(f"{at}/minItems", f"no more than {len(prefix)} items are allowed here")
            made |= {"items": False} if prefix else {"maxItems": 0}
        else:
            made["items"] = self._schema(items, f"{at}/items", depth + 1)
        bounds = {"minItems": least, "maxItems": made.pop("maxItems", most)}
        return made | {key: value for key, value in bounds.items() if value is not None}

    def _object(self, given: Schema, at: str, depth: int) -> Schema:
        properties = _mapping(given, "properties", at)
        required = given.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaRefused(f"{at}/required", "must be a list of names")
        if properties or required:
            return self._named(given, properties, list(dict.fromkeys(required)), at, depth)
        bounds = self._property_counts(given, at)
        if bounds.get("minProperties", 0) > 1:
            raise SchemaRefused(f"{at}/minProperties", ENFORCED["minProperties"])
        patterns = _mapping(given, "patternProperties", at)
        if patterns:
            return self._by_pattern(given, patterns, at, depth) | bounds
        other = given.get("additionalProperties", True)
        if other is False:
            if bounds.get("minProperties"):
                raise SchemaRefused(f"{at}/minProperties", "no properties are allowed here")
            return {"properties": {}, "additionalProperties": False}
        made: Schema = {"additionalProperties": self._schema(other, f"{at}/additionalProperties", depth + 1)}
        if "propertyNames" in given:
            made |= self._names_of(given["propertyNames"], f"{at}/propertyNames", depth)
        return made | bounds

    def _named(self, given: Schema, properties: Schema, required: list[str], at: str, depth: int) -> Schema:
        """An object whose properties are known: only those are written."""
        for key in ("patternProperties", "propertyNames"):
            if given.get(key):
                raise SchemaRefused(f"{at}/{key}", "not supported together with properties or required")
        other = given.get("additionalProperties", True)
        if other not in (True, False) and other != {}:
            raise SchemaRefused(f"{at}/additionalProperties", "a schema is not supported together with properties")
        made: Schema = {}
        for name, schema in properties.items():
            if schema is False and name not in required:
                continue
            made[name] = self._schema(schema, f"{at}/properties/{_escape(name)}", depth + 1)
        for name in required:
            if name not in made:
                if other is False:
                    raise SchemaRefused(f"{at}/required", f"{name!r} is required and not allowed")
                made[name] = {}
        bounds = self._property_counts(given, at)
        if bounds.get("minProperties", 0) > len(made) or bounds.get("maxProperties", len(made)) < len(required):
            raise SchemaRefused(at, "minProperties and maxProperties do not fit properties and required")
        return {"properties": made, "required": required, "additionalProperties": False} | bounds

    def _by_pattern(self, given: Schema, patterns: Schema, at: str, depth: int) -> Schema:
        here = f"{at}/patternProperties"
        if len(patterns) > 1 or "propertyNames" in given:
            raise SchemaRefused(here, "more than one pattern for names is not supported")
        ((pattern, schema),) = patterns.items()
        try:
            mark = self._mark(searchable(pattern))
        except PatternRefused as error:
            raise SchemaRefused(f"{here}/{_escape(pattern)}", str(error)) from error
        value = self._schema(schema, f"{here}/{_escape(pattern)}", depth + 1)
        return {"patternProperties": {mark: value}, "additionalProperties": False}

    def _names_of(self, schema: Any, at: str, depth: int) -> Schema:
        if schema is True or schema == {}:
            return {}
        made = self._schema(schema | {"type": "string"} if isinstance(schema, dict) else schema, at, depth + 1)
        kept = {key: made[key] for key in ("pattern", "enum") if key in made}
        if not kept:
            raise SchemaRefused(at, "only pattern, enum, const, format and lengths are supported for names")
        return {"propertyNames": kept}

    def _property_counts(self, given: Schema, at: str) -> Schema:
        counts = {key: _count(given, key, at) for key in ("minProperties", "maxProperties")}
        if counts["minProperties"] and (most := counts["maxProperties"]) is not None and most < counts["minProperties"]:
            raise SchemaRefused(f"{at}/maxProperties", f"is less than minProperties {counts['minProperties']}")
        return {key: value for key, value in counts.items() if value is not None}


def _matters(name: str, value: Any, at: str) -> bool:
    """Whether a keyword restricts what is valid. Raises SchemaRefused for one that is not enforced."""
    if name in ANNOTATIONS or name in ("$defs", "definitions"):
        return False
    if name in ENFORCED:
        return True
    if name == "uniqueItems" and value is False:
        return False
    hint = f": {REFUSED[name]}" if name in REFUSED else ""
    raise SchemaRefused(f"{at}/{_escape(name)}", f"keyword {name!r} is not supported{hint}")


def _types(given: Schema, at: str) -> list[str]:
    """Type names; none where nothing restricts the type."""
    wanted = given.get("type")
    if wanted is None:
        return [name for name, keywords in _KEYWORDS.items() if keywords & given.keys()]
    names: list[Any] = cast("list[Any]", wanted) if isinstance(wanted, list) else [wanted]
    wrong = next((name for name in names if name not in _TYPES), None)
    if wrong is not None or not names:
        raise SchemaRefused(f"{at}/type", f"must be one of {', '.join(_TYPES)}, or a list of them")
    stray = next((key for key in given if not _fits(key, names)), None)
    if stray is not None and not {"enum", "const"} & given.keys():
        raise SchemaRefused(f"{at}/{_escape(stray)}", f"has no effect on type {wanted!r}: leave it out")
    return list(dict.fromkeys(name for name in names if not (name == "integer" and "number" in names)))


def _fits(key: str, names: list[str]) -> bool:
    kinds = {"number" if name == "integer" else name for name in names}
    return key in ("type", "enum", "const") or any(key in _KEYWORDS.get(kind, ()) for kind in kinds)


def _values(given: Schema, types: list[str], at: str) -> Schema:
    """enum or const, as an enum of the values that fit `type`."""
    key = "const" if "const" in given else "enum"
    stray = next((name for name in given if name not in (key, "type")), None)
    if stray is not None:
        raise SchemaRefused(f"{at}/{_escape(stray)}", f"not supported beside {key}")
    values: Any = [given["const"]] if key == "const" else given["enum"]
    if not isinstance(values, list) or not 0 < len(values) <= MAX_ENUM_VALUES:
        raise SchemaRefused(f"{at}/{key}", f"must be a list of 1 to {MAX_ENUM_VALUES} values")
    kept = [value for value in values if "type" not in given or any(_is_of(value, name) for name in types)]
    if not kept:
        raise SchemaRefused(f"{at}/{key}", f"no value is of type {given['type']!r}")
    return {"enum": kept}


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and value == int(value))
    kinds: dict[str, type | None] = {"string": str, "array": list, "object": dict, "null": type(None)}
    kind = kinds.get(name)
    return kind is not None and isinstance(value, kind)


def _format(name: str, at: str) -> str:
    if name not in PATTERNS:
        raise SchemaRefused(f"{at}/format", f"format {name!r} is not supported: use one of {', '.join(PATTERNS)}")
    return PATTERNS[name]


def _number(given: Schema, key: str, at: str) -> float:
    value = given[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SchemaRefused(f"{at}/{key}", "must be a number")
    return value


def _count(given: Schema, key: str, at: str) -> int | None:
    if key not in given:
        return None
    value = _number(given, key, at)
    if value < 0 or value != int(value) or value > 2**31:
        raise SchemaRefused(f"{at}/{key}", "must be a whole number, not negative")
    return int(value)


def _mapping(given: Schema, key: str, at: str) -> Schema:
    value = given.get(key, {})
    if not isinstance(value, dict):
        raise SchemaRefused(f"{at}/{key}", "must be an object")
    return cast("Schema", value)


def _resolve(root: Any, target: str, at: str) -> Any:
    place = root
    for part in target.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and part in place:
            place = cast("Schema", place)[part]
        elif isinstance(place, list) and part.isdecimal() and int(part) < len(place):
            place = cast("list[Any]", place)[int(part)]
        else:
            raise SchemaRefused(at, f"{target!r} is not in the schema")
    return place


def _escape(name: str) -> str:
    """A name as part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def canonical(value: Any) -> str:
    """One text for equal JSON values; the order of an object's members counts, for it is the order of the output."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
