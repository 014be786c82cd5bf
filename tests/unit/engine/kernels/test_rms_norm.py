"""RMSNorm beside its reference, through the interpreter, whose bfloat16 stores cut off instead of rounding."""

from __future__ import annotations

import pytest
import torch
from pairwise import name_of, pairwise
from rms_norm_cases import PARAMETERS, check

from paceline_engine.kernels.rms_norm import choose_rows, rms_norm, rms_norm_reference


@pytest.mark.parametrize("case", pairwise(PARAMETERS), ids=name_of)
def test_rms_norm_is_its_reference(case):
    check(case)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_heads_of_a_fused_matrix_are_normed_in_place(head_dim):
    torch.manual_seed(0)
    tokens, heads, kv_heads = 7, 9, 3
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim)
    before, weight = qkv.clone(), torch.randn(head_dim)
    keys = qkv[:, heads : heads + kv_heads]
    expected = rms_norm_reference(keys, weight, 1e-6)
    rms_norm(keys, weight, 1e-6, out=keys)
    torch.testing.assert_close(keys, expected, atol=1e-5, rtol=1e-5)
    for untouched in (slice(0, heads), slice(heads + kv_heads, None)):
        assert torch.equal(qkv[:, untouched], before[:, untouched])


def test_eps_counts_where_a_row_is_all_but_zero():
    x = torch.full((1, 64), 1e-6)
    torch.testing.assert_close(
        rms_norm(x, torch.ones(64), 1e-5), rms_norm_reference(x, torch.ones(64), 1e-5), atol=0, rtol=1e-5
    )


def test_a_program_never_holds_more_than_it_has_threads_for():
    assert choose_rows(64) == (8, 1)
    assert choose_rows(576) == (2, 4)
    assert choose_rows(16384) == (1, 16)
