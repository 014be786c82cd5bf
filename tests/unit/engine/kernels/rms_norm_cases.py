"""RMSNorm of small matrices beside its reference, on torch's default device.

The interpreter's bfloat16 stores cut off instead of rounding, so bfloat16 may differ by two units in its last place.
"""

from __future__ import annotations

from typing import Any

import torch
from closeness import assert_close

from paceline_engine.kernels.rms_norm import rms_norm, rms_norm_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
PARAMETERS = {
    "rows": [0, 1, 5, 17],
    "size": [1, 96, 128, 576, 4097],
    "dtype": [torch.float32, torch.bfloat16],
    "residual": [False, True],
    "in_place": [False, True],
}


def check(case: dict[str, Any]) -> float:
    """The largest error over its tolerance. Raises AssertionError beyond 1."""
    torch.manual_seed(0)
    dtype, shape = case["dtype"], (case["rows"], case["size"])
    x, weight = torch.randn(shape).to(dtype), torch.randn(case["size"]).to(dtype)
    residual = torch.randn(shape).to(dtype) if case["residual"] else None
    expected_residual = None if residual is None else residual.clone()
    expected = rms_norm_reference(x, weight, 1e-5, residual=expected_residual)
    got = rms_norm(x, weight, 1e-5, residual=residual, out=x if case["in_place"] else None)
    error = assert_close(got, expected, TOLERANCE[dtype])
    if residual is None or expected_residual is None:
        return error
    return max(error, assert_close(residual, expected_residual, TOLERANCE[dtype]))
