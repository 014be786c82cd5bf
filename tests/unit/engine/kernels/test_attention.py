"""Paged attention beside its reference, through the interpreter.

Tolerance is that of the coarsest type in play: float32 1e-5; bfloat16 two units in its last place of values of order 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairwise import pairwise

from paceline_engine.kernels.attention import (
    AttentionTiling,
    choose_num_segments,
    paged_attention,
    paged_attention_reference,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
# (query length, context length) of each sequence.
BATCHES = {
    "decodes": ((1, 1), (1, 17), (1, 120), (1, 33)),
    "one decode": ((1, 70),),
    "prefills": ((20, 20), (1, 1), (37, 37)),
    "chunk": ((21, 50),),
    "mixed": ((1, 40), (5, 5), (19, 24), (1, 1), (4, 50)),
    "verifications": ((5, 33), (5, 32), (2, 31)),
    "with an empty sequence": ((0, 16), (3, 20), (0, 0), (1, 9)),
    "no rows": ((0, 16),),
}
CASES = pairwise(
    {
        "batch": list(BATCHES),
        "heads": [(4, 4), (8, 2), (9, 3), (32, 8)],
        "head_dim": [64, 96, 128, 256],
        "dtype": [torch.float32, torch.bfloat16],
        "kv": [None, torch.int8, torch.float8_e4m3fn],
        "window": [None, 7],
        "softcap": [None, 3.0],
        "block_size": [1, 16, 32],
        "num_segments": [1, 3],
    }
)


def quantized(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit values and their scales, one a slot and head."""
    largest = 127.0 if kind is torch.int8 else torch.finfo(kind).max
    scale = x.abs().amax(dim=-1) / largest
    values = x / scale[..., None]
    return (values.round() if kind is torch.int8 else values).to(kind), scale


def inputs(case: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Arguments of the kernel; what no query may see is NaN, or a block that doesn't exist."""
    torch.manual_seed(seed)
    sizes, block_size = BATCHES[case["batch"]], case["block_size"]
    num_heads, num_kv_heads = case["heads"]
    blocks = [-(-context // block_size) for _, context in sizes]
    num_blocks = sum(blocks) + 3
    order = iter(torch.randperm(num_blocks).tolist())
    tables = torch.full((len(sizes), max(blocks) + 2), 2**31 - 1, dtype=torch.int32)
    shape = (num_blocks, block_size, num_kv_heads, case["head_dim"])
    key, value = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    for sequence, (_, context) in enumerate(sizes):
        for place in range(blocks[sequence]):
            block = tables[sequence, place] = next(order)
            slots = min(block_size, context - place * block_size)
            key[block, :slots] = torch.randn(slots, *shape[2:])
            value[block, :slots] = torch.randn(slots, *shape[2:])
    scales: dict[str, Any] = {}
    if case["kv"] is None:
        key, value = key.to(case["dtype"]), value.to(case["dtype"])
    else:
        (key, key_scale), (value, value_scale) = quantized(key, case["kv"]), quantized(value, case["kv"])
        scales = {"key_scale": key_scale, "value_scale": value_scale}
    lengths = torch.tensor([0] + [length for length, _ in sizes])
    return {
        "query": torch.randn(int(lengths.sum()), num_heads, case["head_dim"]).to(case["dtype"]),
        "key": key,
        "value": value,
        "block_tables": tables,
        "begins": lengths.cumsum(0).int(),
        "context_lens": torch.tensor([context for _, context in sizes], dtype=torch.int32),
        "scale": case["head_dim"] ** -0.5,
        "window": case["window"],
        "softcap": case["softcap"],
        **scales,
    }


def longest(arguments: dict[str, Any]) -> int:
    return int(arguments["begins"].diff().max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_attention_is_its_reference(case):
    arguments = inputs(case)
    expected = paged_attention_reference(**arguments)
    got = paged_attention(**arguments, max_query_len=longest(arguments), num_segments=case["num_segments"])
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=TOLERANCE[case["dtype"]], rtol=TOLERANCE[case["dtype"]])


PLAIN = {"heads": (8, 2), "head_dim": 64, "dtype": torch.float32, "kv": None, "block_size": 16}
PLAIN |= {"window": None, "softcap": None}


@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("tile", [16, 64])
def test_no_tiling_changes_the_result(block_m, tile):
    arguments = inputs({**PLAIN, "batch": "mixed"})
    tiling = AttentionTiling(block_m=block_m, tile=tile, num_warps=4, num_stages=1)
    got = paged_attention(**arguments, max_query_len=longest(arguments), tiling=tiling)
    torch.testing.assert_close(got, paged_attention_reference(**arguments), atol=1e-5, rtol=1e-5)


def test_a_context_of_4096_tokens_split_over_segments(monkeypatch):
    monkeypatch.setitem(BATCHES, "long", ((1, 4096), (1, 3)))
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
