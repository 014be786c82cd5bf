"""Draws on the device beside the CPU's sampler, through the interpreter: equal seeds give equal tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from packed import make_row, sampling_rows
from pairwise import name_of
from sampling_cases import CASES, check

from paceline_engine.kernels.cuts import SamplingRows
from paceline_engine.kernels.noise import gumbel, row_key, uniform
from paceline_engine.kernels.sampling import (
    NO_TOKEN,
    NOT_FINITE,
    NOTHING_ALLOWED,
    choose_num_splits,
    draw,
    sample,
)
from paceline_engine.sampling.noise import Stream, gumbel_at, row_keys, uniforms
from paceline_engine.sampling.sampler import Sampler


@triton.jit
def noise_kernel(gumbel_ptr, uniform_ptr, seed_ptr, ids_ptr, STREAM: tl.constexpr, SIZE: tl.constexpr):
    key = row_key(tl.load(seed_ptr), tl.load(seed_ptr + 1), STREAM)
    places = tl.arange(0, SIZE)
    tl.store(gumbel_ptr + places, gumbel(key, tl.load(ids_ptr + places)))
    tl.store(uniform_ptr, uniform(key))


@pytest.mark.parametrize(
    ("seed", "position", "stream"),
    [(0, 0, Stream.TOKEN), (-5, 17, Stream.DRAFT), (2**63 - 1, 2**40, Stream.ACCEPT), (99, 1, Stream.RESIDUAL)],
)
def test_noise_is_the_cpus_from_the_largest_to_the_smallest(seed, position, stream):
    keys = row_keys([seed], [position], stream)
    noise = gumbel_at(keys[:, None], np.arange(2**20))[0]
    order = noise.argsort()
    # The extremes of a million tokens, and some in between: float32's u would be wrong for the largest by percents.
    ids = np.concatenate((order[:64], order[-64:], np.arange(128)))
    got, number = torch.empty(256), torch.empty(1, dtype=torch.float64)
    sizes: dict[str, Any] = {"STREAM": int(stream), "SIZE": 256}
    noise_kernel[(1,)](got, number, torch.tensor([seed, position]), torch.tensor(ids), **sizes)
    np.testing.assert_allclose(got.numpy(), noise[ids], atol=2e-6)
    assert number.item() == uniforms(keys)[0]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_one_batch_of_all_rules_and_cuts_gives_the_cpus_tokens(case):
    check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_gives_the_same_tokens_without_cuts(dtype):
    """Many draws of one row, from whose tail most of the tokens come."""
    vocab_size, count = 700, 20
    torch.manual_seed(0)
    logits = torch.randn(vocab_size).to(dtype)
    rows = [make_row(vocab_size, [1], [], temperature=1.0, seed=seed) for seed in range(count)]
    sampler = Sampler(vocab_size)
    for stream in (Stream.TOKEN, Stream.DRAFT):
        expected = [sampler.draw(row, logits.float().numpy(), 7, stream) for row in rows]
        got = draw(logits.expand(count, -1), sampling_rows(rows, [7] * count), stream=stream)
        assert got.tolist() == expected
        assert len(set(expected)) > count // 2


@pytest.mark.parametrize("num_splits", [1, 4])
def test_the_first_of_equals_wins_a_greedy_row(num_splits):
    logits = torch.zeros(2, 1030)
    logits[0, [300, 1029]] = 2.0
    rows = sampling_rows([make_row(1030, [1], [])] * 2, [0, 0])
    assert draw(logits, rows, num_splits=num_splits, tile=256).tolist() == [300, 0]


@pytest.mark.parametrize("num_splits", [1, 4])
def test_rows_to_skip_are_not_looked_at_and_errors_are_rows_of_their_own(num_splits):
    logits = torch.zeros(4, 1030)
    logits[0] = torch.nan
    logits[1, 1000] = torch.nan
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    rows = sampling_rows([make_row(1030, [1], [], temperature=0.0)] * 4, [0] * 4)
    skip = torch.tensor([True, False, False, False])
    got = draw(logits, rows, skip=skip, num_splits=num_splits, tile=256)
    assert got.tolist() == [NO_TOKEN, NOT_FINITE, NOTHING_ALLOWED, NOT_FINITE]


def test_an_empty_batch():
    none = torch.empty(0)
    rows = SamplingRows(temperature=none, seeds=none.long(), positions=none.long(), top_p=none)
    assert sample(torch.empty(0, 64), rows).shape == (0,)


def test_rows_are_split_only_where_the_device_would_idle():
    assert choose_num_splits(1, 152_064, 132) == 38
    assert choose_num_splits(64, 152_064, 132) == 5
    assert choose_num_splits(512, 152_064, 132) == 1
    assert choose_num_splits(1, 512, 132) == 1
