"""How far a kernel's result is from its reference's."""

from __future__ import annotations

import torch


def assert_close(
    got: torch.Tensor, expected: torch.Tensor, tolerance: float, *, absolute: float | None = None
) -> float:
    """Largest error over what is allowed: tolerance * |expected| + absolute, which is `tolerance` unless given.

    Raises AssertionError beyond 1.
    """
    absolute = tolerance if absolute is None else absolute
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=absolute)
    if not expected.numel():
        return 0.0
    wide = expected.double()
    error = (got.double() - wide).abs() / (absolute + tolerance * wide.abs())
    # Equal infinities differ by NaN.
    return float(error.nan_to_num(0.0).max())
