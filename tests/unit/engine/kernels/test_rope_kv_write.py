"""Rotation and the write to the paged KV beside their reference, through the interpreter."""

from __future__ import annotations

import pytest
import torch
from pairwise import name_of, pairwise
from rope_kv_write_cases import PARAMETERS, PLAIN, check, copies, inputs

from paceline_engine.kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference


@pytest.mark.parametrize("case", pairwise(PARAMETERS), ids=name_of)
def test_rotation_and_write_are_their_reference(case):
    check(case)


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
