"""One decoder layer's weights and the arithmetic around attention.

Query, key and value projections are one matrix, gate and up projections another: fewer, larger products are what a
memory-bound decode step wants. Plain tensors in frozen records; nothing here knows about paging.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline_engine.models.config import ModelConfig
from paceline_engine.models.lora import LayerDeltas, add_deltas
from paceline_engine.models.rope import rotate
from paceline_engine.models.weights import WeightFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer; matrices are [out, in]. Optional ones are None where the architecture has none.

    input_norm and post_norm stand before attention and before the MLP, attention_out_norm and mlp_out_norm after them.
    """

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
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    attention_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None


def load_layer(weights: WeightFiles, config: ModelConfig, index: int) -> LayerWeights:
    """Layer `index` under Hugging Face names. Raises WeightsError for a missing or misshapen tensor."""
    prefix = f"model.layers.{index}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads * head_dim, config.num_kv_heads * head_dim
    qkv = {f"{attention}q_proj": heads, f"{attention}k_proj": kv_heads, f"{attention}v_proj": kv_heads}
    gate_up = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}

    def norm(name: str, size: int, present: bool) -> torch.Tensor | None:
        return weights.take_norm(f"{name}.weight", size, config.norm_offset) if present else None

    # With post norms, Hugging Face's post_attention_layernorm is the one after attention, else the one before the MLP.
    before_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    return LayerWeights(
        input_norm=weights.take_norm(f"{prefix}input_layernorm.weight", hidden, config.norm_offset),
        qkv=_matrices(weights, qkv, hidden),
        qkv_bias=_biases(weights, qkv, config.attention_bias),
        q_norm=norm(f"{attention}q_norm", head_dim, config.qk_norm),
        k_norm=norm(f"{attention}k_norm", head_dim, config.qk_norm),
        output=weights.take(f"{attention}o_proj.weight", hidden, heads),
        output_bias=_biases(weights, {f"{attention}o_proj": hidden}, config.attention_output_bias),
        post_norm=weights.take_norm(f"{prefix}{before_mlp}.weight", hidden, config.norm_offset),
        gate_up=_matrices(weights, gate_up, hidden),
        gate_up_bias=_biases(weights, gate_up, config.mlp_bias),
        down=weights.take(f"{mlp}down_proj.weight", hidden, inner),
        down_bias=_biases(weights, {f"{mlp}down_proj": hidden}, config.mlp_bias),
        attention_out_norm=norm(f"{prefix}post_attention_layernorm", hidden, config.post_norms),
        mlp_out_norm=norm(f"{prefix}post_feedforward_layernorm", hidden, config.post_norms),
    )


def _matrices(weights: WeightFiles, rows: dict[str, int], columns: int) -> torch.Tensor:
    """The named matrices [rows, columns], one below the other."""
    return torch.cat([weights.take(f"{name}.weight", size, columns) for name, size in rows.items()])


def _biases(weights: WeightFiles, sizes: dict[str, int], present: bool) -> torch.Tensor | None:
    """The named biases, end to end, where the architecture has them."""
    return torch.cat([weights.take(f"{name}.bias", size) for name, size in sizes.items()]) if present else None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the mean in float32 (arXiv 1910.07467)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def project_qkv(
    x: torch.Tensor,
    layer: LayerWeights,
    config: ModelConfig,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    deltas: LayerDeltas,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normed hidden states [tokens, hidden] to rotated queries, rotated keys and values [tokens, heads, head_dim].

    rotation: the tokens' cos and sin; None leaves queries and keys as they are.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = add_deltas(F.linear(x, layer.qkv, layer.qkv_bias), x, deltas, "qkv")
    qkv = qkv.view(x.shape[0], heads + 2 * kv_heads, config.head_dim)
    query_key, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    if layer.q_norm is not None and layer.k_norm is not None:
        query = rms_norm(query_key[:, :heads], layer.q_norm, config.rms_norm_eps)
        key = rms_norm(query_key[:, heads:], layer.k_norm, config.rms_norm_eps)
        query_key = torch.cat((query, key), dim=1)
    if rotation is not None:
        query_key = rotate(query_key, *rotation)
    return query_key[:, :heads], query_key[:, heads:], value


def project_output(x: torch.Tensor, layer: LayerWeights, deltas: LayerDeltas) -> torch.Tensor:
    """Attention's heads, side by side [tokens, heads * head_dim], to hidden states [tokens, hidden]."""
    return add_deltas(F.linear(x, layer.output, layer.output_bias), x, deltas, "output")


def gated_mlp(x: torch.Tensor, layer: LayerWeights, hidden_act: str, deltas: LayerDeltas) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) for x [tokens, hidden] (SwiGLU and GeGLU, arXiv 2002.05202)."""
    gate_up = add_deltas(F.linear(x, layer.gate_up, layer.gate_up_bias), x, deltas, "gate_up")
    gate, up = gate_up.chunk(2, dim=-1)
    activated = (F.silu(gate) if hidden_act == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)
    return add_deltas(F.linear(activated, layer.down, layer.down_bias), activated, deltas, "down")
