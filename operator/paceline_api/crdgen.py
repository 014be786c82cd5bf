"""CustomResourceDefinitions from the API models: pydantic's JSON Schema made structural, plus CEL.

Structural means: every node has a type, no $ref, no null, no additionalProperties beside properties. Rules that JSON
Schema cannot say (unbuilt features, cross-field rules) become x-kubernetes-validations. Defaults are stated in the
descriptions and not in the schema: the API server would write them into users' objects, and a default that changes
with a version would then never reach them. Pure: returns documents, writes nothing.
"""

from __future__ import annotations

import re
from typing import Any, cast

from pydantic import BaseModel

from paceline_api import GROUP, VERSION
from paceline_api.v1alpha1 import RESOURCES, Resource
from paceline_api.v1alpha1.base import BUILT_KEY, INT_OR_STRING_KEY, RULES_KEY, UNBUILT_KEY, Cel, Column

Schema = dict[str, Any]

_KEPT = frozenset(
    {
        "type", "description", "format", "pattern", "enum", "items", "properties", "required", "minimum", "maximum",
        "minLength", "maxLength", "minItems", "maxItems", "maxProperties", "x-kubernetes-list-type",
        "x-kubernetes-list-map-keys", "x-kubernetes-preserve-unknown-fields", INT_OR_STRING_KEY,
    }
)  # fmt: skip
_PRESERVE = "x-kubernetes-preserve-unknown-fields"


def crd_documents() -> dict[str, Schema]:
    """File name to CRD document, for every kind."""
    return {f"{GROUP}_{resource.naming.plural}.yaml": crd(resource) for resource in RESOURCES}


def crd(resource: type[Resource]) -> Schema:
    """The CustomResourceDefinition of one kind."""
    naming = resource.naming
    subresources: Schema = {"status": {}}
    if resource.scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{naming.plural}.{GROUP}", "labels": {"app.kubernetes.io/part-of": "paceline"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": naming.kind,
                "listKind": f"{naming.kind}List",
                "plural": naming.plural,
                "singular": naming.singular,
                "shortNames": [naming.short],
                "categories": ["paceline"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root(resource)},
                    "subresources": subresources,
                    "additionalPrinterColumns": [_column(column) for column in resource.columns],
                }
            ],
        },
    }


def _column(column: Column) -> Schema:
    document: Schema = {
        "name": column.name,
        "type": column.type,
        "jsonPath": column.path,
        "description": column.description,
    }
    if column.priority:
        document["priority"] = column.priority
    return document


def _root(resource: type[Resource]) -> Schema:
    raw = resource.model_json_schema(by_alias=True, mode="validation")
    definitions: dict[str, Schema] = raw.get("$defs", {})
    models = _models_by_name(resource)
    properties = {name: _structural(raw["properties"][name], definitions, models) for name in ("spec", "status")}
    properties["spec"].pop("default", None)
    root: Schema = {
        "type": "object",
        "description": _sentence(resource.__doc__ or ""),
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            **properties,
        },
    }
    if "spec" in raw.get("required", []):
        root["required"] = ["spec"]
    return root


def _models_by_name(resource: type[Resource]) -> dict[str, type[BaseModel]]:
    """Every model class that the schema may refer to, by the name pydantic gives it in $defs."""
    found: dict[str, type[BaseModel]] = {}
    stack: list[type[BaseModel]] = [BaseModel]
    while stack:
        parent = stack.pop()
        for child in parent.__subclasses__():
            if child.__module__.startswith("paceline_api"):
                found[child.__name__] = child
            stack.append(child)
    return found


def _structural(node: Schema, definitions: dict[str, Schema], models: dict[str, type[BaseModel]]) -> Schema:
    merged = _inlined(node, definitions)
    rules: list[Schema] = list(merged.get(RULES_KEY, []))
    name = merged.pop("x-model", None)
    result: Schema = {key: value for key, value in merged.items() if key in _KEPT}
    if "description" in result:
        result["description"] = _sentence(result["description"])
    if "properties" in merged:
        children: dict[str, Schema] = merged["properties"]
        result["properties"] = {key: _structural(child, definitions, models) for key, child in children.items()}
        rules += _unbuilt_rules(children, definitions)
    if "items" in merged:
        result["items"] = _structural(merged["items"], definitions, models)
    extra = merged.get("additionalProperties")
    if isinstance(extra, dict):
        result["additionalProperties"] = _structural(cast(Schema, extra), definitions, models)
    if BUILT_KEY in merged:
        built = merged[BUILT_KEY]
        rules.append({"rule": f"self in {built['values']!r}", "message": built["message"]})
    if isinstance(name, str) and name in models:
        rules += [_rule(cel) for cel in getattr(models[name], "cel", ())]
    if rules:
        result[RULES_KEY] = rules
    if INT_OR_STRING_KEY in result:
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
        result.pop("type", None)
    elif "type" not in result and _PRESERVE not in result:
        raise ValueError(f"not structural, a node without a type: {node}")
    return result


def _rule(cel: Cel) -> Schema:
    document: Schema = {"rule": cel.rule, "message": cel.message}
    if cel.field:
        document["fieldPath"] = f".{cel.field}"
    return document


def _unbuilt_rules(children: dict[str, Schema], definitions: dict[str, Schema]) -> list[Schema]:
    rules: list[Schema] = []
    for key, child in children.items():
        message = _inlined(child, definitions).get(UNBUILT_KEY)
        if message:
            rules.append(
                {
                    "rule": f"!has(self.{key})",
                    "message": message,
                    "fieldPath": f".{key}",
                    "reason": "FieldValueForbidden",
                }
            )
    return rules


def _inlined(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """`node` with its $ref and its `X or null` resolved; keywords beside them win over the definition's."""
    merged: Schema = dict(node)
    while True:
        if "$ref" in merged:
            name = str(merged.pop("$ref")).rsplit("/", 1)[-1]
            merged = {"x-model": name, **definitions[name], **merged}
        elif "anyOf" in merged:
            merged = {**_only_option(cast(list[Schema], merged.pop("anyOf")), node), **merged}
        else:
            return merged


def _only_option(options: list[Schema], node: Schema) -> Schema:
    """The one option that is not null."""
    real = [option for option in options if option.get("type") != "null"]
    if len(real) != 1:
        raise ValueError(f"not structural, more than one non-null option: {node}")
    return real[0]


def _sentence(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
