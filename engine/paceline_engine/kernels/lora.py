"""LoRA updates of a batch in which rows belong to different adapters, or to none (arXiv 2310.18547, 2311.03285).

Rows are grouped by adapter, whatever their place in the batch: a block of rows of one adapter is multiplied with that
adapter's A (shrink), then with its B (expand). Rows without an adapter aren't touched. Adapters for query, key and
value share one launch: they are slices of the output, each with factors of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl

from paceline_engine.kernels.common import dot_dtype, dot_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedAdapters:
    """All adapters of one matrix, ranks filled up with zeros to a common power of 2, and zeros for a missing slice.

    a [adapters, slices, rank, in]; b [adapters, out, rank] with the scale in it; slice_begins [slices + 1] int32:
    output columns of slice s are slice_begins[s] to slice_begins[s + 1]; longest_slice: of these, in columns;
    alignment: power of 2 that divides all of these.
    """

    a: torch.Tensor
    b: torch.Tensor
    slice_begins: torch.Tensor
    longest_slice: int
    alignment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroups:
    """rows [tokens] int64: rows of the batch, adapter by adapter; begins [adapters + 1] int32: where each begins."""

    rows: torch.Tensor
    begins: torch.Tensor


def group_rows(adapter_of_row: torch.Tensor, num_adapters: int) -> RowGroups:
    """Groups of a batch whose rows belong to adapter_of_row [tokens], -1 for none; doesn't wait for the device."""
    ordered, rows = adapter_of_row.sort(stable=True)
    adapters = torch.arange(num_adapters + 1, dtype=ordered.dtype, device=ordered.device)
    return RowGroups(rows=rows, begins=torch.searchsorted(ordered, adapters, out_int32=True))


def stack_adapters(
    adapters: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor] | None]], slice_sizes: Sequence[int]
) -> StackedAdapters:
    """Adapters, each with a pair (a [rank, in], b [out of slice, rank]) or None for every slice of slice_sizes."""
    pairs = [pair for adapter in adapters for pair in adapter if pair is not None]
    rank = max(16, triton.next_power_of_2(max(a.shape[0] for a, _ in pairs)))
    first, num_slices = pairs[0][0], len(slice_sizes)
    begins = torch.tensor([0, *slice_sizes], device=first.device).cumsum(0)
    a = first.new_zeros((len(adapters), num_slices, rank, first.shape[1]))
    b = first.new_zeros((len(adapters), sum(slice_sizes), rank))
    for index, adapter in enumerate(adapters):
        for place, (pair, begin, size) in enumerate(zip(adapter, begins.tolist(), slice_sizes, strict=False)):
            if pair is not None:
                a[index, place, : pair[0].shape[0]] = pair[0]
                b[index, begin : begin + size, : pair[1].shape[1]] = pair[1]
    return StackedAdapters(
        a=a,
        b=b,
        slice_begins=begins.int(),
        longest_slice=max(slice_sizes),
        alignment=math.gcd(16, *slice_sizes),
    )


