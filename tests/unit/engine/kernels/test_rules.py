"""Rules on the device beside the CPU's, through the interpreter; equal to the last bit."""

from __future__ import annotations

import pytest
import torch
from packed import make_row, pack_rules
from pairwise import name_of
from rules_cases import CASES, check

from paceline_engine.kernels.rules import Rules, apply_rules


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_any_two_rules_together_are_the_cpus(case):
    check(case)


def test_rows_without_rules_are_not_touched():
    rows = [make_row(64, [1], [2]), make_row(64, [1], [2], logit_bias=((63, 1.0),))]
    logits = torch.randn(4, 64)[::2]
    before = logits.clone()
    apply_rules(logits, pack_rules(rows, [(), ()], 64))
    before[1, 63] += 1.0
    assert torch.equal(logits, before)


def test_no_rows_and_no_rules():
    assert apply_rules(torch.empty(0, 64), Rules()).shape == (0, 64)
    logits = torch.randn(2, 65).bfloat16()
    assert torch.equal(apply_rules(logits, Rules()), logits.float())
