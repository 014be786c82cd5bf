"""Rotation and the write to the paged KV of few tokens, beside their reference, on torch's default device.

The interpreter's bfloat16 stores cut off instead of rounding; its float8 stores round ties up, and lose the carry of
what rounds up to a power of 2.
"""

from __future__ import annotations

from typing import Any

import torch
from closeness import assert_close

from paceline_engine.kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
PARAMETERS = {
    "tokens": [0, 1, 3, 6],
    "heads": [(2, 2), (6, 2), (3, 1)],
    "head_dim": [64, 96, 128],
    "dtype": [torch.float32, torch.bfloat16],
    "kv": [None, torch.int8, torch.float8_e4m3fn],
    "norm": [False, True],
    "rotated": [True, False],
    "block_size": [1, 16],
    "padding": [0, 2],
}
PLAIN = {"tokens": 5, "heads": (3, 2), "head_dim": 64, "dtype": torch.float32, "kv": None}
PLAIN |= {"norm": False, "rotated": True, "block_size": 16, "padding": 0}


def inputs(case: dict[str, Any], num_slots: int = 64) -> dict[str, Any]:
    """Arguments; the pool is 7 or, in 8 bits, 7 with scale 0.5 wherever nothing was written yet."""
    torch.manual_seed(0)
    (num_heads, num_kv_heads), head_dim, tokens = case["heads"], case["head_dim"], case["tokens"]
    blocks = num_slots // case["block_size"]
    shape = (blocks, case["block_size"], num_kv_heads, head_dim)
    slots = torch.randperm(num_slots)[:tokens]
    slots[tokens - case["padding"] :] = -1
    angles = torch.outer(torch.arange(50.0), 10000.0 ** -torch.linspace(0, 1, head_dim // 2))
    # Rows of a wider matrix, as a graph's static buffer may be.
    wide = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim + 32).to(case["dtype"])
    pool = torch.full(shape, 7.0).to(case["kv"] or case["dtype"])
    arguments = {
        "qkv": wide[:, :-32],
        "positions": torch.randint(0, 50, (tokens,)),
        "slots": slots,
        "key": pool,
        "value": pool.clone(),
        "cos": angles.cos() if case["rotated"] else None,
        "sin": angles.sin() if case["rotated"] else None,
    }
    if case["kv"] is not None:
        arguments |= {"key_scale": torch.full(shape[:3], 0.5), "value_scale": torch.full(shape[:3], 0.5)}
    if case["norm"]:
        arguments |= {name: torch.randn(head_dim).to(case["dtype"]) for name in ("q_norm", "k_norm")}
    return arguments


def copies(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def assert_same_codes(got: torch.Tensor, expected: torch.Tensor) -> None:
    if got.dtype == torch.int8:
        assert int((got.int() - expected.int()).abs().max()) <= 1
        assert float((got == expected).float().mean()) > 0.999
        return
    carried = expected.view(torch.uint8) & 7 == 0
    assert float(((got.view(torch.uint8) == expected.view(torch.uint8)) | carried).float().mean()) > 0.99
    assert bool(torch.isclose(got.float(), expected.float(), rtol=0.5, atol=2**-8).all())


def check(case: dict[str, Any]) -> float:
    """The largest error over its tolerance, 8-bit codes aside. Raises AssertionError beyond 1."""
    arguments = inputs(case)
    expected = copies(arguments)
    rope_kv_write_reference(**expected)
    rope_kv_write(**arguments)
    names = ["qkv", *(("key_scale", "value_scale") if case["kv"] else ("key", "value"))]
    if case["kv"] is not None:
        for name in ("key", "value"):
            assert_same_codes(arguments[name], expected[name])
    return max(assert_close(arguments[name], expected[name], TOLERANCE[case["dtype"]]) for name in names)
