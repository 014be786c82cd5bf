"""Where a model comes from: `package://`, `file://`, or from elsewhere by `hf://` and `s3://` (see `remote`).

A package is located, never imported: its code is not ours to run, and its import may be slow. No torch here.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from paceline_engine.models import remote
from paceline_engine.models.errors import ModelError

REMOTE_SCHEMES = ("hf", "s3")
SUPPORTED = (
    "package://NAME/FILE.gguf, file:///PATH.gguf, file:///FOLDER (config.json, *.safetensors, tokenizer.json), "
    "hf://ORG/NAME or s3://BUCKET/PREFIX"
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model. `kind` says how it is read; `text` is what the user wrote.

    A "remote" one is not on this machine yet as far as anyone looked; its path is empty.
    """

    kind: Literal["gguf", "hf", "remote"]
    path: Path
    text: str


def resolve(text: str) -> ModelSource:
    """Find the file or folder a source names. Raises ModelError; opens nothing but the directory entry.

    A source from elsewhere is only checked for its form: `loader` finds or fetches it.
    """
    parts = urlsplit(text)
    if parts.scheme == "package":
        path = _package_path(parts.netloc, unquote(parts.path).lstrip("/"), text)
    elif parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ModelError(f"model {text!r} names the host {parts.netloc!r}: write file:///PATH with three slashes")
        path = Path(unquote(parts.path))
    elif parts.scheme in REMOTE_SCHEMES:
        remote.parse(text)
        return ModelSource("remote", Path(), text)
    elif parts.scheme == "pvc":
        raise ModelError(f"model {text!r}: a cluster's nodes mount claims, this process can't: use file:///PATH")
    elif parts.scheme:
        raise ModelError(f"model source {parts.scheme}:// is not built yet ({text!r}): use {SUPPORTED}")
    else:
        raise ModelError(f"model {text!r} is not a source: use {SUPPORTED}")
    return classify(path, text)


def default_name(text: str) -> str:
    """What a model is called where nobody named it: the last part of its source, without .gguf and revision."""
    path = text.partition("@")[0] if text.startswith("hf://") else text
    return path.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


def _package_path(package: str, inner: str, text: str) -> Path:
    """Path of a file inside an installed package; `inner` may not climb out of it."""
    if not package.isidentifier() or not inner:
        raise ModelError(f"model {text!r} must be written package://NAME/FILE.gguf with an importable NAME")
    spec = importlib.util.find_spec(package)
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    if not roots:
        dist = package.replace("_", "-")
        raise ModelError(f"model {text!r}: Python package {package!r} is not installed: try `pip install {dist}`")
    for root in roots:
        base = Path(root).resolve()
        path = (base / inner).resolve()
        if not path.is_relative_to(base):
            raise ModelError(f"model {text!r} points outside the package {package!r}: name a file inside it")
        if path.exists():
            return path
    have = sorted(entry.name for root in roots for entry in Path(root).glob("*.gguf"))
    hint = f"it has {', '.join(have)}" if have else "it has no .gguf file"
    raise ModelError(f"model {text!r}: package {package!r} has no file {inner!r}: {hint}")


def classify(path: Path, text: str) -> ModelSource:
    """Tell a GGUF file from a Hugging Face folder by what is there."""
    try:
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ModelError(f"model {text!r}: folder {path} has no config.json: name a Hugging Face model folder")
            return ModelSource("hf", path, text)
        if not path.exists():
            raise ModelError(f"model {text!r}: {path} does not exist: check the path")
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"model {text!r}: can't read {path}: {error.strerror}: check its permissions") from error
    if magic != b"GGUF":
        raise ModelError(f"model {text!r}: {path} is not a GGUF file (no GGUF header): use {SUPPORTED}")
    return ModelSource("gguf", path, text)
