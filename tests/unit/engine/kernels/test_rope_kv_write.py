"""Rotation and the write to the paged KV beside their reference, through the interpreter.

Its bfloat16 stores cut off instead of rounding; its float8 stores round ties up, and lose the carry of what rounds up
to a power of 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairwise import pairwise

from paceline_engine.kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
CASES = pairwise(
    {
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
)
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_rotation_and_write_are_their_reference(case):
    arguments = inputs(case)
    expected = copies(arguments)
    rope_kv_write_reference(**expected)
    rope_kv_write(**arguments)
    tolerance = {"atol": TOLERANCE[case["dtype"]], "rtol": TOLERANCE[case["dtype"]]}
    for name in ("qkv", "key_scale", "value_scale", *(() if case["kv"] else ("key", "value"))):
        torch.testing.assert_close(arguments.get(name), expected.get(name), **tolerance)
    if case["kv"] is not None:
        for name in ("key", "value"):
            assert_same_codes(arguments[name], expected[name])


def test_many_tokens_take_larger_blocks():
    case = {**PLAIN, "tokens": 259, "heads": (1, 1), "block_size": 1}
    arguments = inputs(case, num_slots=300)
    expected = copies(arguments)
    rope_kv_write_reference(**expected)
    rope_kv_write(**arguments)
    for name in ("qkv", "key", "value"):
        torch.testing.assert_close(arguments[name], expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_an_8_bit_pool_holds_the_vectors_to_its_precision(kind):
    arguments = inputs({**PLAIN, "kv": kind})
    rope_kv_write(**arguments)
    vectors = arguments["qkv"].unflatten(1, (-1, 64))
    for name, heads in (("key", slice(3, 5)), ("value", slice(5, 7))):
        pool, scale = arguments[name].flatten(0, 1), arguments[f"{name}_scale"].flatten(0, 1)
        got = pool[arguments["slots"]].float() * scale[arguments["slots"]][..., None]
        error = (got - vectors[:, heads]).norm() / vectors[:, heads].norm()
        assert float(error) < (0.01 if kind == torch.int8 else 0.1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so_in_8_bits(kind, value):
    arguments = inputs({**PLAIN, "kv": kind})
    arguments["qkv"][1, -1] = value
    rope_kv_write(**arguments)
    scales = arguments["value_scale"].flatten(0, 1)[arguments["slots"]]
    assert scales.isnan().nonzero().tolist() == [[1, 1]]


def test_a_vector_of_zeros_is_zeros_in_8_bits():
    arguments = inputs({**PLAIN, "kv": torch.int8})
    arguments["qkv"].zero_()
    rope_kv_write(**arguments)
    slots = arguments["slots"]
    assert arguments["key_scale"].flatten(0, 1)[slots].eq(0).all()
    assert arguments["key"].flatten(0, 1)[slots].eq(0).all()


def test_slots_past_two_to_the_31_elements_are_written():
    """The pool is mapped but for the slots in use never touched, so it takes no memory."""
    head_dim, block_size = 64, 16
    far = 2**31 // (block_size * head_dim) + 5
    shape = (far + 1, block_size, 2, head_dim)
    arguments = inputs({**PLAIN, "tokens": 2, "kv": torch.int8})
    arguments |= {name: torch.empty(shape, dtype=torch.int8) for name in ("key", "value")}
    arguments |= {name: torch.empty(shape[:3]) for name in ("key_scale", "value_scale")}
    arguments["slots"] = torch.tensor([far * block_size + 3, 40])
    rope_kv_write(**arguments)
    new = arguments["qkv"].unflatten(1, (-1, head_dim))[:, -2:]
    for row, (block, place) in enumerate(((far, 3), (2, 8))):
        got = arguments["value"][block, place].float() * arguments["value_scale"][block, place, :, None]
        torch.testing.assert_close(got, new[row], atol=0.02, rtol=0)
