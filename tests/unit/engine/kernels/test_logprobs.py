"""Reported log probabilities beside the CPU's, through the interpreter."""

from __future__ import annotations

import pytest
import torch

from paceline_engine.kernels import logprobs as kernel
from paceline_engine.sampling.logprobs import token_logprobs


@pytest.mark.parametrize(
    ("vocab_size", "num_top", "dtype"),
    [(517, 5, torch.float32), (1000, 20, torch.bfloat16), (3, 20, torch.float32), (300, 0, torch.float32)],
)
def test_logprobs_and_ranks_are_the_cpus(vocab_size, num_top, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(6, 2 * vocab_size) * 5 + 80).to(dtype)[:, :vocab_size]
    logits[1, 1:] = -torch.inf
    tokens = torch.tensor([0, 0, 1, 2, vocab_size - 1, 1])
    got = kernel.token_logprobs(logits, tokens, num_top, tile=256)
    expected = token_logprobs(logits.float().contiguous(), tokens.tolist(), [num_top] * 6)
    assert got.ranks.tolist() == [record.rank for record in expected]
    torch.testing.assert_close(got.logprobs.tolist(), [record.logprob for record in expected], atol=2e-6, rtol=1e-6)
    for index, record in enumerate(expected):
        top = [logprob for _, logprob in record.top]
        torch.testing.assert_close(got.top_logprobs[index].tolist(), top, atol=2e-6, rtol=1e-6)
        values = logits[index, got.top_ids[index]].tolist()
        assert values == [logits[index, token].item() for token, _ in record.top]


def test_no_rows():
    got = kernel.token_logprobs(torch.empty(0, 64), torch.empty(0, dtype=torch.int64), 3)
    assert got.top_ids.shape == (0, 3)
