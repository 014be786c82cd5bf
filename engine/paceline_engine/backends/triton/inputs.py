"""A step's index arrays on the host, as they go to the device, or to every device of a model that is spread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from paceline_engine.backends.triton.batch import DeviceBatch
from paceline_engine.backends.triton.staging import Array, upload
from paceline_engine.batch import Batch
from paceline_engine.core.outputs import UNKNOWN
from paceline_engine.kernels.attention import choose_num_segments


class LatestTokens(Protocol):
    """Each running request's latest token, on the device before it is on the host."""

    last_tokens: torch.Tensor

    def slot(self, request_id: str) -> int:
        """Where in `last_tokens` a request is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """arrays: DeviceBatch's tensors by name; its numbers beside them. is_decode: one token of each, all wanted."""

    arrays: Mapping[str, Array]
    max_query_len: int
    num_segments: int
    is_decode: bool

    def on(self, device: torch.device) -> DeviceBatch:
        """The same on a device, in one copy. Tokens that aren't known yet are negative still."""
        return DeviceBatch(
            **upload(self.arrays, device), max_query_len=self.max_query_len, num_segments=self.num_segments
        )


def step_inputs(batch: Batch, num_kv_heads: int, num_processors: int) -> StepInputs:
    """Arrays of a batch for a device of num_processors multiprocessors that holds num_kv_heads of each layer."""
    counts = [item.num_tokens for item in batch.items]
    context_lens = np.array([item.end for item in batch.items], dtype=np.int32)
    longest = max(counts)
    segments = 1
    if longest == 1:
        segments = choose_num_segments(len(counts), num_kv_heads, int(context_lens.max()), num_processors)
    return StepInputs(
        arrays={
            "token_ids": batch.token_ids.numpy(),
            "positions": batch.positions.numpy(),
            "slots": batch.slots.numpy(),
            "logits_rows": batch.logits_rows.numpy(),
            "begins": batch.sequence_begins.numpy().astype(np.int32),
            "context_lens": context_lens,
            "block_tables": batch.block_tables.numpy().astype(np.int32),
        },
        max_query_len=longest,
        num_segments=segments,
        is_decode=longest == 1 and len(batch.samplers) == len(counts) and not batch.scored and not batch.embedders,
    )


def unknown_slots(batch: Batch, latest: LatestTokens) -> Array | None:
    """[tokens] int64: for each token that only the device knows, where; None if all are known."""
    token_ids = batch.token_ids.numpy()
    if not (token_ids == UNKNOWN).any():
        return None
    slots = np.zeros(len(token_ids), dtype=np.int64)
    begins = batch.sequence_begins.numpy()
    for at, item in enumerate(batch.items):
        if item.token_ids[-1] == UNKNOWN:
            slots[begins[at + 1] - 1] = latest.slot(item.request_id)
    return slots


def filled_in(token_ids: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """token_ids [tokens] with those that are unknown from last_tokens at `slots` [tokens]."""
    return torch.where(token_ids == UNKNOWN, last_tokens.index_select(0, slots), token_ids)
