"""Cuts of small rows beside the CPU's, on torch's default device: the same tokens are kept, ties included."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from packed import make_row, sampling_rows

from paceline_engine.kernels.cuts import CutsTiling, find_cuts
from paceline_engine.sampling.cuts import kept_tokens

PARAMETERS = {
    "vocab_size": [1, 33, 517, 1000],
    "shape": ["normal", "peaked", "flat", "rounded", "equal", "masked", "far", "negative"],
    "temperature": [0.3, 1.0, 2.0],
    "top_k": [0, 2, 40, 5000],
    "top_p": [1.0, 0.95, 0.5, 1e-6],
    "min_p": [0.0, 0.05, 1.0],
    "tiling": [(256, 16), (512, 300), (1024, 2048)],
}

# One cut alone, in the thick of a row, with more values than are gathered on either side of it.
ALONE = [
    {"vocab_size": 517, "shape": "flat", "temperature": 1.0, "min_p": 0.0, "tiling": (256, 16), **cut}
    for cut in ({"top_k": 200, "top_p": 1.0}, {"top_k": 0, "top_p": 0.5}, {"top_k": 300, "top_p": 0.5})
]


def logits_of(shape: str, vocab_size: int) -> torch.Tensor:
    x = torch.randn(vocab_size)
    if shape == "equal":
        return torch.full((vocab_size,), 1.5)
    if shape == "rounded":
        # Steps of a quarter, with -0.0 beside 0.0: many ties at any cut.
        return (x * 4).round() / 4
    if shape == "masked":
        return torch.where(torch.arange(vocab_size) % 7 == 0, x * 3, -torch.inf)
    return {"normal": x * 3, "peaked": x * 12, "flat": x * 0.01, "far": x * 3 - 1e4, "negative": -x.abs() - 20}[shape]


def kept(logits: torch.Tensor, case: dict[str, Any], row: int) -> list[int]:
    cuts = case["cuts"]
    scaled = logits[row].float().numpy(force=True) / np.float32(case["temperature"])
    equal = (scaled == cuts.thresholds[row].item()) & (np.arange(len(scaled)) <= cuts.last_ids[row].item())
    return np.flatnonzero((scaled > cuts.thresholds[row].item()) | equal).tolist()


def check(case: dict[str, Any]) -> float:
    """0: the very same tokens. Raises AssertionError."""
    torch.manual_seed(1)
    tile, capacity = case["tiling"]
    row = make_row(
        case["vocab_size"], [1], [], **{name: case[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    )
    rows = sampling_rows([row, row], [1, 1])
    # The second row in bfloat16's values, as a model gives them.
    logits = torch.stack([logits_of(case["shape"], case["vocab_size"]) for _ in range(2)])
    logits[1] = logits[1].bfloat16().float()
    found = find_cuts(logits, rows, CutsTiling(tile=tile, capacity=capacity))
    if not row.has_cuts:
        assert found is None
        return 0.0
    for index in range(2):
        scaled = (logits[index].numpy(force=True) / np.float32(case["temperature"])).astype(np.float32)
        expected = kept_tokens(scaled, row.sampling)
        assert kept(logits, {**case, "cuts": found}, index) == expected.tolist()
    return 0.0
