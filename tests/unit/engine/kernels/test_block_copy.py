"""Blocks copied between a pool and a buffer, beside the references, through the interpreter."""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise

from paceline_engine.kernels.block_copy import (
    gather_blocks,
    gather_blocks_reference,
    scatter_blocks,
    scatter_blocks_reference,
)

CASES = pairwise(
    {
        "ids": [0, 1, 5],
        "ids_dtype": [torch.int32, torch.int64],
        "layers": [1, 3],
        "block_size": [1, 16],
        # Keys and values, or their scales; 3 heads of odd sizes make words of 4, 2 and 1 bytes.
        "rest": [(), (3,), (2, 64), (3, 96), (9, 33)],
        "dtype": [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn],
    }
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits there are, NaN included."""
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_blocks_are_copied_bit_by_bit_and_others_left_alone(case):
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


def test_a_block_longer_than_one_piece_is_copied_whole():
    pool = filled((1, 2, 3, 16, 8, 129), torch.bfloat16)
    staging = filled((1, 2, 2, 16, 8, 129), torch.bfloat16)
    gather_blocks(pool, torch.tensor([2, 0]), staging)
    assert torch.equal(bits(staging), bits(pool[:, :, [2, 0]]))


def test_blocks_past_two_to_the_31_elements_are_copied():
    """The pool is mapped but for the blocks in use never touched, so it takes no memory. 1025 bytes move as bytes."""
    far = 2**31 // 1025 + 5
    pool = torch.empty((1, 2, far + 1, 1025), dtype=torch.int8)
    staging = filled((1, 2, 2, 1025), torch.int8)
    ids = torch.tensor([far, 3], dtype=torch.int32)
    scatter_blocks(pool, ids, staging)
    assert torch.equal(pool[:, :, [far, 3]], staging)
    copied = torch.zeros_like(staging)
    gather_blocks(pool, ids, copied)
    assert torch.equal(copied, staging)
