"""A model's weights on the device, brought there one layer at a time: there is never a second copy of them all.

Quantized matrices are packed on the device, and only the packed ones stay. The formats are the CPU kernels': int4 has
a head of 8 bits, which decides between close tokens and is read once a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline_engine.kernels.quantized_gemm import QuantizedMatrix, pack_matrix, quantized_gemm
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.layers import LayerWeights, load_layer
from paceline_engine.models.weights import WeightFiles

# Quantization: the formats of the layers' matrices and of the head.
_FORMATS = {"none": (None, None), "int8": ("int8", "int8"), "int4": ("int4", "int8")}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight [out, in], transposed, + bias [out]; the weight is plain or quantized."""

    weight: torch.Tensor | QuantizedMatrix
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out], in x's type."""
        if isinstance(self.weight, QuantizedMatrix):
            return quantized_gemm(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayer:
    """One layer's weights; fields as in `models.layers.LayerWeights`."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    attention_out_norm: torch.Tensor | None
    mlp_out_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWeights:
    """A whole model's: embedding [vocab, hidden], layers, the last norm [hidden], head [vocab, hidden]."""

    embedding: torch.Tensor
    layers: tuple[DeviceLayer, ...]
    norm: torch.Tensor
    head: Linear


def load_weights(
    config: ModelConfig,
    open_weights: Callable[[torch.dtype], WeightFiles],
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
) -> DeviceWeights:
    """Read what `config` implies from the files that `open_weights` opens in a type. Raises WeightsError."""
    form, head_form = _FORMATS[quantization]
    plain = open_weights(dtype)
    # What is quantized is not rounded before.
    source = plain if form is None else open_weights(torch.float32)
    shape = (config.vocab_size, config.hidden_size)
    embedding = plain.take("model.embed_tokens.weight", *shape).to(device)
    layers: list[DeviceLayer] = []
    for index in range(config.num_layers):
        layers.append(_layer(load_layer(source, config, index), form, device, dtype))
        percent, before = (100 * done // config.num_layers for done in (index + 1, index))
        if percent // 20 > before // 20:
            logger.info("loading weights to %s: %d %%", device, percent)
    tied = config.tie_word_embeddings
    head = embedding
    if not (tied and head_form is None):
        head = source.take("model.embed_tokens.weight" if tied else "lm_head.weight", *shape)
    return DeviceWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=plain.take_norm("model.norm.weight", config.hidden_size, config.norm_offset).to(device),
        head=Linear(_matrix(head, head_form, device)),
    )


def _layer(layer: LayerWeights, form: str | None, device: torch.device, dtype: torch.dtype) -> DeviceLayer:
    def vector(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device, dtype)

    def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return Linear(_matrix(weight, form, device), vector(bias))

    return DeviceLayer(
        input_norm=layer.input_norm.to(device, dtype),
        qkv=linear(layer.qkv, layer.qkv_bias),
        q_norm=vector(layer.q_norm),
        k_norm=vector(layer.k_norm),
        output=linear(layer.output, layer.output_bias),
        post_norm=layer.post_norm.to(device, dtype),
        gate_up=linear(layer.gate_up, layer.gate_up_bias),
        down=linear(layer.down, layer.down_bias),
        attention_out_norm=vector(layer.attention_out_norm),
        mlp_out_norm=vector(layer.mlp_out_norm),
    )


def _matrix(weight: torch.Tensor, form: str | None, device: torch.device) -> torch.Tensor | QuantizedMatrix:
    return weight.to(device) if form is None else pack_matrix(weight.to(device), form)
