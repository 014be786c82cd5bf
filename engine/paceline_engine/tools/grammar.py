"""The structural tag that makes a model call tools, in the format that its parser reads. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline_engine.structured.json_schema import SchemaRefused, normalise

_FORMATS: dict[str, tuple[str, str, str, str]] = {
    # Beginning up to the name, from the name to the arguments, end, divider of calls.
    "hermes": ('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n"),
    "llama3_json": ('{"name": ', ', "parameters": ', "}", "; "),
}
_TRIGGERS = {"hermes": "<tool_call>", "llama3_json": '{"name": '}


def forced_calls(form: str, tools: Sequence[tuple[str, Any]], *, several: bool) -> dict[str, Any]:
    """At least one call; tools are (name, schema of the arguments)."""
    return {
        "type": "structural_tag",
        "format": {
            "type": "tags_with_separator",
            "tags": [_tag(form, name, schema) for name, schema in tools],
            "separator": _FORMATS[form][3],
            "at_least_one": True,
            "stop_after_first": not several,
        },
    }


def free_calls(form: str, tools: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Any text, in which what begins like a call is one."""
    tags = [_tag(form, name, schema) for name, schema in tools]
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": [_TRIGGERS[form]], "tags": tags},
    }


def arguments_schema(parameters: dict[str, Any] | None, *, strict: bool) -> Any:
    """The schema to enforce. Without `strict`, one that can't be enforced becomes any object. Raises SchemaRefused."""
    schema: dict[str, Any] = parameters if parameters else {"type": "object"}
    if "type" not in schema and "properties" in schema:
        schema = schema | {"type": "object"}
    if strict:
        return schema
    try:
        normalise(schema, [])
    except SchemaRefused:
        return {"type": "object"}
    return schema


def _tag(form: str, name: str, schema: Any) -> dict[str, Any]:
    begin, middle, end, _ = _FORMATS[form]
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": f"{begin}{json.dumps(name)}{middle}", "content": content, "end": end}
