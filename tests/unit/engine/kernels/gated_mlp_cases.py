"""Gated activations of small matrices beside their reference, on torch's default device.

The interpreter's bfloat16 stores cut off instead of rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from closeness import assert_close

from paceline_engine.kernels.gated_mlp import gated_activation, gated_activation_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
PARAMETERS = {
    "tokens": [0, 1, 7],
    "inner": [1, 576, 1536, 2049],
    "dtype": [torch.float32, torch.bfloat16],
    "hidden_act": ["silu", "gelu_tanh"],
    "padding": [0, 32],
}


def check(case: dict[str, Any]) -> float:
    """The largest error over its tolerance. Raises AssertionError beyond 1."""
    torch.manual_seed(0)
    width = 2 * case["inner"]
    gate_up = (3 * torch.randn(case["tokens"], width + case["padding"])).to(case["dtype"])[:, :width]
    expected = gated_activation_reference(gate_up, case["hidden_act"])
    return assert_close(gated_activation(gate_up, case["hidden_act"]), expected, TOLERANCE[case["dtype"]])
