"""Reads a GGUF file's metadata into the architecture record; keys as in llama.cpp's gguf-py constants.

What llama.cpp computes for an architecture without a key saying so (a window pattern, a scale of the scores, layers
without positions) is written here, one short function a family. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline_engine.models.config import ModelConfig
from paceline_engine.models.errors import ModelError

# Token types of a GGUF vocabulary.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
# Older files name only the end of a text, and their models say these at the end of a turn.
TURN_ENDS = frozenset(("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"))
Shapes = Mapping[str, tuple[int, ...]]


class Metadata:
    """The keys of one file's architecture; every complaint names the file, the key and its value."""

    def __init__(self, path: Path, architecture: str, get: Callable[[str], Any]) -> None:
        self.path = path
        self.architecture = architecture
        self.get = get

    def error(self, what: str, remedy: str = "use another model") -> ModelError:
        """A refusal of this file."""
        return ModelError(f"model file {self.path}: {what}: {remedy}")

    def value(self, key: str) -> Any:
        """Value of the architecture's own key, or None."""
        return self.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> Any:
        """A positive number."""
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(f"{self.architecture}.{key} is {value!r}, not a positive number", "convert it again")
        return value

    def optional(self, key: str) -> float | None:
        """A positive number, or None where the file has none."""
        return None if self.value(key) is None else float(self.number(key))


def _llama(metadata: Metadata) -> dict[str, Any]:
    if metadata.value("attention.sliding_window") is not None:
        raise metadata.error(f"a sliding window in architecture {metadata.architecture!r} is not built")
    return {}


def _smollm3(metadata: Metadata) -> dict[str, Any]:
    layers = range(metadata.number("block_count"))
    return {**_llama(metadata), "no_rope_layers": tuple(index for index in layers if (index + 1) % 4 == 0)}


def _gemma(metadata: Metadata) -> dict[str, Any]:
    # The converter has added Gemma's 1 to every norm's weight already.
    return {"hidden_act": "gelu_tanh", "embedding_scale": float(metadata.number("embedding_length") ** 0.5)}


def _sliding(metadata: Metadata, every: int) -> dict[str, Any]:
    """A window in all layers but each `every`-th, unless the file says which."""
    window, layers = metadata.number("attention.sliding_window"), range(metadata.number("block_count"))
    pattern = metadata.value("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        sliding = tuple(index for index, slides in enumerate(pattern[: len(layers)]) if slides)
    else:
        every = every if pattern is None else metadata.number("attention.sliding_window_pattern")
        sliding = tuple(index for index in layers if (index + 1) % every != 0)
    if window >= metadata.number("context_length"):
        return {}
    return {"sliding_window": window, "sliding_layers": sliding}


def _scale(metadata: Metadata, largest: int) -> dict[str, Any]:
    """The largest model of each Gemma generation scales scores by the share of the width a head has."""
    if metadata.number("block_count") != largest:
        return {}
    return {"attention_scale": (metadata.number("embedding_length") / metadata.number("attention.head_count")) ** -0.5}


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gemma(metadata),
        **_sliding(metadata, 2),
        **_scale(metadata, 46),
        "post_norms": True,
        "attention_softcap": metadata.optional("attn_logit_softcapping"),
        "logit_softcap": metadata.optional("final_logit_softcapping"),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    windowed = metadata.value("attention.sliding_window") is not None
    return {
        **_gemma(metadata),
        **(_sliding(metadata, 6) if windowed else {}),
        **_scale(metadata, 62),
        "post_norms": True,
        "logit_softcap": metadata.optional("final_logit_softcapping"),
        "local_rope_theta": float(metadata.number("rope.freq_base_swa", 10000.0)) if windowed else None,
    }


# Architecture: Hugging Face name, default theta, whether the converter permutes query and key rows, its own fields.
FAMILIES: dict[str, tuple[str, float, bool, Callable[[Metadata], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", 10000.0, True, _llama),
    "qwen2": ("Qwen2ForCausalLM", 10000.0, False, _llama),
    "qwen3": ("Qwen3ForCausalLM", 10000.0, False, _llama),
    "smollm3": ("SmolLM3ForCausalLM", 10000.0, True, _smollm3),
    "gemma": ("GemmaForCausalLM", 10000.0, False, _gemma),
    "gemma2": ("Gemma2ForCausalLM", 10000.0, False, _gemma2),
    "gemma3": ("Gemma3ForCausalLM", 1e6, False, _gemma3),
}


def model_config(metadata: Metadata, shapes: Shapes, rope_factors: tuple[float, ...]) -> ModelConfig:
    """The architecture record. `shapes` are the file's tensors', outermost size first. Raises ModelError."""
    name, theta, _, own_fields = FAMILIES[metadata.architecture]
    hidden, heads = metadata.number("embedding_length"), metadata.number("attention.head_count")
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise metadata.error("tensor token_embd.weight is missing", "the file is incomplete, download it again")
    head_dim = metadata.number("attention.key_length", hidden // heads)
    if metadata.number("rope.dimension_count", head_dim) != head_dim:
        raise metadata.error("rotary embedding over a part of each head is not built yet")
    fields: dict[str, Any] = {
        "architecture": name,
        "vocab_size": int(shapes["token_embd.weight"][0]),
        "hidden_size": hidden,
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_layers": metadata.number("block_count"),
        "num_heads": heads,
        "num_kv_heads": metadata.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": float(metadata.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(metadata.number("rope.freq_base", theta)),
        "rope_scaling": _rope_scaling(metadata),
        "rope_factors": rope_factors,
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "attention_output_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
        "qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": _eos_token_ids(metadata),
    }
    return ModelConfig(**(fields | own_fields(metadata)))


def check_rope_factors(metadata: Metadata, values: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """The rope_freqs tensor as numbers; they must be positive."""
    factors = tuple(float(value) for value in values.ravel())
    if not all(factor > 0 for factor in factors):
        raise metadata.error("tensor rope_freqs.weight holds a factor that isn't positive", "convert it again")
    return factors


def _rope_scaling(metadata: Metadata) -> dict[str, float | str] | None:
    """The scaling as config.json would say it."""
    kind = metadata.value("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise metadata.error(f"rope scaling {kind!r} is not built yet", "use the model's safetensors folder")
    scaling: dict[str, float | str] = {"rope_type": kind, "factor": float(metadata.number("rope.scaling.factor"))}
    if kind == "linear":
        return scaling
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        if metadata.value(f"rope.scaling.{key}") not in (None, 1.0):
            raise metadata.error(
                f"{metadata.architecture}.rope.scaling.{key} is not built", "use the safetensors folder"
            )
    names = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    values = {name: metadata.optional(f"rope.scaling.{key}") for key, name in names.items()}
    return scaling | {name: value for name, value in values.items() if value is not None}


def _eos_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Ids that end an output: those the file names, and its control tokens that are known to end a turn."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    types = metadata.get("tokenizer.ggml.token_type") or []
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    turn_ends = [
        index for index, token in enumerate(tokens) if token in TURN_ENDS and types[index : index + 1] == [CONTROL]
    ]
    return tuple(dict.fromkeys(int(token_id) for token_id in (*named, *turn_ends) if token_id is not None))
