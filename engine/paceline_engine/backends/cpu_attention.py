"""Attention over paged KV in host memory, with torch's CPU kernels.

Query heads that share a KV head are packed as rows of one query, so grouped-query attention repeats no KV. Positions
outside a sequence's context may hold anything, NaN included: they are zeroed after the gather, before any arithmetic.
Scale, sliding window and soft cap are each layer's own (`models.config.AttentionLayer`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline_engine.batch import Batch, DecodeGroup, PrefillSequence
from paceline_engine.models.config import AttentionLayer
from paceline_engine.paged_kv import PagedKV


class CpuAttention:
    """Attention of one batch; a callable for `Decoder.forward`. Masks are made once a batch, when first asked for."""

    def __init__(self, kv: PagedKV, batch: Batch) -> None:
        self.kv = kv
        self.batch = batch
        self._masks: dict[int | None, tuple[list[torch.Tensor], list[torch.Tensor | None]]] = {}

    def _masks_of(self, window: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Masks of the decode groups and of the prefills; None where plain causality is all there is."""
        dtype = self.kv.tensor.dtype
        decodes = [group.mask if window is None else _window_mask(group.mask, window) for group in self.batch.decodes]
        prefills = [
            None if item.start == 0 and (window is None or item.context_len <= window) else _mask(item, window, dtype)
            for item in self.batch.prefills
        ]
        return decodes, prefills

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write the batch's KV, then attend; shapes as in `models.decoder.Attention`."""
        self.kv.write(layer, self.batch.slots, key, value)
        output = torch.empty(query.shape, dtype=query.dtype)
        window = self.kv.layers[layer].window
        if window not in self._masks:
            self._masks[window] = self._masks_of(window)
        decode_masks, prefill_masks = self._masks[window]
        for group, mask in zip(self.batch.decodes, decode_masks, strict=True):
            output[group.begin : group.end] = self._decode(layer, query[group.begin : group.end], group, mask)
        for item, mask in zip(self.batch.prefills, prefill_masks, strict=True):
            rows = slice(item.begin, item.end)
            if item.start == 0:
                # The chunk is its own whole context.
                output[rows] = _attend(query[rows], key[rows], value[rows], self.kv.layers[layer], mask)
            else:
                output[rows] = self._prefill(layer, query[rows], item, mask)
        return output

    def _decode(self, layer: int, query: torch.Tensor, group: DecodeGroup, mask: torch.Tensor) -> torch.Tensor:
        num_rows, num_heads, head_dim = query.shape
        num_tokens = group.num_tokens
        key, value = self.kv.gather(layer, group.block_ids.flatten())
        key.index_fill_(0, group.padding, 0.0)
        value.index_fill_(0, group.padding, 0.0)
        kv_heads = key.shape[1]
        sharing = num_heads // kv_heads
        shape = (num_rows // num_tokens, -1, kv_heads, head_dim)
        # Heads that share KV, and then a share's tokens, are rows of one query.
        packed = query.reshape(-1, num_tokens, kv_heads, sharing, head_dim).permute(0, 2, 3, 1, 4)
        attended = _scaled_dot_product(
            packed.reshape(-1, kv_heads, sharing * num_tokens, head_dim),
            key.view(shape).transpose(1, 2),
            value.view(shape).transpose(1, 2),
            self.kv.layers[layer],
            mask if num_tokens == 1 else mask.repeat(1, 1, sharing, 1),
        )
        unpacked = attended.reshape(-1, kv_heads, sharing, num_tokens, head_dim).permute(0, 3, 1, 2, 4)
        return unpacked.reshape(num_rows, num_heads, head_dim)

    def _prefill(
        self, layer: int, query: torch.Tensor, item: PrefillSequence, mask: torch.Tensor | None
    ) -> torch.Tensor:
        key, value = self.kv.gather(layer, item.block_ids)
        return _attend(query, key[: item.context_len], value[: item.context_len], self.kv.layers[layer], mask)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: AttentionLayer,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence: query [n, heads, head_dim] over key and value [context, kv_heads, head_dim]."""
    attended = _scaled_dot_product(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        layer,
        mask,
    )
    return attended[0].transpose(0, 1)


def _scaled_dot_product(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: AttentionLayer, mask: torch.Tensor | None
) -> torch.Tensor:
    """softmax(cap(scale * q.k) + mask) v over [batch, heads, tokens, head_dim]; without a mask it is causal."""
    if layer.softcap is None:
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=layer.scale, enable_gqa=gqa
        )
    # Queries that share a KV head stand side by side as one longer query.
    batch, heads, tokens, head_dim = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1] * tokens, head_dim)
    scores = torch.matmul(grouped, key.transpose(-1, -2)) * layer.scale
    scores = torch.tanh(scores / layer.softcap) * layer.softcap
    scores = scores.view(batch, heads, tokens, -1)
    if mask is None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    else:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights.view(*grouped.shape[:3], -1), value).view(query.shape)


def _window_mask(mask: torch.Tensor, window: int) -> torch.Tensor:
    """A decode group's mask [sequences, 1, tokens, positions] that also hides what lies before each token's window."""
    positions = torch.arange(mask.shape[-1])
    lengths = (mask == 0).sum(dim=-1, keepdim=True)
    return mask.masked_fill(positions < lengths - window, -torch.inf)


def _mask(item: PrefillSequence, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[chunk, context]: 0 where the key's position is at most the query's and in its window, -inf elsewhere."""
    queries = torch.arange(item.start, item.context_len)[:, None]
    keys = torch.arange(item.context_len)[None, :]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
