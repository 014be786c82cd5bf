"""Turns a model source into a folder the core process can map, once, and says what is in it.

A GGUF file is converted into the cache; a Hugging Face folder is only described there, its weights stay where they are.
A cache entry appears by rename, complete or not at all, under a file lock: processes that race convert once. Its
key covers the source's identity, size and modification time and this converter's version. No torch here.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, cast

from paceline_engine.models import cache, fetching, hf_folder, remote
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.errors import ModelError
from paceline_engine.models.source import ModelSource, classify

CONVERTER_VERSION = 2
DESCRIPTION = "paceline.json"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
WEIGHTS = "model.safetensors"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to be mapped. Digests are hex BLAKE2b-256 over content."""

    directory: Path
    config: ModelConfig
    files: list[Path]
    weights_digest: str
    tokenizer_digest: str
    tokenizer_file: Path
    chat_template: str | None
    special_tokens: dict[str, str]


def default_cache_dir() -> Path:
    """$PACELINE_CACHE_DIR, or paceline in $XDG_CACHE_HOME, or ~/.cache/paceline."""
    if os.environ.get("PACELINE_CACHE_DIR"):
        return Path(os.environ["PACELINE_CACHE_DIR"])
    # A relative path there is to be ignored (XDG Base Directory Specification).
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "paceline"


def cached_model_dir(source: ModelSource, cache_dir: Path) -> Path | None:
    """The source's cache entry if it is there and whole, without fetching or converting anything."""
    found = _found(source, cache_dir)
    if found is None:
        return None
    directory = _entry(found, cache_dir)
    try:
        load_model_dir(directory)
    except ModelError:
        return None
    return directory


def check_model(source: ModelSource, cache_dir: Path) -> None:
    """Raises ModelError where the source's headers show that it can't be prepared; its weights are not read.

    One that would have to be fetched first is not checked.
    """
    found = _found(source, cache_dir)
    if found is None or cached_model_dir(found, cache_dir) is not None:
        return
    if found.kind == "hf":
        hf_folder.read_config(found.path)
        hf_folder.weight_files(found.path)
        _tokenizer_of(found.path)
        return
    from paceline_engine.models.gguf_reader import GGUFModel

    GGUFModel(found.path)


def prepare_model(source: ModelSource, cache_dir: Path, cache_limit: int = cache.DEFAULT_LIMIT) -> Path:
    """The source's cache entry, fetched and made if need be. Raises ModelError.

    Entries that nobody uses then make room, so that the cache has at most `cache_limit` bytes.
    """
    directory = cache_dir
    try:
        cache.mark(cache_dir)
        if source.kind == "remote":
            source = classify(fetching.fetch(remote.parse(source.text), cache_dir), source.text)
        directory = _entry(source, cache_dir)
        with cache.locked(directory.with_suffix(".lock")):
            found = cached_model_dir(source, cache_dir)
            if found is None:
                _make_entry(source, directory)
                load_model_dir(directory)  # Holds what was made before anything is trimmed.
        cache.trim(cache_dir, cache_limit)
    except OSError as error:
        raise ModelError(f"can't write the model to {directory}: {error}: check --cache-dir") from error
    return directory


def _found(source: ModelSource, cache_dir: Path) -> ModelSource | None:
    """The source as it lies on this machine, or None if it would have to be fetched."""
    if source.kind != "remote":
        return source
    path = fetching.find(remote.parse(source.text), cache_dir)
    return None if path is None else classify(path, source.text)


def load_model_dir(path: Path | str) -> LoadedModel:
    """What a converted folder, or a plain Hugging Face folder, holds. Raises ModelError.

    A plain folder's weights are hashed on each call; `prepare_model` remembers the digest.
    """
    directory = Path(path)
    cache.hold(directory)
    if not (directory / DESCRIPTION).is_file():
        if not (directory / "config.json").is_file():
            raise ModelError(f"{directory} is not a model folder: neither {DESCRIPTION} nor config.json is there")
        description = _describe_hf(directory, directory)
    else:
        description = hf_folder.read_json(directory / DESCRIPTION)
    if description.get("v") != CONVERTER_VERSION:
        raise ModelError(f"{directory} was converted by another version: remove it, it will be converted again")
    files = [_checked_file(directory, entry) for entry in description["files"]]
    template = directory / TEMPLATE
    # JSON has no tuples.
    raw: dict[str, Any] = {
        name: tuple(cast("list[Any]", value)) if isinstance(value, list) else value
        for name, value in description["model"].items()
        if name in _CONFIG_FIELDS
    }
    return LoadedModel(
        directory=directory,
        config=ModelConfig(**raw),
        files=files,
        weights_digest=description["weights_digest"],
        tokenizer_digest=description["tokenizer_digest"],
        tokenizer_file=directory / TOKENIZER,
        chat_template=template.read_text("utf-8") if template.is_file() else description.get("chat_template"),
        special_tokens=description["special_tokens"],
    )


