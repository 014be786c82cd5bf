"""One token for each row of logits, without a sort and without a generator: argmax(logits / temperature + noise).

The Gumbel-max trick with the CPU sampler's noise, so a seed gives the same token as there. A row is split over several
programs where rows are few; one program more a row takes the best of their bests. Rules (`rules.py`) come before, cuts
(`cuts.py`) are given as a threshold a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline_engine.kernels.cuts import Cuts, CutsTiling, SamplingRows, find_cuts, is_greedy, load_kept
from paceline_engine.kernels.noise import gumbel, row_key
from paceline_engine.sampling.noise import Stream

# Results that aren't tokens. The caller knows whether rules could have excluded all: without any it's not finite.
NO_TOKEN = -1
NOT_FINITE = -2
NOTHING_ALLOWED = -3

NO_TOKEN_ = tl.constexpr(NO_TOKEN)
NOT_FINITE_ = tl.constexpr(NOT_FINITE)
NOTHING_ALLOWED_ = tl.constexpr(NOTHING_ALLOWED)
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def best_of(scores, ids):
    """(highest score, the lowest id that has it) of two vectors."""
    highest = tl.max(scores, axis=0)
    return highest, tl.min(tl.where(scores == highest, ids, _NO_ID), axis=0)


@triton.jit
def draw_kernel(
    tokens_ptr,
    scores_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    seeds_ptr,
    positions_ptr,
    thresholds_ptr,
    last_ids_ptr,
    skip_ptr,
    vocab_size,
    logits_stride,
    split_size,
    STREAM: tl.constexpr,
    TILE: tl.constexpr,
):
    """See `draw`. Grid: (rows, splits)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + split
    skip = 0
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + row).to(tl.int32)
    if skip != 0:
        tl.store(tokens_ptr + place, NO_TOKEN_)
        tl.store(scores_ptr + place, 0.0)
        return
    temperature, greedy = tl.load(temperature_ptr + row), is_greedy(temperature_ptr, top_k_ptr, row)
    key = row_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), STREAM)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_ids = tl.full([TILE], _NO_ID, tl.int32)
    is_nan = tl.zeros([TILE], tl.int32)
    end = tl.minimum(vocab_size, (split + 1) * split_size)
    for begin in range(split * split_size, end, TILE):
        ids = begin + tl.arange(0, TILE)
        values = tl.load(logits_ptr + row * logits_stride + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
        is_nan |= (values != values).to(tl.int32)
        if not greedy:
            values = tl.div_rn(values, temperature)
            is_kept = load_kept(values, ids, thresholds_ptr, last_ids_ptr, row)
            values = tl.where(is_kept, values + gumbel(key, ids), float("-inf"))
        is_better = values > best
        best = tl.where(is_better, values, best)
        best_ids = tl.where(is_better, ids, best_ids)
    score, token = best_of(best, best_ids)
    not_finite = (tl.max(is_nan, axis=0) > 0) | (score == float("inf"))
    token = tl.where(score == float("-inf"), NOTHING_ALLOWED_, token)
    tl.store(tokens_ptr + place, tl.where(not_finite, NOT_FINITE_, token))
    tl.store(scores_ptr + place, tl.where(not_finite, float("inf"), score))


@triton.jit(do_not_specialize=["num_splits"])
def best_split_kernel(tokens_ptr, split_tokens_ptr, scores_ptr, num_splits, SPLITS_PADDED: tl.constexpr):
    """Of each row the token with the highest score, the first among equals. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS_PADDED)
    is_split = splits < num_splits
    scores = tl.load(scores_ptr + row * num_splits + splits, mask=is_split, other=float("-inf"))
    _, first = best_of(scores, splits)
    tl.store(tokens_ptr + row, tl.load(split_tokens_ptr + row * num_splits + first))


def choose_num_splits(rows: int, vocab_size: int, num_processors: int) -> int:
    """Programs a row that give each processor of the device work; none with fewer than 4,096 tokens."""
    wanted = triton.cdiv(2 * num_processors, max(1, rows))
    return max(1, min(wanted, triton.cdiv(vocab_size, 4096), 64))


def draw(
    logits: torch.Tensor,
    sampling: SamplingRows,
    cuts: Cuts | None = None,
    *,
    stream: Stream = Stream.TOKEN,
    skip: torch.Tensor | None = None,
    num_splits: int = 1,
    tile: int = 1024,
    num_warps: int = 4,
) -> torch.Tensor:
    """[rows] int64 tokens from logits [rows, vocab] (float32 or bfloat16, rows any stride apart) after rules.

    A row with NaN or infinity gives NOT_FINITE, one that is -inf throughout NOTHING_ALLOWED; rows of `skip` [rows]
    bool aren't looked at and give NO_TOKEN.
    """
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    assert logits.stride(1) == 1
    split_size = triton.cdiv(triton.cdiv(vocab_size, num_splits), tile) * tile
    num_splits = triton.cdiv(vocab_size, split_size)
    split_tokens = tokens if num_splits == 1 else torch.empty(rows, num_splits, dtype=torch.int64, device=logits.device)
    scores = torch.empty(rows, num_splits, dtype=torch.float32, device=logits.device)
    thresholds, last_ids = (None, None) if cuts is None else (cuts.thresholds, cuts.last_ids)
    draw_kernel[(rows, num_splits)](
        *(split_tokens, scores, logits, sampling.temperature, sampling.top_k, sampling.seeds, sampling.positions),
        *(thresholds, last_ids, skip, vocab_size, logits.stride(0), split_size),
        STREAM=int(stream),
        TILE=tile,
        num_warps=num_warps,
    )
    if num_splits > 1:
        best_split_kernel[(rows,)](
            *(tokens, split_tokens, scores, num_splits),
            SPLITS_PADDED=triton.next_power_of_2(num_splits),
            num_warps=1,
        )
    return tokens


def sample(
    logits: torch.Tensor,
    sampling: SamplingRows,
    *,
    stream: Stream = Stream.TOKEN,
    num_splits: int = 1,
    tiling: CutsTiling | None = None,
) -> torch.Tensor:
    """`find_cuts` and `draw` in one."""
    cuts = find_cuts(logits, sampling, tiling)
    return draw(logits, sampling, cuts, stream=stream, num_splits=num_splits)
