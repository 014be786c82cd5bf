"""What a step needs of a model on a device: torch's decoder, a compiled one, or a part of either that drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from paceline_engine.batch import Batch
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.decoder import HiddenRows
from paceline_engine.paged_kv import PagedKV


class Adapters(Protocol):
    """LoRA adapters that requests can name."""

    def __contains__(self, name: str) -> bool: ...

    def load(self, name: str, path: Path) -> str:
        """Load the adapter in folder `path`, or replace it; its digest. Raises LoraError, and then nothing changes."""
        ...

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises LoraError if it isn't loaded."""
        ...


class PagedModel(Protocol):
    """A model whose forward pass reads and writes paged KV."""

    @property
    def config(self) -> ModelConfig:
        """The model's geometry."""
        ...

    @property
    def adapters(self) -> Adapters:
        """What requests' adapters are looked up in."""
        ...

    def step(
        self,
        batch: Batch,
        kv: PagedKV,
        adapters: Sequence[str | None] = (),
        states: HiddenRows | None = None,
    ) -> torch.Tensor:
        """Logits [rows, vocab] in float32 of batch.logits_rows, on the model's device.

        adapters: of each of batch.items; none is the base model for all. states: hidden states wanted as well.
        """
        ...
