"""Blocks copied between a pool and a buffer, beside the references, through the interpreter."""

from __future__ import annotations

import pytest
import torch
from block_copy_cases import PARAMETERS, bits, check, filled
from pairwise import name_of, pairwise

from paceline_engine.kernels.block_copy import (
    gather_blocks,
    scatter_blocks,
)


@pytest.mark.parametrize("case", pairwise(PARAMETERS), ids=name_of)
def test_blocks_are_copied_bit_by_bit_and_others_left_alone(case):
    check(case)


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
