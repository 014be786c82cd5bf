"""Reads a Hugging Face config.json into the architecture record.

What tells families apart is one short function each, from the file's fields to the record's. Only what the decoder
computes exactly is accepted: a setting it would ignore is refused by name. No torch, no transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paceline_engine.models.config import ROPE_SCALINGS, ModelConfig
from paceline_engine.models.errors import ModelError

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SLIDING, _FULL = "sliding_attention", "full_attention"


class HFConfig:
    """The fields of one config.json; every complaint names the folder, the field and its value."""

    def __init__(self, folder: Path, raw: dict[str, Any]) -> None:
        self.folder = folder
        self.raw = raw

    def error(self, what: str, remedy: str = "use another model") -> ModelError:
        """A refusal of this folder."""
        return ModelError(f"model folder {self.folder}: {what}: {remedy}")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive count."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"config.json {name} is {value!r}", "it must be a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        """A positive number, or the default where there is none."""
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(f"config.json {name} is {value!r}", "it must be a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A setting that is on or off."""
        value = self.raw.get(name)
        return default if value is None else bool(value)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.size("num_hidden_layers")

    def sliding(self, default: Callable[[int], bool], window: int | None) -> dict[str, Any]:
        """Window and layers it holds in: as layer_types says, else where `default` of the layer's index is true."""
        types = self.raw.get("layer_types")
        if types is None:
            types = [_SLIDING if default(index) else _FULL for index in range(self.num_layers)]
        unknown = set(types) - {_SLIDING, _FULL}
        if unknown or len(types) != self.num_layers:
            got = ", ".join(sorted(map(str, unknown))) or f"{len(types)} entries"
            raise self.error(f"config.json layer_types has {got}", f"it must say {_FULL} or {_SLIDING} for each layer")
        layers = tuple(index for index, kind in enumerate(types) if kind == _SLIDING)
        # A window as long as the longest context hides nothing.
        if window is None or not layers or window >= self.size("max_position_embeddings"):
            return {}
        return {"sliding_window": window, "sliding_layers": layers}


def _llama(config: HFConfig) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    return {"attention_bias": bias, "attention_output_bias": bias, "mlp_bias": config.flag("mlp_bias")}


def _mistral(config: HFConfig) -> dict[str, Any]:
    return config.sliding(lambda _: True, _window(config))


def _qwen2(config: HFConfig) -> dict[str, Any]:
    window = _window(config) if config.flag("use_sliding_window") else None
    first = config.raw.get("max_window_layers", 28)
    return {"attention_bias": True, **config.sliding(lambda index: window is not None and index >= first, window)}


def _qwen3(config: HFConfig) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    return {**_qwen2(config), "attention_bias": bias, "attention_output_bias": bias, "qk_norm": True}


def _smollm3(config: HFConfig) -> dict[str, Any]:
    interval = config.size("no_rope_layer_interval", 4)
    rotated = config.raw.get("no_rope_layers")  # 1 where a layer has positions
    if rotated is None:
        rotated = [int((index + 1) % interval != 0) for index in range(config.num_layers)]
    without = tuple(index for index, has_rope in enumerate(rotated[: config.num_layers]) if not has_rope)
    window = _window(config) if config.flag("use_sliding_window") else None
    sliding = config.sliding(lambda index: window is not None and index in without, window)
    return {**_llama(config), **sliding, "no_rope_layers": without}


def _gemma(config: HFConfig) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    if config.flag("use_bidirectional_attention"):
        raise config.error("bidirectional attention is not built")
    return {
        "attention_bias": bias,
        "attention_output_bias": bias,
        "hidden_act": "gelu_tanh",
        "norm_offset": 1.0,
        "embedding_scale": float(config.size("hidden_size") ** 0.5),
    }


def _gemma2(config: HFConfig) -> dict[str, Any]:
    return {
        **_gemma(config),
        **config.sliding(lambda index: index % 2 == 0, _window(config, 4096)),
        "post_norms": True,
        "attention_scale": float(config.size("query_pre_attn_scalar", 256) ** -0.5),
        "attention_softcap": config.number("attn_logit_softcapping"),
        "logit_softcap": config.number("final_logit_softcapping"),
    }


def _gemma3(config: HFConfig) -> dict[str, Any]:
    pattern = config.size("sliding_window_pattern", 6)
    return {
        **_gemma2(config),
        **config.sliding(lambda index: (index + 1) % pattern != 0, _window(config, 4096)),
        "qk_norm": True,
        # In the file for history's sake only: Gemma 3 does not cap its scores.
        "attention_softcap": None,
    }


