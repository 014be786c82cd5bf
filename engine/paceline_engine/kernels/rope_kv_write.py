"""Rotary positions of queries and keys, and the write of keys and values to the paged KV, in one launch.

The input is the fused query-key-value matrix; a program takes one head of some tokens: what its head is decides what
happens to it. Su et al., arXiv 2104.09864, in the half-split layout: dimension i pairs with i + head_dim / 2. In an
8-bit pool each vector has a scale of its own, so a write never touches what is there already.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline_engine.kernels.rms_norm import rms_norm_reference

# Added and taken away again, it rounds a float32 of up to 2^22 to the nearest integer, ties to even.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _load_weight(q_norm_ptr, k_norm_ptr, is_query, places, mask):
    query = tl.load(q_norm_ptr + places, mask=mask, other=0.0)
    key = tl.load(k_norm_ptr + places, mask=mask, other=0.0)
    return tl.where(is_query, query, key).to(tl.float32)[None, :]


@triton.jit
def _quantize(first, second, SMALL_INTEGERS: tl.constexpr):
    """Two halves of vectors in units of their scales, and the scales [vectors]."""
    largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    scale = largest / (127.0 if SMALL_INTEGERS else 448.0)
    unit = tl.where(scale > 0.0, scale, 1.0)[:, None]
    # A vector that isn't finite must not come out as numbers: 8 bits may not hold NaN, the scale does.
    broken = tl.sum(first * 0.0 + second * 0.0, axis=1)
    first, second = first / unit, second / unit
    if SMALL_INTEGERS:
        first, second = (first + _ROUND) - _ROUND, (second + _ROUND) - _ROUND
    return first, second, scale + broken


@triton.jit
def _write(pool_ptr, scale_ptr, first, second, vectors, is_written, in_half, HALF: tl.constexpr):
    """Store vectors at their places in the pool, quantized where it has scales."""
    if scale_ptr is not None:
        first, second, scale = _quantize(first, second, pool_ptr.dtype.element_ty == tl.int8)
        tl.store(scale_ptr + vectors, scale, mask=is_written)
    places = pool_ptr + vectors[:, None] * (2 * HALF) + tl.arange(0, first.shape[1])
    mask = is_written[:, None] & in_half[None, :]
    tl.store(places, first.to(pool_ptr.dtype.element_ty), mask=mask)
    tl.store(places + HALF, second.to(pool_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def rope_kv_write_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    num_tokens,
    num_heads,
    num_kv_heads,
    qkv_stride,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """See `rope_kv_write`. Grid: (blocks of tokens, query heads, then key heads, then value heads)."""
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    halves = tl.arange(0, HALF_PADDED)
    is_token, in_half = tokens < num_tokens, halves < HALF
    mask = is_token[:, None] & in_half[None, :]
    places = qkv_ptr + tokens[:, None] * qkv_stride + head * (2 * HALF) + halves
    first = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=mask, other=0.0).to(tl.float32)
    if head < num_heads + num_kv_heads:
        if q_norm_ptr is not None:
            squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
            factor = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
            first *= factor * _load_weight(q_norm_ptr, k_norm_ptr, head < num_heads, halves, in_half)
            second *= factor * _load_weight(q_norm_ptr, k_norm_ptr, head < num_heads, halves + HALF, in_half)
        if cos_ptr is not None:
            positions = tl.load(positions_ptr + tokens, mask=is_token, other=0).to(tl.int64)
            cos = tl.load(cos_ptr + positions[:, None] * HALF + halves, mask=mask, other=0.0)
            sin = tl.load(sin_ptr + positions[:, None] * HALF + halves, mask=mask, other=0.0)
            first, second = first * cos - second * sin, second * cos + first * sin
        tl.store(places, first.to(qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(places + HALF, second.to(qkv_ptr.dtype.element_ty), mask=mask)
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=-1)
    kv_head = (head - num_heads) % num_kv_heads
    vectors = slots * num_kv_heads + kv_head
    if head >= num_heads + num_kv_heads:
        _write(value_ptr, value_scale_ptr, first, second, vectors, slots >= 0, in_half, HALF)
    elif head >= num_heads:
        _write(key_ptr, key_scale_ptr, first, second, vectors, slots >= 0, in_half, HALF)


def choose_block(num_tokens: int) -> tuple[int, int]:
    """(tokens, warps) of a program: small ones where there are few tokens to spread over the device."""
    return (4, 1) if num_tokens <= 256 else (16, 4)


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Norm and rotate queries and keys in place, and write keys and values to the pool.

    qkv [tokens, (heads + 2 * kv_heads) * head_dim], rows any stride apart; positions [tokens]; slots [tokens] int64:
    block * block_size + place in it, negative for padding, which writes nothing; key, value
    [blocks, block_size, kv_heads, head_dim] of any float type, or int8 or float8_e4m3fn (from compute capability 8.9
    on) with scales [blocks, block_size, kv_heads] in float32; cos, sin [positions, head_dim / 2] in float32, None in
    layers without positions; q_norm, k_norm [head_dim]: weights of the heads' RMSNorm before the rotation.
    """
    num_tokens, num_kv_heads, half = qkv.shape[0], key.shape[2], key.shape[3] // 2
    num_heads = qkv.shape[1] // key.shape[3] - 2 * num_kv_heads
    if num_tokens == 0:
        return
    assert num_heads > 0
    assert qkv.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (key, value, slots, positions))
    assert slots.dtype == torch.int64
    block_t, num_warps = choose_block(num_tokens)
    rope_kv_write_kernel[(triton.cdiv(num_tokens, block_t), num_heads + 2 * num_kv_heads)](
        *(qkv, cos, sin, positions, slots, key, value, key_scale, value_scale, q_norm, k_norm),
        *(eps, num_tokens, num_heads, num_kv_heads, qkv.stride(0)),
        HALF=half,
        HALF_PADDED=triton.next_power_of_2(half),
        BLOCK_T=block_t,
        num_warps=num_warps,
    )


def quantize_vectors(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., head_dim] in 8 bits, and the vectors' scales [...]; a vector that isn't finite has the scale NaN."""
    scale = x.float().abs().amax(dim=-1) / (127.0 if dtype == torch.int8 else 448.0)
    units = x.float() / scale.where(scale > 0, 1.0)[..., None]
    finite = x.isfinite().all(dim=-1)
    units = units.where(finite[..., None], 0.0)
    return (units.round() if dtype == torch.int8 else units).to(dtype), scale.where(finite, torch.nan)


def rope_kv_write_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """What `rope_kv_write` does, in torch."""
    num_kv_heads, head_dim = key.shape[2:]
    heads = qkv.float().unflatten(1, (-1, head_dim))
    query, new_key, new_value = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        query, new_key = rms_norm_reference(query, q_norm, eps), rms_norm_reference(new_key, k_norm, eps)
    both = torch.cat((query, new_key), dim=1)
    if cos is not None and sin is not None:
        (first, second), cosines, sines = both.chunk(2, dim=-1), cos[positions, None], sin[positions, None]
        both = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    qkv[:, : both.shape[1] * head_dim] = both.flatten(1).to(qkv.dtype)
    written = slots >= 0
    new_key = both[:, query.shape[1] :]
    for pool, scales, new in ((key, key_scale, new_key), (value, value_scale, new_value)):
        if scales is not None:
            new, scale = quantize_vectors(new, pool.dtype)
            scales.flatten(0, 1)[slots[written]] = scale[written]
        pool.flatten(0, 1)[slots[written]] = new[written].to(pool.dtype)
