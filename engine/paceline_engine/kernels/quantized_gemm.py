"""Products with weights of 8 or 4 bits, dequantized tile by tile; sums are in float32.

Each GROUP weights of a column along the inner dimension share a float16 scale. 8 bits: scale * q. 4 bits:
scale * q + minimum, which holds the weights of GGUF's Q4_1. The dequantized values are those of the CPU kernels'
formats of these names. Few rows are bound by the weights' bytes: there the inner dimension is also split over the
device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from paceline_engine.kernels.common import dot_dtype, dot_precision, num_processors_of

GROUP = 32
_GROUP = tl.constexpr(GROUP)
# Row blocks that go through the columns together, so that weights are read from the cache.
_BAND = tl.constexpr(8)
# Rows of a matrix that are quantized at once: bounds what packing needs besides the matrix.
_PACKED_AT_ONCE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """A matrix [columns, inner]; scales and, in 4 bits, minima: [columns, groups] in float16.

    values: int8 [columns, groups * GROUP], or uint8 of half that width, where a byte holds q of the row's first half in
    its lower and of its second half in its upper bits; a 4-bit row has an even number of groups, the last may be empty.
    """

    values: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    inner: int


@triton.jit
def _tile_of(index, num_row_blocks, num_column_blocks):
    """(row block, column block) of a program: bands of row blocks, in each all columns."""
    in_band = _BAND * num_column_blocks
    first = index // in_band * _BAND
    height = tl.minimum(num_row_blocks - first, _BAND)
    return first + index % in_band % height, index % in_band // height


@triton.jit
def _add_product(
    summed, x_ptrs, x_mask, codes, scale_ptrs, minimum_ptrs, group_mask, DOT: tl.constexpr, PRECISION: tl.constexpr
):
    """summed [rows, columns] + x [rows, inner] @ codes [columns, inner], dequantized and transposed."""
    BLOCK_N: tl.constexpr = codes.shape[0]
    BLOCK_K: tl.constexpr = codes.shape[1]
    x = tl.load(x_ptrs, mask=x_mask, other=0.0).to(DOT)
    weights = tl.reshape(codes.to(tl.float32), (BLOCK_N, BLOCK_K // _GROUP, _GROUP))
    weights *= tl.load(scale_ptrs, mask=group_mask, other=0.0).to(tl.float32)[:, :, None]
    if minimum_ptrs is not None:
        weights += tl.load(minimum_ptrs, mask=group_mask, other=0.0).to(tl.float32)[:, :, None]
    weights = tl.reshape(weights, (BLOCK_N, BLOCK_K)).to(DOT)
    return tl.dot(x, tl.trans(weights), summed, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows"])
def quantized_gemm_kernel(
    out_ptr,
    partial_ptr,
    x_ptr,
    values_ptr,
    scales_ptr,
    minima_ptr,
    bias_ptr,
    num_rows,
    num_columns,
    inner,
    num_units,
    x_stride,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """See `quantized_gemm`. Grid: (tiles of the result, splits).

    A row of values is num_units * UNIT * GROUP bytes: UNIT tells the compiler how scales are aligned.
    """
    row_block, column_block = _tile_of(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N))
    split = tl.program_id(1)
    rows = row_block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < num_columns
    summed = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_rows = x_ptr + rows[:, None] * x_stride
    groups_a_half = num_units * UNIT
    width = groups_a_half * _GROUP
    groups_a_row = groups_a_half
    if minima_ptr is not None:
        groups_a_row = groups_a_half * 2
    step = tl.cdiv(tl.cdiv(width, BLOCK_K), NUM_SPLITS) * BLOCK_K
    for first in range(split * step, tl.minimum((split + 1) * step, width), BLOCK_K):
        places = first + tl.arange(0, BLOCK_K)
        groups = first // _GROUP + tl.arange(0, BLOCK_K // _GROUP)
        code_mask = is_column[:, None] & (places < width)[None, :]
        group_mask = is_column[:, None] & (groups < groups_a_half)[None, :]
        x_mask = is_row[:, None] & (places < tl.minimum(width, inner))[None, :]
        codes = tl.load(values_ptr + columns[:, None] * width + places, mask=code_mask, other=0)
        scales = scales_ptr + columns[:, None] * groups_a_row + groups
        if minima_ptr is None:
            summed = _add_product(summed, x_rows + places, x_mask, codes, scales, None, group_mask, DOT, PRECISION)
        else:
            minima = minima_ptr + columns[:, None] * groups_a_row + groups
            summed = _add_product(
                summed, x_rows + places, x_mask, codes & 15, scales, minima, group_mask, DOT, PRECISION
            )
            x_mask = is_row[:, None] & ((places < width) & (places + width < inner))[None, :]
            scales, minima = scales + groups_a_half, minima + groups_a_half
            summed = _add_product(
                summed, x_rows + width + places, x_mask, codes >> 4, scales, minima, group_mask, DOT, PRECISION
            )
    mask = is_row[:, None] & is_column[None, :]
    places_out = rows[:, None] * num_columns + columns
    if NUM_SPLITS > 1:
        tl.store(partial_ptr + split.to(tl.int64) * num_rows * num_columns + places_out, summed, mask=mask)
    else:
        if bias_ptr is not None:
            summed += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + places_out, summed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_splits_kernel(out_ptr, partial_ptr, bias_ptr, size, num_columns, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the splits, always in the same order. Grid: (blocks of the result,)."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    summed = tl.zeros([BLOCK], tl.float32)
    for split in range(NUM_SPLITS):
        summed += tl.load(partial_ptr + split * size + places, mask=mask, other=0.0)
    if bias_ptr is not None:
        summed += tl.load(bias_ptr + places % num_columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, summed.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTiling:
    """A program's part of the result and of a row of values, and how many programs share a part of the result."""

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int


