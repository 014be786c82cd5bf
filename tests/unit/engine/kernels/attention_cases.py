"""Paged attention on small batches of every kind, beside its reference, on torch's default device.

Tolerance is that of the coarsest type in play: float32 1e-5; bfloat16 two units in its last place of values of order 1.
"""

from __future__ import annotations

from typing import Any

import torch
from closeness import assert_close

from paceline_engine.kernels.attention import paged_attention, paged_attention_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
# (query length, context length) of each sequence.
BATCHES = {
    "decodes": ((1, 1), (1, 17), (1, 300), (1, 33)),
    "one decode": ((1, 70),),
    "prefills": ((20, 20), (1, 1), (37, 37)),
    "chunk": ((21, 280),),
    "mixed": ((1, 40), (5, 5), (19, 24), (1, 1), (4, 50)),
    "verifications": ((5, 33), (5, 32), (2, 31)),
    "with an empty sequence": ((0, 16), (3, 20), (0, 0), (1, 9)),
    "no rows": ((0, 16),),
}
LONG = ((1, 4096), (1, 3))
PARAMETERS = {
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
PLAIN = {"heads": (8, 2), "head_dim": 64, "dtype": torch.float32, "kv": None, "block_size": 16}
PLAIN |= {"window": None, "softcap": None}


def quantized(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit values and their scales, one a slot and head."""
    largest = 127.0 if kind is torch.int8 else torch.finfo(kind).max
    scale = x.abs().amax(dim=-1) / largest
    values = x / scale[..., None]
    return (values.round() if kind is torch.int8 else values).to(kind), scale


def inputs(case: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Arguments of the kernel; what no query may see is NaN, or a block that doesn't exist."""
    torch.manual_seed(seed)
    sizes = LONG if case["batch"] == "long" else BATCHES[case["batch"]]
    block_size = case["block_size"]
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


def check(case: dict[str, Any]) -> float:
    """The largest error over its tolerance. Raises AssertionError beyond 1."""
    arguments = inputs(case)
    expected = paged_attention_reference(**arguments)
    got = paged_attention(**arguments, max_query_len=longest(arguments), num_segments=case["num_segments"])
    return assert_close(got, expected, TOLERANCE[case["dtype"]])