def _window(config: HFConfig, default: int | None = None) -> int | None:
    return None if config.raw.get("sliding_window", default) is None else config.size("sliding_window", default)


_FAMILIES: dict[str, Callable[[HFConfig], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}
# Where config.json leaves these out.
_HEAD_DIM = {"Qwen3ForCausalLM": 128, **dict.fromkeys(("GemmaForCausalLM", "Gemma2ForCausalLM"), 256)}
_HEAD_DIM["Gemma3ForCausalLM"] = 256
_TIED = frozenset(("SmolLM3ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"))
_SCALING_NUMBERS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
_THETA = {"SmolLM3ForCausalLM": 2e6, "Gemma3ForCausalLM": 1e6}


def model_config(folder: Path, raw: dict[str, Any], eos_token_ids: Iterable[int]) -> ModelConfig:
    """The architecture record of a config.json's fields. Raises ModelError."""
    config = HFConfig(folder, raw)
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in _FAMILIES:
        raise config.error(f"architecture {architecture!r} is not supported", f"use one of {', '.join(_FAMILIES)}")
    _refuse_unbuilt(config)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    kv_heads = config.size("num_key_value_heads", heads)
    head_dim = config.size("head_dim", _HEAD_DIM.get(architecture, hidden // heads))
    if heads % kv_heads:
        raise config.error(f"config.json num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise config.error(f"config.json head_dim is {head_dim}", "it must be even")
    bos = token_ids(raw.get("bos_token_id"))
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": config.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.size("intermediate_size"),
        "num_layers": config.num_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": config.size("max_position_embeddings"),
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": config.flag("tie_word_embeddings", architecture in _TIED),
        "hidden_act": _activation(config),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": tuple(eos_token_ids),
    }
    return ModelConfig(**(fields | _rope(config, architecture) | _FAMILIES[architecture](config)))


def token_ids(value: Any) -> list[int]:
    """The ids in a field that holds one, several or none."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool)]


def _activation(config: HFConfig) -> str:
    name = config.raw.get("hidden_activation") or config.raw.get("hidden_act") or "silu"
    if name == "gelu" and config.raw.get("model_type") == "gemma":
        return "gelu_tanh"  # The first Gemma files say gelu and mean its approximation.
    if name not in _ACTIVATIONS:
        raise config.error(f"hidden_act {name!r} is not supported", f"it must be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _refuse_unbuilt(config: HFConfig) -> None:
    """Refuse what would change the numbers and the decoder does not compute."""
    if config.raw.get("quantization_config"):
        raise config.error("quantized safetensors are not built yet", "use the unquantized model")
    if (config.number("partial_rotary_factor") or 1.0) != 1.0:
        raise config.error("partial_rotary_factor is not built yet")


def _rope(config: HFConfig, architecture: str) -> dict[str, Any]:
    """Base and scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    default = _THETA.get(architecture, 10000.0)
    parameters = config.raw.get("rope_parameters") or {}
    if _FULL not in parameters:
        scaling = dict(parameters or config.raw.get("rope_scaling") or {})
        base = scaling.pop("rope_theta", None) or config.number("rope_theta", default)
        local = config.number("rope_local_base_freq", 10000.0) if architecture == "Gemma3ForCausalLM" else None
        return _rope_fields(config, base, scaling, local)
    # One entry for each kind of layer.
    scaling, sliding = dict(parameters[_FULL] or {}), dict(parameters.get(_SLIDING) or {})
    if sliding.get("rope_type", "default") != "default":
        raise config.error(f"rope scaling {sliding['rope_type']!r} of sliding layers is not built")
    base = scaling.pop("rope_theta", None) or default
    return _rope_fields(config, base, scaling, float(sliding.get("rope_theta") or 10000.0))


def _rope_fields(config: HFConfig, theta: Any, scaling: dict[str, Any], local: float | None) -> dict[str, Any]:
    scaling = {name: value for name, value in scaling.items() if value is not None}
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise config.error("partial_rotary_factor is not built yet")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", *ROPE_SCALINGS):
        raise config.error(f"rope scaling {kind!r} is not built yet", f"it must be one of {', '.join(ROPE_SCALINGS)}")
    for name in _SCALING_NUMBERS.get(kind, ()):
        if name not in scaling:
            raise config.error(f"rope scaling {kind!r} has no {name}", "complete its config.json")
    for name, value in scaling.items():
        if name not in ("rope_type", "type", "truncate") and not (isinstance(value, int | float) and value > 0):
            raise config.error(f"rope scaling {kind!r}: {name} is {value!r}", "it must be a positive number")
    return {
        "rope_theta": float(theta),
        "rope_scaling": None if kind == "default" else scaling,
        "local_rope_theta": local,
    }
