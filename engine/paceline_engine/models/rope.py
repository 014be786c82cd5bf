"""Rotary position embeddings (Su et al., arXiv 2104.09864) in the Hugging Face half-split layout.

Supported scalings of the frequencies: none, "linear" (positions divided by a factor) and "llama3" (low frequencies
divided by a factor, high ones kept, a smooth ramp between). Any other is refused: wrong positions give wrong text.
"""

from __future__ import annotations

import math

import torch

from paceline_engine.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] float32 rotation speeds in radians per position, scaled as the checkpoint says."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(inv_freq, scaling)
    raise ValueError(f"rope scaling {kind!r} isn't supported; supported: linear, llama3")


def _llama3(inv_freq: torch.Tensor, scaling: dict[str, float | str]) -> torch.Tensor:
    factor = float(scaling["factor"])
    low = float(scaling["low_freq_factor"])
    high = float(scaling["high_freq_factor"])
    original_length = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv_freq
    ramp = ((original_length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - ramp) * inv_freq / factor + ramp * inv_freq


class RotaryEmbedding:
    """Cosines and sines of all positions below `max_positions`, computed once."""

    def __init__(self, config: ModelConfig, max_positions: int, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config))
        self._cos = angles.cos().to(dtype)
        self._sin = angles.sin().to(dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of `positions` [tokens], each [tokens, 1, head_dim / 2]: one pair serves all layers and heads."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, head_dim]; dimension i pairs with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
