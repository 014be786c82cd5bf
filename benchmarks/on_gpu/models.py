"""Shapes of the models that are run with random weights, for our engine and for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline_engine.models.config import ModelConfig

QWEN3_06B = ModelConfig(
    architecture="qwen3",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    tie_word_embeddings=True,
    qk_norm=True,
)
LLAMA_31_8B = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)


def shrunk(model: ModelConfig) -> ModelConfig:
    """The same architecture in small, for a dry run."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
    return replace(model, **sizes, num_heads=4, num_kv_heads=2, head_dim=16)


def streamed_bytes(model: ModelConfig, itemsize: int = 2) -> int:
    """Bytes of the weights that a decode step reads: all matrices and norms, of the embedding next to nothing."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attention = model.hidden_size * (heads + model.num_heads * model.head_dim)
    layer = attention + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size
    layer += 2 * model.head_dim if model.qk_norm else 0
    return itemsize * (model.num_layers * layer + model.hidden_size + model.vocab_size * model.hidden_size)


def prompts(model: ModelConfig, count: int, length: int) -> list[list[int]]:
    """Random prompts that share no prefix worth a block."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.vocab_size, (count, length), generator=generator).tolist()


class RandomWeights:
    """Stands in for a checkpoint's files: any tensor that is asked for, made on the device."""

    def __init__(self, files: Sequence[Path], dtype: torch.dtype, *, device: torch.device) -> None:
        self._dtype, self._device = dtype, device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Values of about the size that a trained model has, so that nothing overflows."""
        return torch.randn(shape, dtype=self._dtype, device=self._device).mul_(0.02)

    def take_norm(self, name: str, size: int, offset: float) -> torch.Tensor:
        """Ones."""
        return torch.ones(size, dtype=self._dtype, device=self._device)


def of_transformers(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model of the same shape, random weights made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rope: dict[str, Any] = {"rope_type": "default", **(model.rope_scaling or {}), "rope_theta": model.rope_theta}
    config = AutoConfig.for_model(
        model.architecture,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=model.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return made.eval()