@triton.jit
def _rows_of(block, begins_ptr, num_adapters, ADAPTERS_PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """(adapter, grouped places of a block's rows, which of them are its adapter's); adapter -1 where there is none.

    Adapter i's blocks begin at block begins[i] // BLOCK_M + i, so that each may round up.
    """
    adapters = tl.arange(0, ADAPTERS_PADDED)
    begins = tl.load(begins_ptr + adapters, mask=adapters < num_adapters, other=0)
    has_begun = (begins // BLOCK_M + adapters <= block) & (adapters < num_adapters)
    adapter = tl.sum(has_begun.to(tl.int32), axis=0) - 1
    begin = tl.load(begins_ptr + tl.maximum(adapter, 0))
    end = tl.where(adapter < 0, 0, tl.load(begins_ptr + tl.maximum(adapter, 0) + 1))
    places = begin + (block - begin // BLOCK_M - adapter) * BLOCK_M + tl.arange(0, BLOCK_M)
    return adapter.to(tl.int64), places.to(tl.int64), places < end


@triton.jit(do_not_specialize=["num_tokens", "num_adapters"])
def shrink_kernel(
    shrunk_ptr,
    x_ptr,
    a_ptr,
    rows_ptr,
    begins_ptr,
    num_tokens,
    num_adapters,
    inner,
    x_stride,
    ADAPTERS_PADDED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Part of x @ A: [splits, slices, tokens in grouped order, rank]. Grid: (row blocks, slices, splits)."""
    adapter, places, is_row = _rows_of(tl.program_id(0), begins_ptr, num_adapters, ADAPTERS_PADDED, BLOCK_M)
    if tl.sum(is_row.to(tl.int32), axis=0) == 0:
        return
    index, split, ranks = tl.program_id(1), tl.program_id(2), tl.arange(0, RANK)
    rows = tl.load(rows_ptr + places, mask=is_row, other=0)
    factors = a_ptr + ((adapter * tl.num_programs(1) + index) * RANK + ranks[:, None]) * inner
    summed = tl.zeros([BLOCK_M, RANK], tl.float32)
    step = tl.cdiv(tl.cdiv(inner, BLOCK_K), NUM_SPLITS) * BLOCK_K
    for first in range(split * step, tl.minimum((split + 1) * step, inner), BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        in_row = (columns < inner)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns, mask=is_row[:, None] & in_row, other=0.0)
        a = tl.load(factors + columns, mask=in_row, other=0.0)
        summed = tl.dot(x.to(DOT), tl.trans(a.to(DOT)), summed, input_precision=PRECISION)
    part = (split * tl.num_programs(1) + index).to(tl.int64) * num_tokens
    tl.store(shrunk_ptr + (part + places)[:, None] * RANK + ranks, summed, mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_adapters"])
def expand_kernel(
    out_ptr,
    shrunk_ptr,
    b_ptr,
    rows_ptr,
    begins_ptr,
    slice_begins_ptr,
    num_tokens,
    num_adapters,
    num_columns,
    out_stride,
    ADAPTERS_PADDED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add shrunk @ B to the adapters' rows. Grid: (row blocks, slices, blocks of columns of the longest slice)."""
    adapter, places, is_row = _rows_of(tl.program_id(0), begins_ptr, num_adapters, ADAPTERS_PADDED, BLOCK_M)
    index, num_slices, ranks = tl.program_id(1), tl.num_programs(1), tl.arange(0, RANK)
    first = tl.multiple_of(tl.load(slice_begins_ptr + index), ALIGNMENT) + tl.program_id(2) * BLOCK_N
    end = tl.multiple_of(tl.load(slice_begins_ptr + index + 1), ALIGNMENT)
    if (first >= end) | (tl.sum(is_row.to(tl.int32), axis=0) == 0):
        return
    shrunk = tl.zeros([BLOCK_M, RANK], tl.float32)
    for split in range(NUM_SPLITS):
        part = (split * num_slices + index).to(tl.int64) * num_tokens
        shrunk += tl.load(shrunk_ptr + (part + places)[:, None] * RANK + ranks, mask=is_row[:, None], other=0.0)
    columns = first + tl.arange(0, BLOCK_N)
    is_column = columns < end
    factors = b_ptr + (adapter * num_columns + columns)[:, None] * RANK + ranks
    b = tl.load(factors, mask=is_column[:, None], other=0.0)
    update = tl.dot(shrunk.to(DOT), tl.trans(b.to(DOT)), input_precision=PRECISION)
    rows = tl.load(rows_ptr + places, mask=is_row, other=0)
    mask = is_row[:, None] & is_column[None, :]
    outs = out_ptr + rows[:, None] * out_stride + columns
    updated = tl.load(outs, mask=mask, other=0.0).to(tl.float32) + update
    tl.store(outs, updated.to(out_ptr.dtype.element_ty), mask=mask)


def choose_blocks(num_tokens: int, inner: int, itemsize: int) -> tuple[int, int]:
    """(rows of a program, splits of the shrinking product): few rows leave a device idle unless `inner` is split."""
    if num_tokens > 256:
        # 64 rows of float32 don't fit the registers.
        return (64 if itemsize < 4 else 16), 1
    return 16, max(1, min(8, inner // 512))


def add_lora(out: torch.Tensor, x: torch.Tensor, adapters: StackedAdapters, groups: RowGroups) -> None:
    """out[row] += x[row] @ A @ B of the row's adapter, for out [tokens, out] and x [tokens, in].

    Rows of both may be any stride apart. What stands between the products is rounded to x's type.
    """
    (num_tokens, inner), (num_adapters, num_slices, rank, _) = x.shape, adapters.a.shape
    if num_tokens == 0:
        return
    assert x.stride(1) == out.stride(1) == 1
    assert adapters.a.is_contiguous()
    assert adapters.b.is_contiguous()
    assert out.shape == (num_tokens, adapters.b.shape[1])
    block_m, num_splits = choose_blocks(num_tokens, inner, x.dtype.itemsize)
    shrunk = torch.empty((num_splits, num_slices, num_tokens, rank), dtype=torch.float32, device=x.device)
    # An upper bound of the number of row blocks that needs no look at the device's data.
    blocks = num_tokens // block_m + num_adapters
    common = {
        "ADAPTERS_PADDED": triton.next_power_of_2(num_adapters),
        "RANK": rank,
        "BLOCK_M": block_m,
        "NUM_SPLITS": num_splits,
        "DOT": dot_dtype(x.dtype),
        "PRECISION": dot_precision(x.dtype),
    }
    shrink_kernel[(blocks, num_slices, num_splits)](
        *(shrunk, x, adapters.a, groups.rows, groups.begins, num_tokens, num_adapters, inner, x.stride(0)),
        **common,
        BLOCK_K=128 if x.dtype.itemsize < 4 else 32,
        num_warps=4,
        num_stages=3,
    )
    block_n = 64
    expand_kernel[(blocks, num_slices, triton.cdiv(adapters.longest_slice, block_n))](
        *(out, shrunk, adapters.b, groups.rows, groups.begins, adapters.slice_begins),
        *(num_tokens, num_adapters, out.shape[1], out.stride(0)),
        **common,
        BLOCK_N=block_n,
        ALIGNMENT=adapters.alignment,
        num_warps=4,
    )


def add_lora_reference(
    out: torch.Tensor, x: torch.Tensor, adapters: StackedAdapters, adapter_of_row: torch.Tensor
) -> None:
    """What `add_lora` does, in torch."""
    begins = adapters.slice_begins.tolist()
    for adapter in range(adapters.a.shape[0]):
        rows = (adapter_of_row == adapter).nonzero()[:, 0]
        for index, (begin, end) in enumerate(pairwise(begins)):
            shrunk = x[rows].float() @ adapters.a[adapter, index].float().T
            update = shrunk @ adapters.b[adapter, begin:end].float().T
            out[rows, begin:end] = (out[rows, begin:end].float() + update).to(out.dtype)
