"""Rotary position embeddings (Su et al., arXiv 2104.09864) in the Hugging Face half-split layout.

Supported scalings of the frequencies: none, "linear" (positions divided by a factor), "llama3" (low frequencies
divided by a factor, high ones kept, a smooth ramp between), "yarn" (arXiv 2309.00071: a ramp over dimensions, and
longer rotated vectors) and "dynamic", which below the model's trained length is no scaling at all, and the engine
serves no more. Any other is refused: wrong positions give wrong text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from paceline_engine.models.config import ROPE_SCALINGS, ModelConfig

Scaling = Mapping[str, float | str]


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] float32 rotation speeds in radians per position, scaled as the checkpoint says."""
    scaling = config.rope_scaling or {}
    scaled = _scaling_of(scaling)(_speeds(config.head_dim, config.rope_theta), scaling, config)
    return scaled / torch.tensor(config.rope_factors) if config.rope_factors else scaled


def vector_scale(config: ModelConfig) -> float:
    """What rotated queries and keys are multiplied by: 1 but for yarn, whose default is 0.1 ln(factor) + 1."""
    scaling = config.rope_scaling or {}
    if _kind(scaling) != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = _yarn_factor(scaling, config)
    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return _mscale(factor, float(numerator)) / _mscale(factor, float(denominator))
    return _mscale(factor, 1.0)


def _kind(scaling: Scaling) -> str:
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def _speeds(head_dim: int, theta: float) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    return 1.0 / (theta**exponents)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _unscaled(inv_freq: torch.Tensor, scaling: Scaling, config: ModelConfig) -> torch.Tensor:
    return inv_freq


def _linear(inv_freq: torch.Tensor, scaling: Scaling, config: ModelConfig) -> torch.Tensor:
    return inv_freq / float(scaling["factor"])


def _llama3(inv_freq: torch.Tensor, scaling: Scaling, config: ModelConfig) -> torch.Tensor:
    factor = float(scaling["factor"])
    low = float(scaling["low_freq_factor"])
    high = float(scaling["high_freq_factor"])
    original_length = float(scaling.get("original_max_position_embeddings") or config.max_position_embeddings)
    wavelength = 2 * math.pi / inv_freq
    ramp = ((original_length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - ramp) * inv_freq / factor + ramp * inv_freq


def _yarn_original_length(scaling: Scaling, config: ModelConfig) -> float:
    return float(scaling.get("original_max_position_embeddings") or config.max_position_embeddings)


def _yarn_factor(scaling: Scaling, config: ModelConfig) -> float:
    factor = scaling.get("factor")
    if factor is not None:
        return float(factor)
    return config.max_position_embeddings / _yarn_original_length(scaling, config)


def _yarn(inv_freq: torch.Tensor, scaling: Scaling, config: ModelConfig) -> torch.Tensor:
    """Speeds of over `beta_fast` turns in the trained length stay, of under `beta_slow` are divided by the factor."""
    dim, theta = config.head_dim, config.rope_theta
    length = _yarn_original_length(scaling, config)

    def dimension(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(scaling.get("beta_fast") or 32)), dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A step instead of a ramp would divide by zero.
    width = (high - low) or 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq / _yarn_factor(scaling, config) * slowed + inv_freq * (1 - slowed)


_SCALINGS: dict[str, Callable[[torch.Tensor, Scaling, ModelConfig], torch.Tensor]] = {
    "default": _unscaled,
    "dynamic": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _scaling_of(scaling: Scaling) -> Callable[[torch.Tensor, Scaling, ModelConfig], torch.Tensor]:
    kind = _kind(scaling)
    if kind not in _SCALINGS:
        raise ValueError(f"rope scaling {kind!r} isn't supported; supported: {', '.join(ROPE_SCALINGS)}")
    return _SCALINGS[kind]


class RotaryEmbedding:
    """Cosines and sines of all positions below `max_positions`, computed once.

    Sliding layers may have speeds of their own, and some layers no positions: `of_layer` picks from `at`'s answer.
    """

    def __init__(
        self, config: ModelConfig, max_positions: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        speeds = [(inverse_frequencies(config), vector_scale(config))]
        if config.local_rope_theta is not None:
            speeds.append((_speeds(config.head_dim, config.local_rope_theta), 1.0))
        positions = torch.arange(max_positions, dtype=torch.float32)
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        for inv_freq, scale in speeds:
            angles = torch.outer(positions, inv_freq)
            # Computed on the host, so that all devices rotate by the same bits.
            self._tables.append(
                ((angles.cos() * scale).to(device, dtype), (angles.sin() * scale).to(device, dtype)),
            )
        local = config.sliding_layers if config.local_rope_theta is not None else ()
        self._table_of: list[int | None] = [int(index in local) for index in range(config.num_layers)]
        for index in config.no_rope_layers:
            self._table_of[index] = None

    def at(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """cos and sin of `positions` [tokens] in each table, each [tokens, 1, head_dim / 2]."""
        return [(cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)) for cos, sin in self._tables]

    def of_layer(
        self, layer: int, rotations: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The pair for a layer, out of what `at` gave; None where the layer has no positions."""
        table = self._table_of[layer]
        return None if table is None else rotations[table]

    def table_of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A layer's cos and sin of all positions [max_positions, head_dim / 2]; None where it has no positions."""
        return self.of_layer(layer, self._tables)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, head_dim]; dimension i pairs with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
