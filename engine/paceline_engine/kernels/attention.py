"""Attention of a flat batch over paged KV: prefill chunks, decodes and verifications in one launch.

A program takes a block of queries of one sequence, with all query heads of one KV head as rows (GQA packing), and one
segment of the keys. With several segments (split-KV, for few and long decodes) partial results are merged by their
log-sum-exp (Dao et al., "Flash-Decoding"). Softmax is the online one of Milakov and Gimelshein, arXiv 1805.02867.
Positions outside a sequence's context may hold anything, NaN included: they are never read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline_engine.kernels.common import dot_dtype, dot_precision

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sequence_of(block, begins_ptr, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence whose query blocks include `block`: the last one that begins at or before it.

    Sequence s begins at block begins[s] // BLOCK_Q + s, so that each may round up.
    """
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        first = tl.load(begins_ptr + middle) // BLOCK_Q + middle
        if first <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _capped(scores, softcap):
    """softcap * tanh(scores / softcap), by exponentials of negative numbers only."""
    scaled = scores / softcap
    fading = tl.exp(-2.0 * tl.abs(scaled))
    magnitude = (1.0 - fading) / (1.0 + fading)
    return softcap * tl.where(scaled < 0.0, -magnitude, magnitude)


@triton.jit
def _tiles(context_len, first_position, last_key, window, segment, TILE: tl.constexpr, NUM_SEGMENTS: tl.constexpr):
    """[first, end) of the tiles of keys that a block of queries sees in a segment."""
    first = 0
    if window is not None:
        first = tl.maximum(0, first_position - window + 1) // TILE
    end = tl.cdiv(last_key, TILE)
    if NUM_SEGMENTS > 1:
        tiles_a_segment = tl.cdiv(tl.cdiv(context_len, TILE), NUM_SEGMENTS)
        first = tl.maximum(first, segment * tiles_a_segment)
        end = tl.minimum(end, (segment + 1) * tiles_a_segment)
    return first, end


@triton.jit
def _scores(query, key, key_scale, positions, keys, scale, softcap, window, PRECISION: tl.constexpr):
    """Exponents of 2 of the softmax [queries, keys]; -inf where a query doesn't see a key."""
    scores = tl.dot(query, key, input_precision=PRECISION) * scale
    if key_scale is not None:
        scores *= key_scale[None, :]
    if softcap is not None:
        scores = _capped(scores, softcap)
    visible = keys[None, :] <= positions[:, None]
    if window is not None:
        visible &= keys[None, :] > positions[:, None] - window
    return tl.where(visible, scores * LOG2_E, float("-inf"))


@triton.jit
def _load_scale(scale_ptr, slots, is_key):
    """Scales of the keys' vectors; None where these aren't quantized."""
    scale = None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + slots, mask=is_key, other=0.0)
    return scale


