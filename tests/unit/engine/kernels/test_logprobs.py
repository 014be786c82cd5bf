"""Reported log probabilities beside the CPU's, through the interpreter."""

from __future__ import annotations

import pytest
import torch
from logprobs_cases import CASES, check
from pairwise import name_of

from paceline_engine.kernels import logprobs as kernel


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_logprobs_and_ranks_are_the_cpus(case):
    check(case)


def test_no_rows():
    got = kernel.token_logprobs(torch.empty(0, 64), torch.empty(0, dtype=torch.int64), 3)
    assert got.top_ids.shape == (0, 3)
