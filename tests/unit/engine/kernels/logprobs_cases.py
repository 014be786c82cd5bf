"""Reported log probabilities of a few rows beside the CPU's, on torch's default device."""

from __future__ import annotations

from typing import Any

import torch

from paceline_engine.kernels import logprobs as kernel
from paceline_engine.sampling.logprobs import token_logprobs

CASES = [
    {"vocab_size": 517, "num_top": 5, "dtype": torch.float32},
    {"vocab_size": 1000, "num_top": 20, "dtype": torch.bfloat16},
    {"vocab_size": 3, "num_top": 20, "dtype": torch.float32},
    {"vocab_size": 300, "num_top": 0, "dtype": torch.float32},
]


def check(case: dict[str, Any]) -> float:
    """0 within the tolerances here, ranks the very same. Raises AssertionError."""
    vocab_size, num_top = case["vocab_size"], case["num_top"]
    torch.manual_seed(0)
    logits = (torch.randn(6, 2 * vocab_size) * 5 + 80).to(case["dtype"])[:, :vocab_size]
    logits[1, 1:] = -torch.inf
    tokens = torch.tensor([0, 0, 1, 2, vocab_size - 1, 1])
    got = kernel.token_logprobs(logits, tokens, num_top, tile=256)
    with torch.device("cpu"):
        expected = token_logprobs(logits.float().contiguous().cpu(), tokens.tolist(), [num_top] * 6)
    assert got.ranks.tolist() == [record.rank for record in expected]
    torch.testing.assert_close(got.logprobs.tolist(), [record.logprob for record in expected], atol=2e-6, rtol=1e-6)
    for index, record in enumerate(expected):
        top = [logprob for _, logprob in record.top]
        torch.testing.assert_close(got.top_logprobs[index].tolist(), top, atol=2e-6, rtol=1e-6)
        values = logits[index, got.top_ids[index]].tolist()
        assert values == [logits[index, token].item() for token, _ in record.top]
    return 0.0
