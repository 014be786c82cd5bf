"""Reads a Hugging Face model folder: config.json, *.safetensors, tokenizer.json, chat template. Nothing is copied.

Weights are checked for completeness by their headers. No torch, no transformers, and no code from the folder is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline_engine.models.config import ModelConfig
from paceline_engine.models.errors import ModelError
from paceline_engine.models.hf_config import model_config, token_ids

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ModelError if it is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"model folder has no {path.name} ({path}): complete the download") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"model folder: can't read {path}: {error}: complete the download") from error
    if not isinstance(value, dict):
        raise ModelError(f"model folder: {path} is not a JSON object: complete the download")
    return value


def read_config(folder: Path) -> ModelConfig:
    """The architecture record of config.json (and generation_config.json for end-of-sequence ids)."""
    raw = read_json(folder / "config.json")
    generation = _optional_json(folder / "generation_config.json")
    stops = token_ids(generation.get("eos_token_id")) + token_ids(raw.get("eos_token_id"))
    return model_config(folder, raw, dict.fromkeys(stops))


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files: those the index names, or all there are. Checked for truncation."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ModelError(f"model folder {folder} has no *.safetensors file: other weight formats are not read")
    for name in names:
        if "/" in name or "\\" in name:
            raise ModelError(f"model folder {folder}: its index names {name!r}: files must lie in the folder itself")
        _check_complete(folder / name)
    return [folder / name for name in names]


def chat_template(folder: Path) -> str | None:
    """The folder's chat template: chat_template.jinja, or the field of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _optional_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named templates: the default one is for plain chat
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """Text of the tokens that chat templates may name."""
    raw = _optional_json(folder / "special_tokens_map.json") | _optional_json(folder / "tokenizer_config.json")
    texts = {name: raw.get(name) for name in _SPECIAL_NAMES}
    plain = {name: text.get("content") if isinstance(text, dict) else text for name, text in texts.items()}
    return {name: text for name, text in plain.items() if isinstance(text, str)}


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _check_complete(path: Path) -> None:
    """A safetensors file's header says how long it is: a cut download is found before anything is mapped."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size)) if 0 < header_size < size else None
    except (OSError, ValueError) as error:
        raise ModelError(f"model file {path}: can't read it: {error}: complete the download") from error
    if not isinstance(header, dict):
        raise ModelError(f"model file {path}: not a safetensors file: complete the download")
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if 8 + header_size + max(ends, default=0) != size:
        raise ModelError(f"model file {path}: truncated or damaged ({size} bytes): complete the download")
