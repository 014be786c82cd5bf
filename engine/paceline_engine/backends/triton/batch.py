"""The index tensors of one step, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """A flat batch of tokens: prefill chunks, decodes and verifications in any order.

    token_ids, positions [tokens] int64; slots [tokens] int64: flat KV slots, negative for padding; begins
    [sequences + 1] int32: rows of sequence s are begins[s] to begins[s + 1]; context_lens [sequences] int32 include
    them; block_tables [sequences, blocks] int32, rows any stride apart; logits_rows [rows] int64: tokens whose logits
    are wanted. max_query_len: of the longest share of rows; num_segments: parts that attention splits the keys into.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    begins: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_rows: torch.Tensor
    max_query_len: int
    num_segments: int
