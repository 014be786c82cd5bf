"""Log probabilities to report, from logits before rules, without a row of log probabilities.

One pass a row gives the log of the softmax's sum and the chosen token's rank; alternatives are torch's topk. The same
numbers as `paceline_engine.sampling.logprobs.token_logprobs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities float64. logprobs, ranks (from 1) [rows]: of the given tokens; top_* [rows, num_top]."""

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


@triton.jit
def online_sum(highest, total, values):
    """Per lane, the highest value and the sum of exp(value - highest), taken further over one more tile."""
    new_highest = tl.maximum(highest, values)
    # A lane that has seen -inf only: exp(-inf - -inf) would be NaN.
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    return new_highest, total * tl.exp(highest - shift) + tl.exp(values - shift)


@triton.jit
def total_of_lanes(highest, total):
    """(highest, sum of exp(value - highest)) of all lanes."""
    top = tl.max(highest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(total * tl.exp(highest - shift), axis=0)


@triton.jit
def logprobs_kernel(sums_ptr, ranks_ptr, logits_ptr, tokens_ptr, vocab_size, logits_stride, TILE: tl.constexpr):
    """See `token_logprobs`. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    source = logits_ptr + row * logits_stride
    chosen = tl.load(source + tl.load(tokens_ptr + row)).to(tl.float32)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    above = tl.zeros([TILE], tl.int32)
    for begin in range(0, vocab_size, TILE):
        ids = begin + tl.arange(0, TILE)
        values = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        above += (values > chosen).to(tl.int32)
        highest, total = online_sum(highest, total, values)
    top, total_sum = total_of_lanes(highest, total)
    # float64: rounded to float32, the sum would shift all of the row's log probabilities alike.
    tl.store(sums_ptr + row, top.to(tl.float64) + tl.log(total_sum.to(tl.float64)))
    tl.store(ranks_ptr + row, tl.sum(above, axis=0) + 1)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, *, tile: int = 2048, num_warps: int = 8
) -> Logprobs:
    """Of logits [rows, vocab] (float32 or bfloat16, rows any stride apart) and their tokens [rows] int64."""
    rows, vocab_size = logits.shape
    sums = torch.empty(rows, dtype=torch.float64, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    assert logits.stride(1) == 1
    if rows > 0:
        logprobs_kernel[(rows,)](
            *(sums, ranks, logits, token_ids, vocab_size, logits.stride(0)), TILE=tile, num_warps=num_warps
        )
    own = logits.gather(1, token_ids[:, None])[:, 0].double() - sums
    values, ids = logits.topk(min(num_top, vocab_size), dim=-1)
    return Logprobs(own, ranks, ids, values.double() - sums[:, None])
