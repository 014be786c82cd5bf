"""Draws on the device beside the CPU's sampler, through the interpreter: equal seeds give equal tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from packed import make_row, pack_rules, sampling_rows
from pairwise import pairwise

from paceline_engine.core.outputs import ScheduledRequest
from paceline_engine.kernels.cuts import CutsTiling, SamplingRows
from paceline_engine.kernels.noise import gumbel, row_key, uniform
from paceline_engine.kernels.rules import apply_rules
from paceline_engine.kernels.sampling import (
    NO_TOKEN,
    NOT_FINITE,
    NOTHING_ALLOWED,
    choose_num_splits,
    draw,
    sample,
)
from paceline_engine.sampling.noise import Stream, gumbel_at, row_keys, uniforms
from paceline_engine.sampling.sampler import NOT_FINITE as NOT_FINITE_MESSAGE
from paceline_engine.sampling.sampler import NOTHING_ALLOWED as NOTHING_ALLOWED_MESSAGE
from paceline_engine.sampling.sampler import Sampler

ROWS = pairwise(
    {
        "temperature": [0.0, 1e-6, 0.2, 1.0, 1.7],
        "top_k": [0, 1, 20],
        "top_p": [1.0, 0.9],
        "min_p": [0.0, 0.1],
        "seed": [0, -1, 2**63 - 1, 12345678901],
        "position": [3, 100_000],
        "logit_bias": [(), ((0, 5.0), (9, -100.0))],
        "bad_words": [(), ((1,),)],
        "repetition_penalty": [1.0, 1.2],
        "presence_penalty": [0.0, 0.6],
        "min_tokens": [0, 9],
        "allowed_token_ids": [(), tuple(range(0, 300, 2))],
        "grammar": [False, True],
        "special": [None, None, "nan", "inf", "nothing"],
    }
)


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


@pytest.mark.parametrize(("vocab_size", "num_splits"), [(517, 1), (1000, 3)])
def test_one_batch_of_all_rules_and_cuts_gives_the_cpus_tokens(vocab_size, num_splits):
    chosen = random.Random(0)
    rows, shares = [], []
    torch.manual_seed(0)
    logits = torch.randn(len(ROWS), vocab_size) * 3
    for index, case in enumerate(ROWS):
        output = [chosen.randrange(vocab_size) for _ in range(3)]
        row = make_row(
            vocab_size,
            [chosen.randrange(vocab_size) for _ in range(10)],
            output,
            **{name: value for name, value in case.items() if name not in ("position", "special")},
        )
        rows.append(row)
        start = case["position"]
        shares.append(
            ScheduledRequest(request_id=str(index), token_ids=[1], start=start, new_block_ids=[], sample=True)
        )
        if case["special"] == "nothing":
            logits[index] = -torch.inf
        elif case["special"] is not None:
            logits[index, 4] = float(case["special"])
    expected = []
    for row, result in zip(rows, Sampler(vocab_size).sample(logits.clone(), shares, rows), strict=True):
        if result.error is None:
            expected.append(result.token_ids[0])
        else:
            is_empty = result.error == NOTHING_ALLOWED_MESSAGE or (
                result.error == NOT_FINITE_MESSAGE and not row.has_rules
            )
            expected.append((NOT_FINITE, NOTHING_ALLOWED)[is_empty])
    after = apply_rules(logits, pack_rules(rows, [()] * len(rows), vocab_size))
    packed = sampling_rows(rows, [case["position"] + 1 for case in ROWS])
    got = sample(after, packed, num_splits=num_splits, tiling=CutsTiling(tile=512, capacity=512))
    assert got.tolist() == expected


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
