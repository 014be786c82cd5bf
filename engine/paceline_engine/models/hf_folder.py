"""Reads a Hugging Face model folder: config.json, *.safetensors, tokenizer.json, chat template. Nothing is copied.

Only what the decoder computes exactly is accepted: a setting it would ignore is refused by name. No torch, no
transformers, and no code from the folder is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline_engine.models.config import ModelConfig
from paceline_engine.models.source import ModelError

# Attention biases on query, key and value: always, by config field, never.
ARCHITECTURES = {
    "LlamaForCausalLM": None,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": True,
    "Qwen3ForCausalLM": None,
}
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
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"model folder {folder}: architecture {architecture!r} is not supported: use one of {known}")
    _refuse_unbuilt(folder, raw)
    bias = ARCHITECTURES[architecture]
    heads = _size(folder, raw, "num_attention_heads")
    hidden = _size(folder, raw, "hidden_size")
    theta, scaling = _rope(raw)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_size(folder, raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(folder, raw, "intermediate_size"),
        num_layers=_size(folder, raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_size(folder, raw, "num_key_value_heads", heads),
        head_dim=_size(folder, raw, "head_dim", hidden // heads),
        max_position_embeddings=_size(folder, raw, "max_position_embeddings"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)) if bias is None else bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        bos_token_id=_ids(raw.get("bos_token_id"))[0] if _ids(raw.get("bos_token_id")) else None,
        eos_token_ids=_eos_ids(folder, raw),
    )


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


def _refuse_unbuilt(folder: Path, raw: dict[str, Any]) -> None:
    """Refuse what would change the numbers and the decoder does not compute."""
    sliding = raw.get("sliding_window") is not None and raw.get("use_sliding_window", True)
    if sliding and raw["sliding_window"] < raw.get("max_position_embeddings", 0):
        raise ModelError(f"model folder {folder}: sliding-window attention is not built yet: use another model")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"model folder {folder}: hidden_act {raw['hidden_act']!r} is not supported: it must be silu")
    if raw.get("quantization_config"):
        raise ModelError(f"model folder {folder}: quantized safetensors are not built yet: use the unquantized model")
    for name in ("mlp_bias", *(("attention_bias",) if raw.get("model_type") in ("llama", "mistral") else ())):
        if raw.get(name):
            raise ModelError(f"model folder {folder}: {name} is not built yet: use another model")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"model folder {folder}: partial_rotary_factor is not built yet: use another model")


def _size(folder: Path, raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"model folder {folder}: config.json {name} is {value!r}: it must be a positive integer")
    return value


def _rope(raw: dict[str, Any]) -> tuple[float, dict[str, float | str] | None]:
    """Base and scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return theta, None if kind == "default" else scaling


def _ids(value: Any) -> list[int]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool)]


def _eos_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    generation = _optional_json(folder / "generation_config.json")
    return tuple(dict.fromkeys(_ids(generation.get("eos_token_id")) + _ids(raw.get("eos_token_id"))))


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
