"""What is claimed of JSON Schema is enforced, and what is not claimed is refused with a JSON pointer."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from paceline_engine.structured.claims import ANNOTATIONS, ENFORCED, MAX_DEPTH, MAX_NODES, REFUSED
from paceline_engine.structured.formats import PATTERNS
from paceline_engine.structured.json_schema import SchemaRefused, normalise
from paceline_engine.structured.source import GrammarSource, json_schema

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
NODE = {
    "type": "object",
    "properties": {"v": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
}
ENDLESS = {"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}
# Of each file of the suite at least so many schemas are accepted; fewer means that a claim was lost.
ACCEPTED = {
    "additionalProperties": 5, "anyOf": 6, "const": 15, "enum": 14, "items": 9, "maxItems": 2, "maxLength": 2,
    "minimum": 2, "pattern": 2, "patternProperties": 2, "prefixItems": 3, "properties": 5, "propertyNames": 5,
    "ref": 15, "required": 5, "type": 11, "oneOf": 2,
}  # fmt: skip


def source_or_none(schema: Any) -> GrammarSource | None:
    try:
        return json_schema(schema)
    except SchemaRefused:
        return None


def test_nothing_invalid_is_accepted_over_the_public_suite(grammars: Any, suite: dict[str, Any]) -> None:
    accepted: dict[str, int] = {}
    wrong: list[tuple[str, Any, Any]] = []
    for name, groups in suite.items():
        for schema, cases in groups:
            source = source_or_none(schema)
            if source is None:
                continue
            accepted[name] = accepted.get(name, 0) + 1
            matcher = grammars.matcher(source)
            wrong += [
                (name, schema, value)
                for value, valid in cases
                if not valid and grammars.accepts(matcher, json.dumps(value, ensure_ascii=False))
            ]
    assert wrong == []
    assert sum(accepted.values()) >= 149
    assert {name: accepted.get(name, 0) for name in ACCEPTED if accepted.get(name, 0) < ACCEPTED[name]} == {}


def test_every_keyword_of_the_suite_that_is_not_claimed_is_refused(suite: dict[str, Any]) -> None:
    for groups in suite.values():
        for schema, _ in groups:
            if isinstance(schema, dict) and schema.keys() & REFUSED.keys() - {"uniqueItems"}:
                with pytest.raises(SchemaRefused):
                    normalise(schema, [])


DRAWN: list[Any] = [
    True,
    STRING | {"minLength": 2, "maxLength": 4},
    STRING | {"pattern": "^[^\\s@]{1,4}@[^\\s@]{1,4}\\.[a-z]{2,3}$"},
    STRING | {"pattern": "^(a(1{1,2})?b|[ab]b{0,2}|[ab])$"},
    STRING | {"pattern": "^\\W\\D\\S\\s.$|^x"},
    INTEGER | {"minimum": -12, "exclusiveMaximum": 345},
    INTEGER | {"minimum": 3.5},
    INTEGER | {"multipleOf": 7},
    NUMBER | {"minimum": 0.1, "maximum": 0.3},
    NUMBER | {"exclusiveMinimum": -1.5, "maximum": 20.25},
    {"type": ["string", "null"], "maxLength": 2},
    {"enum": ["a", 1, None, {"x": [1]}, '"\\\u0001\u2028', 1.5]},
    {"type": "string", "enum": ["a", 1]},
    {"type": "array", "prefixItems": [INTEGER, STRING], "items": {"type": "null"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [INTEGER, STRING], "maxItems": 1},
    {"type": "array", "items": {"type": "array", "items": INTEGER, "maxItems": 2}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"a": INTEGER, 'b"\\é\n': STRING}, "required": ["a", "z"]},
    {"properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}, "minProperties": 2, "required": ["c"]},
    {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x": INTEGER}, "maxProperties": 2},
    {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "boolean"}},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "b"}, "v": INTEGER}, "required": ["k", "v"]},
        ]
    },
    {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/x~1y"}}, "required": ["a"], "$defs": {"x/y": INTEGER}},
    # jsonschema judges `time` by another standard; it is judged as part of date-time.
    *(STRING | {"format": name} for name in PATTERNS if name != "time"),
]


@pytest.mark.parametrize("schema", DRAWN, ids=lambda schema: json.dumps(schema)[:60])
def test_whatever_is_generated_parses_and_is_valid(grammars: Any, schema: Any) -> None:
    matcher, dice = grammars.matcher(json_schema(schema)), random.Random(7)
    validator = Draft202012Validator(schema, format_checker=FormatChecker())
    ended = 0
    for _ in range(25):
        drawn = grammars.draw(matcher, dice)
        if drawn is None:
            continue
        ended += 1
        value = json.loads(drawn.decode(errors="replace"))
        assert validator.is_valid(value), drawn
    assert ended >= 5


_leaves = st.sampled_from(
    [
        *(True, STRING, INTEGER, {"type": "boolean"}, {"const": "k"}, {"enum": [1, "é"]}),
        *(STRING | {"maxLength": 3}, STRING | {"pattern": "^[a-c]+"}, STRING | {"format": "date"}),
        NUMBER | {"minimum": 1, "maximum": 2.5},
    ]
)
_names = st.sampled_from(["a", "b", "c d", "é"])


def _array(items: Any, least: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": 3}


def _object(some: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": some, "required": sorted(some)[:2]}


def _map(other: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": other, "maxProperties": 2}


_schemas = st.recursive(
    _leaves,
    lambda inner: (
        st.builds(_array, inner, st.integers(0, 2))
        | st.builds(_object, st.dictionaries(_names, inner, min_size=1, max_size=3))
        | st.builds(_map, inner)
        | st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)
@given(schema=_schemas, seed=st.integers(0, 100))
def test_any_combination_generates_only_what_is_valid(grammars: Any, schema: Any, seed: int) -> None:
    matcher, dice = grammars.matcher(json_schema(schema)), random.Random(seed)
    for _ in range(3):
        drawn = grammars.draw(matcher, dice)
        if drawn is not None:
            assert Draft202012Validator(schema).is_valid(json.loads(drawn.decode(errors="replace"))), drawn


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        *(({name: 1}, f"/{name}") for name in REFUSED),
        ({"properties": {"a/b": {"~not": {}}}}, "/properties/a~1b/~0not"),
        ({"items": {"format": "iri"}}, "/items/format"),
        ({"type": "text"}, "/type"),
        ({"type": []}, "/type"),
        ({"type": "string", "minimum": 1}, "/minimum"),
        ({"type": "string", "pattern": "a", "maxLength": 2}, "/maxLength"),
        ({"pattern": "(?=a)"}, "/pattern"),
        ({"pattern": "["}, "/pattern"),
        ({"minLength": 3, "maxLength": 2}, "/maxLength"),
        ({"minLength": -1}, "/minLength"),
        ({"maxLength": 1.5}, "/maxLength"),
        ({"type": "number", "multipleOf": 0.5}, "/multipleOf"),
        ({"minimum": "1"}, "/minimum"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, ""),
        ({"properties": {"a": INTEGER}, "additionalProperties": STRING}, "/additionalProperties"),
        ({"properties": {"a": INTEGER}, "required": ["b"], "additionalProperties": False}, "/required"),
        ({"patternProperties": {"a": True, "b": True}}, "/patternProperties"),
        ({"minProperties": 2}, "/minProperties"),
        ({"allOf": [INTEGER, NUMBER]}, "/allOf"),
        ({"anyOf": [INTEGER], "type": "integer"}, "/type"),
        ({"oneOf": [INTEGER, NUMBER]}, "/oneOf"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "/oneOf"),
        ({"$ref": "other.json"}, "/$ref"),
        ({"$ref": "#/$defs/no"}, "/$ref"),
        ({"$ref": "#"}, "/$ref"),
        ({"enum": []}, "/enum"),
        ({"type": "string", "enum": [1]}, "/enum"),
        ({"items": [INTEGER]}, "/items"),
        (False, ""),
        (5, ""),
        ({"$ref": "#/$defs/a", "$defs": {"a": ENDLESS}}, "/$defs/a"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_enforced_is_refused_where_it_stands(schema: Any, pointer: str) -> None:
    with pytest.raises(SchemaRefused) as refused:
        normalise(schema, [])
    assert refused.value.pointer == pointer


def test_size_and_depth_are_bounded() -> None:
    deep: Any = True
    for _ in range(MAX_DEPTH + 2):
        deep = {"items": deep}
    for schema in (deep, {"prefixItems": [True] * (MAX_NODES + 1)}):
        with pytest.raises(SchemaRefused, match=r"deeper than|more than"):
            normalise(schema, [])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*ENFORCED, *sorted(ANNOTATIONS), "not"]), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_any_value_is_a_schema_or_refused(schema: Any) -> None:
    source_or_none(schema)


def test_integers_end(grammars: Any) -> None:
    matcher = grammars.matcher(json_schema(INTEGER))
    for text, fits in [("-9007199254740991", True), ("9007199254740992", False), ("1" * 17, False), ("0", True)]:
        assert grammars.accepts(matcher, text) is fits


def test_white_space_is_bounded_and_eos_comes_only_at_the_end(grammars: Any) -> None:
    matcher = grammars.matcher(json_schema({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}))
    assert grammars.accepts(matcher, '{\n    "a": 1\n}')
    assert not grammars.accepts(matcher, "{" + " " * 17 + '"a":1}')
    assert not grammars.accepts(matcher, '{"a":1')
