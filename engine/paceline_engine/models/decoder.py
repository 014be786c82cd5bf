"""A Llama-family decoder driven by `ModelConfig` alone, over a flat batch of tokens.

Prefill and decode tokens of all sequences stand in one row of tokens; only attention knows where sequences begin, and
it is passed in, so the same decoder runs on any paged KV layout. Imports no transformers: what it computes is checked
against transformers token by token in tests.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from paceline_engine.models.config import ModelConfig
from paceline_engine.models.layers import LayerWeights, gated_mlp, load_layer, project_output, project_qkv, rms_norm
from paceline_engine.models.lora import NO_DELTAS, AdapterTable, LayerDeltas
from paceline_engine.models.rope import RotaryEmbedding
from paceline_engine.models.weights import WeightFiles


class Attention(Protocol):
    """Writes keys and values of the batch to a layer's KV and attends over each token's own context."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim] -> like query."""
        ...


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Tokens whose hidden states behind the last norm are wanted: rows [n] of the batch, written to out [n, hidden]."""

    rows: torch.Tensor
    out: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, config: ModelConfig) -> HiddenRows:
        """With a fresh `out` in float32."""
        return cls(rows, torch.empty((rows.shape[0], config.hidden_size), dtype=torch.float32))


class Decoder:
    """Weights, adapters and forward pass. Not a torch module: nothing here trains, moves or is looked up by name."""

    def __init__(
        self,
        config: ModelConfig,
        weight_files: Sequence[Path],
        *,
        max_model_len: int,
        dtype: torch.dtype,
        max_adapters: int = 8,
        max_rank: int = 64,
    ) -> None:
        self.config = config
        self.adapters = AdapterTable(config, dtype, max_adapters=max_adapters, max_rank=max_rank)
        weights = WeightFiles(weight_files, dtype)
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", *shape)
        self._layers: list[LayerWeights] = [load_layer(weights, config, index) for index in range(config.num_layers)]
        self._norm = weights.take_norm("model.norm.weight", config.hidden_size, config.norm_offset)
        tied = config.tie_word_embeddings
        self._head = self._embedding if tied else weights.take("lm_head.weight", *shape)
        self._rotary = RotaryEmbedding(config, max_model_len, dtype)
        # Rounded to the weights' type, as the reference implementations of Gemma do.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype)

    def first_layers(self, count: int) -> Decoder:
        """This decoder without its later layers, sharing the weights: a drafter for it."""
        if not 1 <= count <= len(self._layers):
            raise ValueError(f"a drafter has 1 to {len(self._layers)} of the model's layers, not {count}")
        shortened = copy.copy(self)
        shortened._layers = self._layers[:count]
        return shortened

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_rows: torch.Tensor,
        attention: Attention,
        deltas: Sequence[LayerDeltas] | None = None,
        states: HiddenRows | None = None,
    ) -> torch.Tensor:
        """Logits [rows, vocab] in float32 of the tokens at `logits_rows`; token_ids and positions are [tokens].

        deltas: from `adapters.deltas`, in the batch's order. states: hidden states that are wanted as well.
        """
        config, eps = self.config, self.config.rms_norm_eps
        hidden = F.embedding(token_ids, self._embedding)
        if config.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        rotations = self._rotary.at(positions)
        for index, layer in enumerate(self._layers):
            updates = NO_DELTAS if deltas is None else deltas[index]
            normed = rms_norm(hidden, layer.input_norm, eps)
            query, key, value = project_qkv(normed, layer, config, self._rotary.of_layer(index, rotations), updates)
            attended = attention(index, query, key, value).reshape(hidden.shape[0], -1)
            attended = project_output(attended, layer, updates)
            hidden = hidden + _normed(attended, layer.attention_out_norm, eps)
            output = gated_mlp(rms_norm(hidden, layer.post_norm, eps), layer, config.hidden_act, updates)
            hidden = hidden + _normed(output, layer.mlp_out_norm, eps)
        if states is not None:
            states.out.copy_(rms_norm(hidden[states.rows], self._norm, eps))
        last = rms_norm(hidden[logits_rows], self._norm, eps)
        logits = F.linear(last, self._head).float()
        cap = config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if weight is None else rms_norm(x, weight, eps)
