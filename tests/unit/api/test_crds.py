"""The generated CRDs are structural, bounded, small, in step, and say the same as the models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline_api.crdgen import crd_documents
from paceline_api.v1alpha1 import RESOURCES

ROOT = Path(__file__).parents[3]
DOCUMENTS = crd_documents()
SIZE_MAX = 256 * 1024


def schema(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for part in ("items", "additionalProperties"):
        if isinstance(node.get(part), dict):
            yield from nodes(node[part], f"{path}[]")


def test_generated_files_are_in_step() -> None:
    done = subprocess.run([sys.executable, "hack/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DOCUMENTS)
def test_crd_is_structural_and_small(name: str) -> None:
    document = DOCUMENTS[name]
    assert len(yaml.safe_dump(document)) < SIZE_MAX
    for path, node in nodes(schema(document)):
        assert ("$ref" not in node and "anyOf" not in node) or "x-kubernetes-int-or-string" in node, path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert "default" not in node, f"{path}: a default in the schema is written into users' objects"
        typed = "type" in node or "x-kubernetes-int-or-string" in node
        assert typed or node.get("x-kubernetes-preserve-unknown-fields"), path


@pytest.mark.parametrize("name", DOCUMENTS)
def test_everything_in_a_spec_is_bounded(name: str) -> None:
    for path, node in nodes(schema(DOCUMENTS[name])["properties"]["spec"], "spec"):
        if node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node, f"{path}: unbounded strings make CEL rules too costly"
        if node.get("type") == "array":
            assert "maxItems" in node and "x-kubernetes-list-type" in node, path
        if node.get("type") == "object" and "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node.get("type") == "integer":
            assert "minimum" in node, path


def test_fields_are_described() -> None:
    for document in DOCUMENTS.values():
        for path, node in nodes(schema(document)["properties"]["spec"], "spec"):
            if not path.endswith("[]"):
                assert node.get("description"), path


def test_kinds_have_status_columns_category_and_short_name() -> None:
    shorts = {document["spec"]["names"]["shortNames"][0] for document in DOCUMENTS.values()}
    assert shorts == {"pisvc", "prouter", "ptenant", "pkv"}
    for document in DOCUMENTS.values():
        version = document["spec"]["versions"][0]
        assert document["spec"]["names"]["categories"] == ["paceline"]
        assert version["subresources"]["status"] == {}
        assert {"Ready", "Age"} <= {column["name"] for column in version["additionalPrinterColumns"]}


def test_scale_counts_pods_by_selector() -> None:
    version = DOCUMENTS["paceline.dev_inferenceservices.yaml"]["spec"]["versions"][0]
    assert version["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"


def test_conditions_merge_by_type() -> None:
    for document in DOCUMENTS.values():
        conditions = schema(document)["properties"]["status"]["properties"]["conditions"]
        assert conditions["x-kubernetes-list-type"] == "map"
        assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_every_cross_field_rule_of_a_model_is_in_its_crd() -> None:
    rules = {
        rule["rule"]
        for document in DOCUMENTS.values()
        for _, node in nodes(schema(document))
        for rule in node.get("x-kubernetes-validations", [])
    }
    assert "!has(self.roles)" in rules
    assert "self in ['surge', 'inPlace']" in rules
    for resource in RESOURCES:
        for cel in resource.model_fields["spec"].annotation.cel:  # pyright: ignore[reportOptionalMemberAccess]
            assert cel.rule in rules
