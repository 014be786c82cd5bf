"""Blocks copied between a small pool and a buffer, beside the references, on torch's default device."""

from __future__ import annotations

from typing import Any

import torch

from paceline_engine.kernels.block_copy import (
    gather_blocks,
    gather_blocks_reference,
    scatter_blocks,
    scatter_blocks_reference,
)

PARAMETERS = {
    "ids": [0, 1, 5],
    "ids_dtype": [torch.int32, torch.int64],
    "layers": [1, 3],
    "block_size": [1, 16],
    # Keys and values, or their scales; 3 heads of odd sizes make words of 4, 2 and 1 bytes.
    "rest": [(), (3,), (2, 64), (3, 96), (9, 33)],
    "dtype": [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn],
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits there are, NaN included."""
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def check(case: dict[str, Any]) -> float:
    """0: every bit must be right. Raises AssertionError."""
    torch.manual_seed(0)
    ids = torch.randperm(9)[: case["ids"]].to(case["ids_dtype"])
    pool = filled((case["layers"], 2, 9, case["block_size"], *case["rest"]), case["dtype"])
    staging = filled((case["layers"], 2, case["ids"], case["block_size"], *case["rest"]), case["dtype"])
    expected_pool, expected_staging = pool.clone(), staging.clone()

    scatter_blocks(pool, ids, staging)
    scatter_blocks_reference(expected_pool, ids, expected_staging)
    assert torch.equal(bits(pool), bits(expected_pool))

    ids = ids.flip(0)
    gather_blocks(pool, ids, staging)
    gather_blocks_reference(expected_pool, ids, expected_staging)
    assert torch.equal(bits(staging), bits(expected_staging))
    assert torch.equal(bits(pool), bits(expected_pool))
    return 0.0
