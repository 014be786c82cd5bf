"""Torch's decoder over paged KV in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline_engine.backends.cpu_attention import CpuAttention
from paceline_engine.batch import Batch
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.decoder import Decoder, HiddenRows
from paceline_engine.models.lora import AdapterTable
from paceline_engine.paged_kv import PagedKV


class TorchModel:
    """A `PagedModel` of `models.decoder.Decoder`. adapters: None is the decoder's own."""

    def __init__(self, decoder: Decoder, adapters: AdapterTable | None = None) -> None:
        self._decoder = decoder
        self._adapters = decoder.adapters if adapters is None else adapters

    @property
    def config(self) -> ModelConfig:
        """The model's geometry."""
        return self._decoder.config

    @property
    def adapters(self) -> AdapterTable:
        """What requests' adapters are looked up in."""
        return self._adapters

    def first_layers(self, count: int) -> TorchModel:
        """This model without its later layers, sharing the weights: a drafter for it."""
        return TorchModel(self._decoder.first_layers(count), self._adapters)

    def step(
        self, batch: Batch, kv: PagedKV, adapters: Sequence[str | None] = (), states: HiddenRows | None = None
    ) -> torch.Tensor:
        """See `PagedModel.step`."""
        deltas = self.adapters.deltas(adapters, [item.num_tokens for item in batch.items]) if adapters else None
        return self._decoder.forward(
            batch.token_ids, batch.positions, batch.logits_rows, CpuAttention(kv, batch), deltas, states
        )
