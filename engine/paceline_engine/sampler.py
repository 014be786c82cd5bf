"""From logits to tokens: greedy, or temperature, top-k and top-p with counter-based Gumbel noise.

argmax(logits / T + g) with Gumbel g draws from softmax(logits / T) (the Gumbel-max trick). The noise of a token is a
hash of (seed, position, token id), not a draw from a generator with state: a seeded request gives the same text alone,
in any batch and after a preemption, because nothing but its own seed and positions enters. The hash is SplitMix64
(Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline_engine.core.outputs import ScheduledRequest, StepResult
from paceline_engine.messages import SamplingParams

# Below this the softmax is a one-hot within float32, and logits / T may overflow.
MIN_TEMPERATURE = 1e-5
NOT_FINITE = "the model's output for this request isn't finite (NaN or infinity); the request can't go on"


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch calculates with; its arithmetic wraps like the unsigned one."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's >> on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function, element by element."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> torch.Tensor:
    """[rows, vocab_size] float64 Gumbel noise, a pure function of (seed, position, token id)."""
    seed = torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64)
    position = torch.tensor(positions, dtype=torch.int64)
    row_key = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    counter = torch.arange(1, vocab_size + 1, dtype=torch.int64) * _GOLDEN
    bits = _shift_right(_mix(row_key[:, None] + counter[None, :]), 11)
    # 53 bits, centred in their interval: never exactly 0 or 1, so both logarithms are finite.
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _keep_likely(scaled: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """One row with all but the top_k most likely tokens at -inf, then all but the smallest set with mass top_p."""
    limit = min(top_k, scaled.shape[-1]) if top_k > 0 else scaled.shape[-1]
    if limit == scaled.shape[-1] and top_p >= 1.0:
        return scaled
    values, token_ids = torch.topk(scaled, limit) if limit < scaled.shape[-1] else scaled.sort(descending=True)
    if top_p < 1.0:
        probabilities = values.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        keep = before < top_p
        keep[0] = True
        values, token_ids = values[keep], token_ids[keep]
    return torch.full_like(scaled, -torch.inf).scatter_(0, token_ids, values)


def _sample_rows(logits: torch.Tensor, positions: Sequence[int], params: Sequence[SamplingParams]) -> list[int]:
    """Draw one token for each row [rows, vocab]; every temperature is above MIN_TEMPERATURE."""
    temperatures = torch.tensor([sampling.temperature for sampling in params], dtype=torch.float32)
    scaled = logits / temperatures[:, None]
    for row, sampling in enumerate(params):
        scaled[row] = _keep_likely(scaled[row], sampling.top_k, sampling.top_p)
    noise = gumbel_noise([sampling.seed for sampling in params], positions, logits.shape[-1])
    choices: list[int] = (scaled.double() + noise).argmax(-1).tolist()
    return choices


@torch.inference_mode()
def sample(
    logits: torch.Tensor, items: Sequence[ScheduledRequest], params: Sequence[SamplingParams]
) -> list[StepResult]:
    """One token for each item from its row of `logits` [items, vocab] float32, drawn as `params` says.

    A row that isn't finite where it matters yields an error for that request only; the other rows are unaffected.
    """
    if not items:
        return []
    best, token_ids = (column.tolist() for column in logits.max(dim=-1))
    # max() hands NaN on, and a row of -inf has -inf as its maximum.
    finite = [-float("inf") < value < float("inf") for value in best]
    drawn = [
        row
        for row, sampling in enumerate(params)
        if finite[row] and sampling.temperature >= MIN_TEMPERATURE and sampling.top_k != 1
    ]
    if drawn:
        choices = _sample_rows(logits[drawn], [items[row].end for row in drawn], [params[row] for row in drawn])
        for row, token_id in zip(drawn, choices, strict=True):
            token_ids[row] = token_id
    return [
        StepResult(item.request_id, (token_ids[row],)) if finite[row] else StepResult(item.request_id, error=NOT_FINITE)
        for row, item in enumerate(items)
    ]
