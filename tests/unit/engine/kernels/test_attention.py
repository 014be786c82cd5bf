"""Paged attention beside its reference, through the interpreter."""

from __future__ import annotations

import pytest
import torch
from attention_cases import PARAMETERS, PLAIN, check, inputs, longest
from pairwise import name_of, pairwise

from paceline_engine.kernels.attention import (
    AttentionTiling,
    choose_num_segments,
    paged_attention,
    paged_attention_reference,
)


@pytest.mark.parametrize("case", pairwise(PARAMETERS), ids=name_of)
def test_attention_is_its_reference(case):
    check(case)


@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("tile", [16, 64])
def test_no_tiling_changes_the_result(block_m, tile):
    arguments = inputs({**PLAIN, "batch": "mixed"})
    tiling = AttentionTiling(block_m=block_m, tile=tile, num_warps=4, num_stages=1)
    got = paged_attention(**arguments, max_query_len=longest(arguments), tiling=tiling)
    torch.testing.assert_close(got, paged_attention_reference(**arguments), atol=1e-5, rtol=1e-5)


def test_a_context_of_4096_tokens_split_over_segments():
    arguments = inputs({**PLAIN, "batch": "long", "heads": (4, 1)})
    expected = paged_attention_reference(**arguments)
    got = paged_attention(**arguments, max_query_len=1, num_segments=8)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_blocks_past_two_to_the_31_elements_are_addressed():
    """The pool is mapped but for the blocks in use never touched, so it takes no memory."""
    head_dim, block_size = 64, 16
    far = 2**31 // (block_size * head_dim) + 5
    shape = (far + 1, block_size, 1, head_dim)
    key, value = torch.empty(shape, dtype=torch.int8), torch.empty(shape, dtype=torch.int8)
    scales = torch.empty(shape[:3])
    near = {"key": key, "value": value, "key_scale": scales, "value_scale": scales}
    torch.manual_seed(0)
    for block in (far, 2):
        for tensor in (key, value):
            tensor[block] = torch.randint(-100, 100, shape[1:], dtype=torch.int8)
        scales[block] = 0.01
    arguments = {
        **near,
        "query": torch.randn(1, 2, head_dim),
        "block_tables": torch.tensor([[far, 2]], dtype=torch.int32),
        "begins": torch.tensor([0, 1], dtype=torch.int32),
        "context_lens": torch.tensor([30], dtype=torch.int32),
        "scale": 0.125,
    }
    got = paged_attention(**arguments, max_query_len=1)
    torch.testing.assert_close(got, paged_attention_reference(**arguments), atol=1e-5, rtol=1e-5)


def test_the_keys_are_split_only_where_the_device_would_idle():
    assert choose_num_segments(256, 8, 4096, 132) == 1
    assert choose_num_segments(1, 8, 8192, 132) == 32
    assert choose_num_segments(1, 8, 300, 132) == 1
    assert choose_num_segments(0, 8, 300, 132) == 1
