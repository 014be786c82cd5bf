"""Cuts on the device beside the CPU's, through the interpreter: the same tokens are kept, ties included."""

from __future__ import annotations

import pytest
import torch
from cuts_cases import ALONE, PARAMETERS, check
from packed import make_row, sampling_rows
from pairwise import name_of, pairwise

from paceline_engine.kernels.cuts import find_cuts


@pytest.mark.parametrize("case", pairwise(PARAMETERS) + ALONE, ids=name_of)
def test_what_is_kept_is_what_the_cpu_keeps(case):
    check(case)


def test_greedy_and_broken_rows_are_left_whole():
    logits = torch.randn(4, 100)
    logits[1, 7], logits[2, 99] = torch.nan, torch.inf
    logits[3] = -torch.inf
    rows = [make_row(100, [1], [], temperature=0.0 if i == 0 else 1.0, top_p=0.5, top_k=3) for i in range(4)]
    packed = sampling_rows(rows, [0] * 4)
    found = find_cuts(logits, packed)
    assert found is not None
    assert found.thresholds.tolist() == [-torch.inf] * 4
