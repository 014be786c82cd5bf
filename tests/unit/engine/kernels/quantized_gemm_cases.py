"""Products with small quantized matrices beside their reference, on torch's default device."""

from __future__ import annotations

import math
from typing import Any

import torch
from closeness import assert_close

from paceline_engine.kernels.quantized_gemm import GemmTiling, pack_matrix, quantized_gemm, quantized_gemm_reference

# Relative to the length of the summed products; bfloat16 is cut off by the interpreter when it is stored.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
PARAMETERS = {
    "rows": [0, 1, 17, 70],
    "columns": [1, 96, 193],
    "inner": [1, 32, 100, 576],
    "form": ["int8", "int4"],
    "dtype": [torch.float32, torch.bfloat16],
    "bias": [False, True],
    "num_splits": [1, 3],
    "padding": [0, 16],
}


def tiling_of(rows: int, num_splits: int) -> GemmTiling:
    return GemmTiling(
        block_m=16 if rows < 16 else 32, block_n=64, block_k=64, num_splits=num_splits, num_warps=4, num_stages=1
    )


def check(case: dict[str, Any]) -> float:
    """The largest error over its tolerance. Raises AssertionError beyond 1."""
    torch.manual_seed(0)
    dtype, inner = case["dtype"], case["inner"]
    matrix = pack_matrix(torch.randn(case["columns"], inner) + 0.3, case["form"])
    x = torch.randn(case["rows"], inner + case["padding"]).to(dtype)
    # Beside the rows, and so beside the inner dimension, may stand anything.
    x[:, inner:] = torch.nan
    x = x[:, :inner]
    bias = torch.randn(case["columns"]).to(dtype) if case["bias"] else None
    expected = quantized_gemm_reference(x, matrix, bias)
    got = quantized_gemm(x, matrix, bias, tiling=tiling_of(case["rows"], case["num_splits"]))
    assert got.dtype == dtype
    return assert_close(got, expected, TOLERANCE[dtype], absolute=TOLERANCE[dtype] * math.sqrt(inner) * 2)