_CONFIG_FIELDS = frozenset(field.name for field in fields(ModelConfig))


def _checked_file(directory: Path, entry: dict[str, Any]) -> Path:
    """A described weights file, which must still have the size that was described."""
    path = directory / entry["path"]
    cache.hold(path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelError(f"model file {path}: {error.strerror}: remove {directory} to convert again") from error
    if size != entry["size"]:
        raise ModelError(f"model file {path} has {size} bytes, not {entry['size']}: remove {directory}")
    return path


def _entry(source: ModelSource, cache_dir: Path) -> Path:
    """Folder of the source's cache entry: a digest over what tells one file from another."""
    if source.kind == "gguf":
        paths = [source.path]
    else:
        names = ("*.json", "*.safetensors", "*.jinja")
        paths = sorted(path for name in names for path in source.path.glob(name))
    digest = blake2b(digest_size=16, person=b"paceline-convert")
    digest.update(f"{CONVERTER_VERSION}\0{source.path.resolve()}\0".encode())
    for path in paths:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return cache_dir / "models" / digest.hexdigest()


def _make_entry(source: ModelSource, directory: Path) -> None:
    """Fill a temporary folder and rename it. Only the lock's holder is here, so leftovers are dead ones'."""
    temporary = directory.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.mkdir()
    try:
        convert = _convert_gguf if source.kind == "gguf" else _describe_hf
        description = convert(source.path, temporary) | {"source": source.text}
        (temporary / DESCRIPTION).write_text(json.dumps(description, indent=1))
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _describe_hf(folder: Path, target: Path) -> dict[str, Any]:
    """Describe a Hugging Face folder; into a `target` of its own go its tokenizer and chat template."""
    config, files = hf_folder.read_config(folder), hf_folder.weight_files(folder)
    tokenizer = _tokenizer_of(folder)
    template = hf_folder.chat_template(folder)
    if target != folder:
        shutil.copyfile(tokenizer, target / TOKENIZER)
        if template is not None:
            (target / TEMPLATE).write_text(template, "utf-8")
    digest = blake2b(digest_size=32, person=b"paceline-weights")
    for number, path in enumerate(files):
        logger.info("hashing weights of %s: %d %%", folder, 100 * number // len(files))
        with path.open("rb") as file:
            content = file_digest(file, lambda: blake2b(digest_size=32))
        digest.update(f"{path.name}\0".encode() + content.digest())
    return {
        "v": CONVERTER_VERSION,
        "model": asdict(config),
        "files": [{"path": str(path.resolve()), "size": path.stat().st_size} for path in files],
        "weights_digest": digest.hexdigest(),
        "tokenizer_digest": _file_digest(tokenizer),
        "special_tokens": hf_folder.special_tokens(folder),
        "chat_template": template,
    }


def _tokenizer_of(folder: Path) -> Path:
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        raise ModelError(f"model folder {folder} has no {TOKENIZER}: save the model with a fast tokenizer")
    return tokenizer


def _convert_gguf(path: Path, target: Path) -> dict[str, Any]:
    """Convert a GGUF file into `target`: tokenizer, chat template, dequantised weights."""
    from paceline_engine.models import gguf_tokenizer
    from paceline_engine.models.gguf_reader import GGUFModel
    from paceline_engine.models.safetensors_writer import write_safetensors

    logger.info("converting %s: reading metadata: 0 %%", path)
    model = GGUFModel(path)
    logger.info("converting %s: building the tokenizer: 5 %%", path)
    gguf_tokenizer.build_tokenizer(model).save(str(target / TOKENIZER), pretty=False)
    template = model.get("tokenizer.chat_template")
    if template:
        (target / TEMPLATE).write_text(template, "utf-8")
    weights = target / WEIGHTS
    try:
        digest = write_safetensors(weights, model.tensors, model.values, _progress(path))
    except (ValueError, IndexError) as error:
        raise ModelError(f"model file {path}: truncated or damaged ({error}): download it again") from error
    return {
        "v": CONVERTER_VERSION,
        "model": asdict(model.config),
        "files": [{"path": WEIGHTS, "size": weights.stat().st_size}],
        "weights_digest": digest,
        "tokenizer_digest": _file_digest(target / TOKENIZER),
        "special_tokens": gguf_tokenizer.special_tokens(model),
    }


def _progress(path: Path) -> Callable[[int, int], None]:
    """Logs each further fifth of the weights."""
    logged = 0

    def report(done: int, total: int) -> None:
        nonlocal logged
        percent = 10 + 90 * done // max(total, 1)
        if percent >= logged + 20 or done == total:
            logged = percent
            logger.info("converting %s: dequantising weights: %d %%", path, percent)

    return report


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=32)).hexdigest()
