"""The decoder of `models.decoder` on a device: our kernels around torch's matrix products.

A forward pass waits for nothing and takes no size from the device's data, so it can be captured as a CUDA graph. What a
model needs beyond the kernels (scaled embeddings, soft caps of logits) is done by torch on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from paceline_engine.backends.triton.adapters import DeviceAdapters, LayerStacks
from paceline_engine.backends.triton.batch import DeviceBatch
from paceline_engine.backends.triton.parallel import TensorParallel
from paceline_engine.backends.triton.sharding import RankWeights, check_size
from paceline_engine.backends.triton.weights import DeviceLayer, Linear, load_weights
from paceline_engine.kernels.attention import paged_attention
from paceline_engine.kernels.gated_mlp import gated_activation
from paceline_engine.kernels.lora import RowGroups, StackedAdapters, add_lora
from paceline_engine.kernels.rms_norm import rms_norm
from paceline_engine.kernels.rope_kv_write import rope_kv_write
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.decoder import HiddenRows
from paceline_engine.models.rope import RotaryEmbedding
from paceline_engine.models.weights import WeightFiles
from paceline_engine.paged_kv import PagedKV

_NO_STACKS: LayerStacks = {}


class TritonDecoder:
    """Weights and adapters on the device, and the forward pass over paged KV there.

    quantization: of the matrices, "none", "int8" or "int4". KV may have 8 bits, whatever the weights have. parallel:
    the ranks that the model is spread over; each makes the same calls, with the same batches and KV of its own heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        weight_files: Sequence[Path],
        *,
        device: torch.device,
        max_model_len: int,
        dtype: torch.dtype,
        quantization: str = "none",
        parallel: TensorParallel | None = None,
        max_adapters: int = 8,
        max_rank: int = 64,
    ) -> None:
        self.config = config
        self.adapters = DeviceAdapters(
            config, dtype, device, max_adapters=max_adapters, max_rank=max_rank, spread=parallel is not None
        )
        self._parallel = parallel
        part, open_weights, self._first_token = config, partial(WeightFiles, weight_files), 0
        if parallel is not None:
            check_size(config, parallel.size, quantization)
            shard = parallel.shard(config)
            part, open_weights = shard.part(), partial(RankWeights, weight_files, shard=shard)
            self._first_token = shard.first_token
        weights = load_weights(part, open_weights, device=device, dtype=dtype, quantization=quantization)
        self._embedding, self._norm, self._head = weights.embedding, weights.norm, weights.head
        self._layers = weights.layers
        self._attention = config.attention_layers()
        rotary = RotaryEmbedding(config, max_model_len, torch.float32, device)
        self._rotary = [rotary.table_of_layer(index) or (None, None) for index in range(config.num_layers)]
        # Rounded to the weights' type, as the reference implementations of Gemma do.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))

    def first_layers(self, count: int) -> TritonDecoder:
        """This decoder without its later layers, sharing the weights: a drafter for it."""
        if not 1 <= count <= len(self._layers):
            raise ValueError(f"a drafter has 1 to {len(self._layers)} of the model's layers, not {count}")
        shortened = copy.copy(self)
        shortened._layers = self._layers[:count]
        return shortened

    @torch.inference_mode()
    def forward(
        self,
        batch: DeviceBatch,
        kv: PagedKV,
        adapters: RowGroups | None = None,
        states: HiddenRows | None = None,
    ) -> torch.Tensor:
        """Logits [rows, vocab] in float32 of batch.logits_rows; keys and values of the batch are written to `kv`.

        adapters: from `DeviceAdapters.groups`, in the batch's order. states: hidden states that are wanted as well, its
        tensors on the device.
        """
        eps = self.config.rms_norm_eps
        hidden = self._embed(batch.token_ids)
        # What the layer before adds to the hidden states is added when they are normed.
        output = None
        for index, layer in enumerate(self._layers):
            if output is None:
                normed = rms_norm(hidden, layer.input_norm, eps)
            else:
                normed = rms_norm(output, layer.input_norm, eps, residual=hidden, out=output)
            stacks = _NO_STACKS if adapters is None else self.adapters.of_layer(index)
            attended = self._attend(index, normed, batch, kv, stacks, adapters)
            output = self._summed(_project(layer.output, attended, stacks.get("output"), adapters))
            output = self._normed(output, layer.attention_out_norm)
            normed = rms_norm(output, layer.post_norm, eps, residual=hidden, out=output)
            output = self._summed(self._mlp(layer, normed, stacks, adapters))
            output = self._normed(output, layer.mlp_out_norm)
        assert output is not None
        if states is not None:
            states.out.copy_(self._last(hidden, output, states.rows))
        return self._logits(self._last(hidden, output, batch.logits_rows))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._parallel is None:
            hidden = F.embedding(token_ids, self._embedding)
        else:
            hidden = self._parallel.embed(token_ids, self._embedding, self._first_token)
        return hidden if self.config.embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)

    def _attend(
        self,
        index: int,
        normed: torch.Tensor,
        batch: DeviceBatch,
        kv: PagedKV,
        stacks: LayerStacks,
        adapters: RowGroups | None,
    ) -> torch.Tensor:
        """Heads side by side [tokens, heads * head_dim]."""
        config, layer, attention = self.config, self._layers[index], self._attention[index]
        qkv = _project(layer.qkv, normed, stacks.get("qkv"), adapters)
        key, value = kv.tensor[index]
        key_scale, value_scale = (None, None) if kv.scales is None else kv.scales[index]
        cos, sin = self._rotary[index]
        rope_kv_write(
            *(qkv, batch.positions, batch.slots, key, value),
            cos=cos,
            sin=sin,
            key_scale=key_scale,
            value_scale=value_scale,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        query = qkv.view(qkv.shape[0], -1, config.head_dim)[:, : -2 * key.shape[2]]
        attended = paged_attention(
            *(query, key, value, batch.block_tables, batch.begins, batch.context_lens),
            max_query_len=batch.max_query_len,
            scale=attention.scale,
            window=attention.window,
            softcap=attention.softcap,
            key_scale=key_scale,
            value_scale=value_scale,
            num_segments=batch.num_segments,
        )
        return attended.flatten(1)

    def _mlp(
        self, layer: DeviceLayer, normed: torch.Tensor, stacks: LayerStacks, adapters: RowGroups | None
    ) -> torch.Tensor:
        gate_up = _project(layer.gate_up, normed, stacks.get("gate_up"), adapters)
        activated = gated_activation(gate_up, self.config.hidden_act)
        return _project(layer.down, activated, stacks.get("down"), adapters)

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """Over the ranks, each of which has its part of the sum."""
        return x if self._parallel is None else self._parallel.all_reduce(x)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else rms_norm(x, weight, self.config.rms_norm_eps, out=x)

    def _last(self, hidden: torch.Tensor, output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The wanted rows [n, hidden] behind the last norm."""
        residual = hidden.index_select(0, rows)
        return rms_norm(output.index_select(0, rows), self._norm, self.config.rms_norm_eps, residual=residual)

    def _logits(self, last: torch.Tensor) -> torch.Tensor:
        logits = self._head(last)
        if self._parallel is not None:
            logits = self._parallel.all_gather(logits)[:, : self.config.vocab_size]
        logits = logits.float().contiguous()
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _project(
    linear: Linear, x: torch.Tensor, update: StackedAdapters | None, adapters: RowGroups | None
) -> torch.Tensor:
    output = linear(x)
    if update is not None and adapters is not None:
        add_lora(output, x, update, adapters)
    return output
