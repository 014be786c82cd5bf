"""Paged KV in host memory and attention over it with torch's CPU kernels.

Query heads that share a KV head are packed as rows of one query, so grouped-query attention repeats no KV. Positions
outside a sequence's context may hold anything, NaN included: they are zeroed after the gather, before any arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline_engine.batch import Batch, DecodeGroup, PrefillSequence
from paceline_engine.models.config import ModelConfig


class PagedKV:
    """The block pool's memory: one tensor [layers, 2 (key, value), blocks, block_size, kv_heads, head_dim]."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tensor = torch.zeros(
            (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim), dtype=dtype
        )
        self._slots = self.tensor.view(config.num_layers, 2, num_blocks * block_size, -1)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] at flat slots [tokens]."""
        self._slots[layer, 0].index_copy_(0, slots, key.flatten(1))
        self._slots[layer, 1].index_copy_(0, slots, value.flatten(1))

    def gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of blocks [n], each a copy [n * block_size, kv_heads, head_dim]."""
        key, value = self.tensor[layer]
        return key.index_select(0, block_ids).flatten(0, 1), value.index_select(0, block_ids).flatten(0, 1)


class CpuAttention:
    """Attention of one batch; a callable for `Decoder.forward`."""

    def __init__(self, kv: PagedKV, batch: Batch) -> None:
        self._kv = kv
        self._batch = batch
        self._prefill_masks = [
            _causal_mask(item, kv.tensor.dtype) if item.start > 0 else None for item in batch.prefills
        ]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write the batch's KV, then attend; shapes as in `models.decoder.Attention`."""
        self._kv.write(layer, self._batch.slots, key, value)
        output = torch.empty(query.shape, dtype=query.dtype)
        for group in self._batch.decodes:
            output[group.begin : group.end] = self._decode(layer, query[group.begin : group.end], group)
        for item, mask in zip(self._batch.prefills, self._prefill_masks, strict=True):
            rows = slice(item.begin, item.end)
            if mask is None:
                # The chunk is its own whole context.
                output[rows] = _attend_fresh(query[rows], key[rows], value[rows])
            else:
                output[rows] = self._prefill(layer, query[rows], item, mask)
        return output

    def _decode(self, layer: int, query: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        num_rows, num_heads, head_dim = query.shape
        key, value = self._kv.gather(layer, group.block_ids.flatten())
        key.index_fill_(0, group.padding, 0.0)
        value.index_fill_(0, group.padding, 0.0)
        kv_heads = key.shape[1]
        shape = (num_rows, -1, kv_heads, head_dim)
        attended = F.scaled_dot_product_attention(
            query.reshape(num_rows, kv_heads, num_heads // kv_heads, head_dim),
            key.view(shape).transpose(1, 2),
            value.view(shape).transpose(1, 2),
            attn_mask=group.mask,
        )
        return attended.reshape(num_rows, num_heads, head_dim)

    def _prefill(self, layer: int, query: torch.Tensor, item: PrefillSequence, mask: torch.Tensor) -> torch.Tensor:
        key, value = self._kv.gather(layer, item.block_ids)
        return _attend(query, key[: item.context_len], value[: item.context_len], mask=mask)


def _attend_fresh(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return _attend(query, key, value, is_causal=True)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """One sequence: query [n, heads, head_dim] over key and value [context, kv_heads, head_dim]."""
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _causal_mask(item: PrefillSequence, dtype: torch.dtype) -> torch.Tensor:
    """[chunk, context]: 0 where the key's position is at most the query's, -inf elsewhere."""
    queries = torch.arange(item.start, item.context_len)
    keys = torch.arange(item.context_len)
    mask = torch.zeros((len(queries), len(keys)), dtype=dtype)
    return mask.masked_fill_(keys[None, :] > queries[:, None], -torch.inf)
