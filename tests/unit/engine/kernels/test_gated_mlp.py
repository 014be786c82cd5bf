"""Gated activations beside their reference, through the interpreter, whose bfloat16 stores cut off."""

from __future__ import annotations

import pytest
import torch
from gated_mlp_cases import PARAMETERS, check
from pairwise import name_of, pairwise

from paceline_engine.kernels.gated_mlp import gated_activation, gated_activation_reference

# exp of a large number is infinite and its sigmoid right; only numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize("case", pairwise(PARAMETERS), ids=name_of)
def test_gated_activation_is_its_reference(case):
    check(case)


@pytest.mark.parametrize("hidden_act", ["silu", "gelu_tanh"])
def test_extreme_gates_are_the_limits_and_not_nan(hidden_act):
    gate_up = torch.tensor([[-1e30, -90.0, 0.0, 90.0, 1e30] + [2.0] * 5])
    assert gated_activation(gate_up, hidden_act).tolist() == gated_activation_reference(gate_up, hidden_act).tolist()
