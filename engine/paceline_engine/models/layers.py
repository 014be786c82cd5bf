"""One decoder layer's weights and the arithmetic around attention.

Query, key and value projections are one matrix, gate and up projections another: fewer, larger products are what a
memory-bound decode step wants. Plain tensors in frozen records; nothing here knows about paging.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline_engine.models.config import ModelConfig
from paceline_engine.models.rope import rotate
from paceline_engine.models.weights import WeightFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer; matrices are [out, in]. Optional ones are None where the architecture has none."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def load_layer(weights: WeightFiles, config: ModelConfig, index: int) -> LayerWeights:
    """Layer `index` under Hugging Face names. Raises WeightsError for a missing or misshapen tensor."""
    prefix = f"model.layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = prefix + "self_attn."
    projections = (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
    qkv_bias = None
    if config.attention_bias:
        qkv_bias = torch.cat([weights.take(f"{attention}{name}.bias", size) for name, size in projections])
    # Qwen2-class models have biases on q, k and v only, so the output's bias is looked up, not implied.
    output_bias = f"{attention}o_proj.bias"
    qk_norm = config.qk_norm
    return LayerWeights(
        input_norm=weights.take(prefix + "input_layernorm.weight", hidden),
        qkv=torch.cat([weights.take(f"{attention}{name}.weight", size, hidden) for name, size in projections]),
        qkv_bias=qkv_bias,
        q_norm=weights.take(attention + "q_norm.weight", config.head_dim) if qk_norm else None,
        k_norm=weights.take(attention + "k_norm.weight", config.head_dim) if qk_norm else None,
        output=weights.take(attention + "o_proj.weight", hidden, heads),
        output_bias=weights.take(output_bias, hidden) if output_bias in weights else None,
        post_norm=weights.take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=torch.cat(
            [weights.take(f"{prefix}mlp.{name}.weight", inner, hidden) for name in ("gate_proj", "up_proj")]
        ),
        down=weights.take(prefix + "mlp.down_proj.weight", hidden, inner),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the mean in float32 (arXiv 1910.07467)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def project_qkv(
    x: torch.Tensor, layer: LayerWeights, config: ModelConfig, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normed hidden states [tokens, hidden] to rotated queries, rotated keys and values [tokens, heads, head_dim]."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], heads + 2 * kv_heads, config.head_dim)
    query_key, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    if layer.q_norm is not None and layer.k_norm is not None:
        query = rms_norm(query_key[:, :heads], layer.q_norm, config.rms_norm_eps)
        key = rms_norm(query_key[:, heads:], layer.k_norm, config.rms_norm_eps)
        query_key = torch.cat((query, key), dim=1)
    rotated = rotate(query_key, cos, sin)
    return rotated[:, :heads], rotated[:, heads:], value


def swiglu(x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) for x [tokens, hidden] (arXiv 2002.05202)."""
    gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate).mul_(up), layer.down)
