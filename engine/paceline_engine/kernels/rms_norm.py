"""RMSNorm over the last dimension, with the residual sum before it in the same pass.

Rows may lie any stride apart, so the heads inside a fused query-key-value matrix are rows as well (QK norm).
Zhang and Sennrich, arXiv 1910.07467.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements that a program holds at once where rows are short.
_TILE = 2048


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    out_ptr,
    residual_ptr,
    x_ptr,
    weight_ptr,
    eps,
    num_rows,
    inner,
    x_outer_stride,
    x_inner_stride,
    out_outer_stride,
    out_inner_stride,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """See `rms_norm`. Grid: (blocks of rows,)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, SIZE_PADDED)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    outer, within = (rows // inner)[:, None], (rows % inner)[:, None]
    x = tl.load(x_ptr + outer * x_outer_stride + within * x_inner_stride + columns, mask=mask, other=0.0)
    x = x.to(tl.float32)
    if residual_ptr is not None:
        sums = residual_ptr + rows[:, None] * SIZE + columns
        # Normed is what the next layer will read: the sum rounded to the residual's type.
        rounded = (x + tl.load(sums, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(sums, rounded, mask=mask)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None] * weight
    out = out_ptr + outer * out_outer_stride + within * out_inner_stride + columns
    tl.store(out, normed.to(out_ptr.dtype.element_ty), mask=mask)


def choose_rows(size: int) -> tuple[int, int]:
    """(rows, warps) of a program: about a warp for 512 elements."""
    padded = triton.next_power_of_2(size)
    rows = max(1, min(8, _TILE // padded))
    return rows, min(16, max(1, rows * padded // 512))


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32; out may be x.

    x [rows, size] or [tokens, heads, size], its last dimension contiguous; weight [size], whatever is added to a stored
    weight included. residual [rows, size]: x is added to it, in place, and their sum is what is normed.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    size, inner = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * inner
    if num_rows == 0:
        return out
    assert x.stride(-1) == out.stride(-1) == 1
    assert out.shape == x.shape
    assert weight.shape == (size,)
    if residual is not None:
        assert residual.shape == x.shape
        assert residual.is_contiguous()
    rows, num_warps = choose_rows(size)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        *(out, residual, x, weight, eps, num_rows, inner),
        *(x.stride(0), x.stride(1) if x.dim() == 3 else 0, out.stride(0), out.stride(1) if x.dim() == 3 else 0),
        SIZE=size,
        SIZE_PADDED=triton.next_power_of_2(size),
        BLOCK_ROWS=rows,
        num_warps=num_warps,
    )
    return out


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """What `rms_norm` computes, in torch."""
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
