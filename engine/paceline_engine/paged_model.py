"""What a step needs of a decoder: torch's, the compiled one, or a part of either that drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline_engine.backends.cpu_attention import CpuAttention
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.decoder import HiddenRows
from paceline_engine.models.lora import AdapterTable, LayerDeltas


class PagedModel(Protocol):
    """What a step needs of a decoder, torch's or the compiled one; shapes as in `models.decoder.Decoder.forward`."""

    @property
    def config(self) -> ModelConfig:
        """The model's geometry."""
        ...

    @property
    def adapters(self) -> AdapterTable:
        """The LoRA adapters that requests can name."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_rows: torch.Tensor,
        attention: CpuAttention,
        deltas: Sequence[LayerDeltas] | None = None,
        states: HiddenRows | None = None,
    ) -> torch.Tensor:
        """Logits [rows, vocab] in float32."""
        ...
