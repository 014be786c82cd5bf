"""Gated activations beside their reference, through the interpreter, whose bfloat16 stores cut off."""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise

from paceline_engine.kernels.gated_mlp import gated_activation, gated_activation_reference

# exp of a large number is infinite and its sigmoid right; only numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
CASES = pairwise(
    {
        "tokens": [0, 1, 7],
        "inner": [1, 576, 1536, 2049],
        "dtype": [torch.float32, torch.bfloat16],
        "hidden_act": ["silu", "gelu_tanh"],
        "padding": [0, 32],
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_gated_activation_is_its_reference(case):
    torch.manual_seed(0)
    width = 2 * case["inner"]
    gate_up = (3 * torch.randn(case["tokens"], width + case["padding"])).to(case["dtype"])[:, :width]
    expected = gated_activation_reference(gate_up, case["hidden_act"])
    got = gated_activation(gate_up, case["hidden_act"])
    torch.testing.assert_close(got, expected, atol=TOLERANCE[case["dtype"]], rtol=TOLERANCE[case["dtype"]])


@pytest.mark.parametrize("hidden_act", ["silu", "gelu_tanh"])
def test_extreme_gates_are_the_limits_and_not_nan(hidden_act):
    gate_up = torch.tensor([[-1e30, -90.0, 0.0, 90.0, 1e30] + [2.0] * 5])
    assert gated_activation(gate_up, hidden_act).tolist() == gated_activation_reference(gate_up, hidden_act).tolist()
