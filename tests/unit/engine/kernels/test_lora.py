"""LoRA updates beside their reference, through the interpreter, whose bfloat16 stores cut off."""

from __future__ import annotations

import pytest
import torch
from lora_cases import PARAMETERS, TOLERANCE, check, inputs
from pairwise import name_of, pairwise

from paceline_engine.kernels.lora import add_lora, add_lora_reference, group_rows


@pytest.mark.parametrize("case", pairwise(PARAMETERS), ids=name_of)
def test_the_update_is_its_reference(case):
    check(case)


PLAIN = {"ranks": (8, 4, 2), "slices": (64, 32), "inner": 64, "dtype": torch.float32, "missing": False, "padding": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_take_other_blocks(dtype):
    rows = (0,) * 130 + (-1,) * 70 + (2,) * 64 + (1,) * 3
    out, x, adapters, adapter_of_row = inputs({**PLAIN, "dtype": dtype}, rows)
    expected = out.clone()
    add_lora_reference(expected, x, adapters, adapter_of_row)
    add_lora(out, x, adapters, group_rows(adapter_of_row, 3))
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_nan_in_one_row_stays_there():
    rows = (0, 1, 0, -1)
    out, x, adapters, adapter_of_row = inputs(PLAIN, rows)
    x[0] = torch.nan
    add_lora(out, x, adapters, group_rows(adapter_of_row, 3))
    assert out.isnan().any(dim=1).tolist() == [True, False, False, False]


def test_rows_are_grouped_by_adapter_in_their_order():
    groups = group_rows(torch.tensor([2, -1, 0, 2, 0, -1]), 4)
    assert groups.rows.tolist() == [1, 5, 2, 4, 0, 3]
    assert groups.begins.tolist() == [2, 4, 4, 6, 6]
