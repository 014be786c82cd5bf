"""LoRA updates of small batches beside their reference, on torch's default device.

The interpreter's bfloat16 stores cut off instead of rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from closeness import assert_close

from paceline_engine.kernels.lora import add_lora, add_lora_reference, group_rows, stack_adapters

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-5}
BATCHES = {
    "no rows": (),
    "one row": (1,),
    "one base row": (-1,),
    "base only": (-1,) * 20,
    "decodes": (0, -1, 2, 1, 0, 2, 2),
    "an adapter without rows": (0,) * 17 + (2,) * 3 + (-1,),
    "prefills": (1,) * 33 + (-1,) * 5 + (0,) * 16 + (1,) * 2 + (2,),
}
PARAMETERS = {
    "batch": list(BATCHES),
    "ranks": [(8, 8, 8), (4, 16, 1), (24, 3, 40)],
    "slices": [(130,), (96, 32, 32), (65, 1)],
    "inner": [33, 576, 1056],
    "dtype": [torch.float32, torch.bfloat16],
    "missing": [False, True],
    "padding": [0, 16],
}


def inputs(case: dict[str, Any], rows: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    """out, x, adapters, and the rows' adapters; `missing`: adapters 0 and 1 leave out a slice each."""
    torch.manual_seed(0)
    dtype, inner, slices = case["dtype"], case["inner"], case["slices"]
    adapters: list[list[Any]] = [
        [((torch.randn(rank, inner) / inner**0.5).to(dtype), torch.randn(size, rank).to(dtype)) for size in slices]
        for rank in case["ranks"]
    ]
    if case["missing"]:
        adapters[0][-1] = adapters[1][0] = None
    out = torch.randn(len(rows), sum(slices) + case["padding"]).to(dtype)[:, : sum(slices)]
    x = torch.randn(len(rows), inner + case["padding"]).to(dtype)
    x[:, inner:] = torch.nan
    return out, x[:, :inner], stack_adapters(adapters, slices), torch.tensor(rows, dtype=torch.int32)


def check(case: dict[str, Any]) -> float:
    """The largest error over its tolerance. Raises AssertionError beyond 1."""
    out, x, adapters, adapter_of_row = inputs(case, BATCHES[case["batch"]])
    before, expected = out.clone(), out.clone()
    add_lora_reference(expected, x, adapters, adapter_of_row)
    add_lora(out, x, adapters, group_rows(adapter_of_row, 3))
    base = adapter_of_row < 0
    assert torch.equal(out[base], before[base])
    return assert_close(out, expected, TOLERANCE[case["dtype"]])