def choose_tiling(
    num_rows: int, num_columns: int, width: int, *, four_bits: bool, itemsize: int, num_processors: int
) -> GemmTiling:
    """width: bytes of a row of values; itemsize: bytes of an element of x. All of these fit the registers."""
    if itemsize == 4:
        shape = (16, 64, 32, 4, 3) if num_rows <= 16 else (64, 64, 32, 8, 3)
    elif num_rows > 64:
        shape = (64, 128, 64, 8, 3) if four_bits else (128, 128, 64, 8, 3)
    else:
        block_m = max(16, triton.next_power_of_2(num_rows))
        shape = (block_m, 64, 64 if four_bits and block_m == 64 else 128, 4, 4 if block_m == 16 else 3)
    block_m, block_n, block_k, num_warps, num_stages = shape
    num_splits = 1
    if num_rows <= 64:
        # At least 4 steps a split: fewer cost more to sum than they save.
        programs = triton.cdiv(num_columns, block_n)
        num_splits = max(1, min(triton.cdiv(2 * num_processors, programs), width // (4 * block_k), 16))
    return GemmTiling(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        num_splits=num_splits,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def quantized_gemm(
    x: torch.Tensor,
    matrix: QuantizedMatrix,
    bias: torch.Tensor | None = None,
    *,
    tiling: GemmTiling | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [rows, inner] @ matrix [columns, inner], transposed, + bias [columns]; rows of x may be any stride apart.

    On a GPU dequantized weights are rounded to x's type before they are multiplied.
    """
    (num_rows, inner), (num_columns, width) = x.shape, matrix.values.shape
    assert inner == matrix.inner
    assert x.stride(1) == 1
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device) if out is None else out
    if num_rows == 0:
        return out
    assert out.is_contiguous()
    tiling = tiling or choose_tiling(
        *(num_rows, num_columns, width),
        four_bits=matrix.minima is not None,
        itemsize=x.dtype.itemsize,
        num_processors=num_processors_of(x.device),
    )
    splits, partial = tiling.num_splits, None
    if splits > 1:
        partial = torch.empty((splits, num_rows, num_columns), dtype=torch.float32, device=x.device)
    unit = math.gcd(width // GROUP, 4)
    tiles = triton.cdiv(num_rows, tiling.block_m) * triton.cdiv(num_columns, tiling.block_n)
    quantized_gemm_kernel[(tiles, splits)](
        *(out, partial, x, matrix.values, matrix.scales, matrix.minima, None if splits > 1 else bias),
        *(num_rows, num_columns, inner, width // (GROUP * unit), x.stride(0)),
        UNIT=unit,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        NUM_SPLITS=splits,
        DOT=dot_dtype(x.dtype),
        PRECISION=dot_precision(x.dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if splits > 1:
        sum_splits_kernel[(triton.cdiv(out.numel(), 512),)](
            *(out, partial, bias, out.numel(), num_columns), NUM_SPLITS=splits, BLOCK=512, num_warps=4
        )
    return out


def pack_matrix(weight: torch.Tensor, form: str) -> QuantizedMatrix:
    """Quantize weight [columns, inner], finite, to "int8" or "int4"."""
    pack = {"int8": _pack_int8, "int4": _pack_int4}[form]
    parts = [pack(_grouped(rows, even=form == "int4")) for rows in weight.split(_PACKED_AT_ONCE)]
    values, scales, minima = zip(*parts, strict=True)
    return QuantizedMatrix(
        values=torch.cat(values),
        scales=torch.cat(scales),
        minima=None if form == "int8" else torch.cat(minima),
        inner=weight.shape[1],
    )


def _grouped(weight: torch.Tensor, even: bool) -> torch.Tensor:
    """weight as [columns, groups, GROUP] in float32, the last groups filled up with zeros."""
    padding = -weight.shape[1] % (2 * GROUP if even else GROUP)
    return F.pad(weight.float(), (0, padding)).unflatten(1, (-1, GROUP))


def _codes(groups: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | float) -> torch.Tensor:
    unit = scale.where(scale != 0, 1.0)
    return ((groups - minimum) / unit).round().where(scale != 0, 0.0)


def _pack_int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    codes = _codes(groups, scale.float(), 0.0).clamp(-127, 127)
    return codes.to(torch.int8).flatten(1), scale.squeeze(-1), None


def _pack_int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The range from smallest to largest weight, or another one if that has the smaller squared error.

    Others are GGUF's Q4_0, where the largest magnitude is -8, and somewhat narrower ones.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = low.where(-low > high, high)
    ranges = [((high - low) / 15, low), (largest / -8, largest)]
    for step in range(1, 7):
        cut = 0.02 * step * (high - low)
        ranges.append(((high - low - 2 * cut) / 15, low + cut))
    least = torch.full_like(low, torch.inf)
    scale, minimum = torch.zeros_like(low), low.half().float()
    for tried, floor in ((tried.half().float(), floor.half().float()) for tried, floor in ranges):
        codes = _codes(groups, tried, floor).clamp(0, 15)
        error = (groups - (codes * tried + floor)).square().sum(-1, keepdim=True)
        better = (error < least) & (tried != 0)
        least, scale, minimum = error.where(better, least), tried.where(better, scale), floor.where(better, minimum)
    codes = _codes(groups, scale, minimum).clamp(0, 15).to(torch.uint8).flatten(1)
    lower, upper = codes.chunk(2, dim=1)
    return lower | upper << 4, scale.squeeze(-1).half(), minimum.squeeze(-1).half()


def dequantize(matrix: QuantizedMatrix) -> torch.Tensor:
    """The matrix [columns, inner] in float32."""
    values, scales = matrix.values, matrix.scales.float().repeat_interleave(GROUP, dim=1)
    if matrix.minima is None:
        weight = values.float() * scales
    else:
        codes = torch.cat((values & 15, values >> 4), dim=1).float()
        weight = codes * scales + matrix.minima.float().repeat_interleave(GROUP, dim=1)
    return weight[:, : matrix.inner]


def quantized_gemm_reference(
    x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What `quantized_gemm` computes, in torch."""
    return F.linear(x.float(), dequantize(matrix), None if bias is None else bias.float()).to(x.dtype)
