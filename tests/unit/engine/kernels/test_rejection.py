"""Verification of guesses beside the CPU's sampler, through the interpreter: equal seeds let the same guesses stand.

That the rule keeps the target's distribution is tested where the CPU's is; here every token must be the CPU's.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packed import make_row
from pairwise import name_of
from rejection_cases import CASES, check, on_the_cpu, on_the_device

from paceline_engine.kernels.cuts import SamplingRows
from paceline_engine.kernels.rejection import Guesses, verify
from paceline_engine.sampling.sampler import distribution
from paceline_engine.sampling.speculation import Drafts


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_guesses_that_stand_and_what_follows_are_the_cpus(case):
    check(case)


def test_where_rounding_leaves_nothing_of_the_residual_the_replacement_is_from_the_target():
    """q is twice p: about half of the guesses are refused, and p - q is nowhere positive."""
    vocab_size, count = 100, 16
    torch.manual_seed(0)
    rows, guesses = [], []
    logits = torch.randn(2 * count, vocab_size)
    for index in range(count):
        row = make_row(vocab_size, [1], [5], temperature=1.0, seed=index, ignore_eos=True)
        p = distribution(row, logits[2 * index].numpy())
        row.drafts = Drafts(position=index + 1, token_ids=(3,), probabilities=(2 * p[None]).astype(np.float32))
        rows.append(row)
        guesses.append([3])
    results = on_the_cpu(logits, rows, guesses, 1.0)
    got, _ = on_the_device(logits, rows, guesses, 1.0)
    assert [[token for token in tokens if token >= 0] for tokens in got.tolist()] == [
        list(result.token_ids) for result in results
    ]
    assert 2 < sum(len(result.token_ids) == 1 for result in results) < count - 2


def test_no_requests():
    none = torch.empty(0)
    packed = Guesses(begins=torch.zeros(1, dtype=torch.int32), token_ids=none.long(), most=3, by_ratio=none)
    sampling = SamplingRows(temperature=none, seeds=none.long(), positions=none.long())
    assert verify(torch.empty(0, 64), packed, none.long(), sampling).shape == (0, 4)