@triton.jit
def _softmax_step(scores, highest, total):
    """One tile of the online softmax: (highest exponent, sum of weights, fading of earlier sums, weights)."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    # A row that has seen no key yet: exp2(-inf - -inf) would be NaN.
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(highest - shift)
    return new_highest, total * fade + tl.sum(weights, axis=1), fade, weights


@triton.jit
def _attend(
    query,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    first,
    end,
    last_key,
    positions,
    scale,
    softcap,
    window,
    KV_BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax of queries [rows, dims] over tiles [first, end): (highest exponents, sums of weights, sums)."""
    dims = tl.arange(0, query.shape[1])
    in_head = dims < HEAD_DIM
    highest = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    summed = tl.zeros([query.shape[0], query.shape[1]], tl.float32)
    # Ids are loaded a tile ahead where every query is short and memory is what is waited for: were a tile's ids loaded
    # with it, the compiler would buffer ids and not keys and values. Elsewhere the registers for it aren't there.
    IS_AHEAD: tl.constexpr = query.shape[0] <= 16
    ids = tl.zeros([TILE], tl.int32)
    if IS_AHEAD:
        keys = first * TILE + tl.arange(0, TILE)
        ids = tl.load(table_ptr + keys // KV_BLOCK_SIZE, mask=keys < last_key, other=0)
    for tile in range(first, end):
        keys = tile * TILE + tl.arange(0, TILE)
        is_key = keys < last_key
        if not IS_AHEAD:
            ids = tl.load(table_ptr + keys // KV_BLOCK_SIZE, mask=is_key, other=0)
        # 64 bits: ids reach past 2^31 elements once multiplied.
        slots = (ids.to(tl.int64) * KV_BLOCK_SIZE + keys % KV_BLOCK_SIZE) * tl.num_programs(1) + tl.program_id(1)
        if IS_AHEAD:
            ids = tl.load(table_ptr + (keys + TILE) // KV_BLOCK_SIZE, mask=keys + TILE < last_key, other=0)
        vectors = slots[:, None] * HEAD_DIM + dims
        is_loaded = is_key[:, None] & in_head
        key = tl.load(key_ptr + vectors, mask=is_loaded, other=0.0).to(query.dtype)
        value = tl.load(value_ptr + vectors, mask=is_loaded, other=0.0).to(query.dtype)
        key_scale = _load_scale(key_scale_ptr, slots, is_key)
        scores = _scores(query, tl.trans(key), key_scale, positions, keys, scale, softcap, window, PRECISION)
        highest, total, fade, weights = _softmax_step(scores, highest, total)
        value_scale = _load_scale(value_scale_ptr, slots, is_key)
        if value_scale is not None:
            weights *= value_scale[None, :]
        summed = summed * fade[:, None] + tl.dot(weights.to(query.dtype), value, input_precision=PRECISION)
    return highest, total, summed


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "tables_stride"])
def paged_attention_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    tables_ptr,
    begins_ptr,
    context_lens_ptr,
    scale,
    softcap,
    window,
    num_sequences,
    num_tokens,
    query_stride,
    tables_stride,
    KV_BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """See `paged_attention`. Grid: (query blocks, KV heads, segments)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head, segment = tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    sequence = _sequence_of(tl.program_id(0), begins_ptr, num_sequences, BLOCK_Q)
    begin = tl.load(begins_ptr + sequence)
    num_queries = tl.load(begins_ptr + sequence + 1) - begin
    first_query = (tl.program_id(0) - begin // BLOCK_Q - sequence) * BLOCK_Q
    if first_query >= num_queries:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    first_position = context_len - num_queries + first_query
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM_PADDED)
    queries = first_query + rows // GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (queries < num_queries)
    tokens = (begin + queries).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    in_head = dims < HEAD_DIM
    places = tokens * query_stride + heads * HEAD_DIM
    query = tl.load(query_ptr + places[:, None] + dims, mask=is_row[:, None] & in_head, other=0.0).to(DOT)
    last_key = tl.minimum(context_len, first_position + BLOCK_Q)
    first, end = _tiles(context_len, first_position, last_key, window, segment, TILE, NUM_SEGMENTS)
    table_ptr = tables_ptr + sequence.to(tl.int64) * tables_stride
    highest, total, summed = _attend(
        *(query, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, first, end, last_key),
        *(first_position + rows // GROUP, scale, softcap, window, KV_BLOCK_SIZE, HEAD_DIM, TILE, PRECISION),
    )
    result = summed / tl.where(total > 0.0, total, 1.0)[:, None]
    rows_out = tokens * (num_kv_heads * GROUP) + heads
    if NUM_SEGMENTS > 1:
        rows_out += segment.to(tl.int64) * num_tokens * (num_kv_heads * GROUP)
        lse = tl.where(total > 0.0, highest + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + rows_out, lse, mask=is_row)
        tl.store(partial_ptr + rows_out[:, None] * HEAD_DIM + dims, result, mask=is_row[:, None] & in_head)
    else:
        result = result.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows_out[:, None] * HEAD_DIM + dims, result, mask=is_row[:, None] & in_head)


@triton.jit(do_not_specialize=["num_tokens"])
def merge_segments_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    num_tokens,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    SEGMENTS_PADDED: tl.constexpr,
):
    """Softmax-weighted mean of the segments' results. Grid: (tokens, heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    segments = tl.arange(0, SEGMENTS_PADDED)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    is_segment = segments < NUM_SEGMENTS
    places = (segments.to(tl.int64) * num_tokens + token) * num_heads + head
    lse = tl.load(lse_ptr + places, mask=is_segment, other=float("-inf"))
    highest = tl.max(lse, axis=0)
    # A token without context, as padding has: exp2(-inf - -inf) would be NaN.
    weights = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest))
    partial = tl.load(
        partial_ptr + places[:, None] * HEAD_DIM + dims[None, :],
        mask=(is_segment & (weights > 0.0))[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, axis=0)
    result = tl.sum(partial * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    place = (token * num_heads + head) * HEAD_DIM
    tl.store(out_ptr + place + dims, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiling:
    """block_m: packed query rows of a program; tile: keys that it looks at together.

    num_stages: tiles in flight, the one that is looked at included; of larger row blocks one less.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


def choose_tiling(max_query_len: int, group: int, head_dim: int, itemsize: int = 2) -> AttentionTiling:
    """Small row blocks where every query is short, as in decode and verification, else larger ones.

    itemsize: bytes of a query's number. Float32 is multiplied without tensor cores, out of registers: small tiles fit.
    """
    rows = max(16, triton.next_power_of_2(max_query_len * group))
    if itemsize == 4:
        block_m = max(min(rows, 32), triton.next_power_of_2(group))
        return AttentionTiling(block_m=block_m, tile=16, num_warps=4 if block_m == 16 else 8, num_stages=1)
    if rows <= 16:
        return AttentionTiling(block_m=16, tile=64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)
    block_m = min(rows, 128 if head_dim <= 128 else 64)
    block_m = max(block_m, triton.next_power_of_2(group))
    return AttentionTiling(block_m=block_m, tile=64 if head_dim <= 128 else 32, num_warps=8, num_stages=3)


def choose_num_segments(num_sequences: int, num_kv_heads: int, max_context_len: int, num_processors: int) -> int:
    """Segments that give each processor of the device work when every query is one token; 1 where there is enough."""
    programs = num_sequences * num_kv_heads
    if programs == 0 or programs >= 2 * num_processors:
        return 1
    wanted = triton.next_power_of_2(triton.cdiv(2 * num_processors, programs))
    # A segment shorter than 256 tokens costs more to merge than it saves. Of powers of two few kernels are compiled.
    longest = 1 << max(0, (max_context_len // 256).bit_length() - 1)
    return min(wanted, 64, longest)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_tables: torch.Tensor,
    begins: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    num_segments: int = 1,
    tiling: AttentionTiling | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [tokens, heads, head_dim] of each query over its own context.

    query [tokens, heads, head_dim], tokens any stride apart; key, value [blocks, block_size, kv_heads, head_dim] of the
    query's dtype, or of 8 bits with scales [blocks, block_size, kv_heads] in float32; block_tables [sequences, blocks]
    int32; begins [sequences + 1] int32: rows of sequence s are begins[s] to begins[s + 1]; context_lens [sequences]
    int32 include them, but for one of 0, whose row is padding. window: how many latest positions a token sees;
    num_segments: parts the keys are split into, more than 1 pays for few decodes of long contexts.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    group = num_heads // num_kv_heads
    out = query.new_empty(query.shape) if out is None else out
    if num_tokens == 0:
        return out
    assert query.stride(2) == 1
    assert query.stride(1) == head_dim
    assert all(tensor.is_contiguous() for tensor in (key, value, out))
    tiling = tiling or choose_tiling(max_query_len, group, head_dim, query.itemsize)
    block_q = tiling.block_m // group
    assert block_q >= 1, f"{group} heads share a KV head, more than the {tiling.block_m} rows of a program"
    partial = lse = None
    if num_segments > 1:
        partial = query.new_empty((num_segments, num_tokens, num_heads, head_dim), dtype=torch.float32)
        lse = query.new_empty((num_segments, num_tokens, num_heads), dtype=torch.float32)
    # An upper bound of the number of query blocks that needs no look at the device's data.
    grid = (num_tokens // block_q + begins.shape[0] - 1, num_kv_heads, num_segments)
    heads = {"HEAD_DIM": head_dim, "HEAD_DIM_PADDED": max(16, triton.next_power_of_2(head_dim))}
    paged_attention_kernel[grid](
        *(out, partial, lse, query, key, value, key_scale, value_scale, block_tables, begins, context_lens),
        *(scale, softcap, window, begins.shape[0] - 1, num_tokens, query.stride(0), block_tables.stride(0)),
        **heads,
        KV_BLOCK_SIZE=key.shape[1],
        GROUP=group,
        BLOCK_M=tiling.block_m,
        TILE=tiling.tile,
        NUM_SEGMENTS=num_segments,
        DOT=dot_dtype(query.dtype),
        PRECISION=dot_precision(query.dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_segments > 1:
        merge_segments_kernel[(num_tokens, num_heads)](
            *(out, partial, lse, num_tokens, num_heads),
            **heads,
            NUM_SEGMENTS=num_segments,
            SEGMENTS_PADDED=triton.next_power_of_2(num_segments),
        )
    return out


def paged_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_tables: torch.Tensor,
    begins: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `paged_attention` computes, one sequence at a time, in float32."""
    out = torch.empty_like(query)
    num_heads = query.shape[1]
    for sequence, context_len in enumerate(context_lens.tolist()):
        begin, end = begins[sequence : sequence + 2].tolist()
        if begin == end:
            continue
        places = torch.arange(context_len, device=query.device)
        ids, slots = block_tables[sequence, places // key.shape[1]].long(), places % key.shape[1]
        keys, values = key[ids, slots].float(), value[ids, slots].float()
        if key_scale is not None and value_scale is not None:
            keys, values = keys * key_scale[ids, slots, :, None], values * value_scale[ids, slots, :, None]
        shared = num_heads // key.shape[2]
        keys, values = keys.repeat_interleave(shared, dim=1), values.repeat_interleave(shared, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(context_len - (end - begin), context_len, device=query.device)
        hidden = places[None, :] > positions[:, None]
        if window is not None:
            hidden |= places[None, :] <= positions[:, None] - window
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out
