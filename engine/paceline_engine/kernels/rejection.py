"""Verification of speculative guesses, so that the output has the target's distribution; in two launches.

The first decides every guess by itself, a program a row; the second walks a request's rows to the first guess that
doesn't stand and draws its replacement, a program a request. Arithmetic and noise are those of
`paceline_engine.sampling.speculation` and of the CPU's sampler, so the same seeds accept the same guesses.

A guess for which a distribution q is known stands with min(1, p / q), else it is replaced from max(p - q, 0). Without
one it stands if it is what is drawn anyway, unless the lenience is below 1: then all of q is on the guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline_engine.kernels.cuts import Cuts, SamplingRows, is_greedy, load_kept, load_scaled
from paceline_engine.kernels.logprobs import online_sum, total_of_lanes
from paceline_engine.kernels.noise import gumbel, row_key, uniform
from paceline_engine.kernels.sampling import (
    NO_TOKEN,
    NO_TOKEN_,
    NOT_FINITE_,
    NOTHING_ALLOWED_,
    best_of,
)
from paceline_engine.sampling.noise import Stream

_REFUSED = tl.constexpr(-4)
_NO_ID = tl.constexpr(2**31 - 1)
_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_RESIDUAL = tl.constexpr(int(Stream.RESIDUAL))


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """What is verified: request r has rows begins[r] to begins[r + 1] of the logits, the last one without a guess.

    begins [requests + 1] int32; token_ids [rows] int64, NO_TOKEN in the last row of each request; most: guesses of any
    request; by_ratio [rows], not 0 where p / q decides and not a draw: never where a row is greedy, else where q is
    known or the lenience below 1. Row i's guess was drawn from row draft_rows[i] (int32; -1: unknown) of
    draft_probabilities [any, vocab] float32; both None where none is known. A guess that ends the output is a request's
    last: rows behind it have no guess, and nothing is drawn for them.
    """

    begins: torch.Tensor
    token_ids: torch.Tensor
    most: int
    by_ratio: torch.Tensor
    draft_probabilities: torch.Tensor | None = None
    draft_rows: torch.Tensor | None = None


@triton.jit
def _load_draft(draft_ptr, draft_row, draft_stride, ids, guess, vocab_size):
    """What the guess was drawn from, at `ids`; all on the guess itself where that isn't known."""
    q = tl.where(ids == guess, 1.0, 0.0)
    if draft_ptr is not None:
        source = draft_ptr + tl.maximum(draft_row, 0).to(tl.int64) * draft_stride
        q = tl.where(draft_row >= 0, tl.load(source + ids, mask=ids < vocab_size, other=0.0), q)
    return q


@triton.jit
def _softmax_of(row_ptr, vocab_size, temperature, thresholds_ptr, last_ids_ptr, row, TILE: tl.constexpr):
    """(highest, sum of exp(value - highest)) over the tokens that may be drawn; highest is NaN if the row holds one."""
    highest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    is_nan = tl.zeros([TILE], tl.int32)
    for begin in range(0, vocab_size, TILE):
        ids = begin + tl.arange(0, TILE)
        values = load_scaled(row_ptr, ids, vocab_size, temperature)
        # An infinity is reported as NaN is, and kept out of the sums.
        is_bad = (values != values) | (values == float("inf"))
        is_nan |= is_bad.to(tl.int32)
        is_kept = load_kept(values, ids, thresholds_ptr, last_ids_ptr, row) & (is_bad == 0)
        highest, total = online_sum(highest, total, tl.where(is_kept, values, float("-inf")))
    top, total_sum = total_of_lanes(highest, total)
    return tl.where(tl.max(is_nan, axis=0) > 0, float("nan"), top), total_sum


@triton.jit
def _probability(values, is_kept, highest, total):
    """exp(value - highest) / total of tokens that may be drawn; anything for rows that are an error."""
    shift = tl.where(highest > float("-inf"), highest, 0.0)
    return tl.where(is_kept, tl.exp(values - shift), 0.0) / tl.where(total > 0.0, total, 1.0)


@triton.jit
def decide_kernel(
    decided_ptr,
    highest_ptr,
    totals_ptr,
    logits_ptr,
    guesses_ptr,
    drawn_ptr,
    by_ratio_ptr,
    draft_ptr,
    draft_rows_ptr,
    temperature_ptr,
    top_k_ptr,
    seeds_ptr,
    positions_ptr,
    thresholds_ptr,
    last_ids_ptr,
    lenience,
    log_lenience,
    vocab_size,
    logits_stride,
    draft_stride,
    TILE: tl.constexpr,
):
    """The token of each row, or _REFUSED if a replacement of its guess must be drawn. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    source = logits_ptr + row * logits_stride
    guess, token = tl.load(guesses_ptr + row), tl.load(drawn_ptr + row)
    if tl.load(by_ratio_ptr + row) != 0:
        temperature = tl.load(temperature_ptr + row)
        highest, total = _softmax_of(source, vocab_size, temperature, thresholds_ptr, last_ids_ptr, row, TILE)
        tl.store(highest_ptr + row, highest)
        tl.store(totals_ptr + row, total)
        draft_row = -1
        if draft_rows_ptr is not None:
            draft_row = tl.load(draft_rows_ptr + row)
        value = load_scaled(source, guess, vocab_size, temperature)
        is_kept = load_kept(value, guess, thresholds_ptr, last_ids_ptr, row)
        p = _probability(value, is_kept, highest, total)
        q = _load_draft(draft_ptr, draft_row, draft_stride, guess, guess, vocab_size)
        number = uniform(row_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), _ACCEPT))
        token = tl.where(number * q.to(tl.float64) * lenience < p.to(tl.float64), guess, _REFUSED)
        token = tl.where(highest == float("-inf"), NOTHING_ALLOWED_, token)
        token = tl.where(highest != highest, NOT_FINITE_, token)
    elif (guess >= 0) & (token >= 0) & is_greedy(temperature_ptr, top_k_ptr, row):
        best = tl.load(source + token).to(tl.float32)
        token = tl.where(tl.load(source + guess).to(tl.float32) >= best + log_lenience, guess, token)
    tl.store(decided_ptr + row, token)


@triton.jit
def _replacement(
    row_ptr,
    vocab_size,
    temperature,
    thresholds_ptr,
    last_ids_ptr,
    row,
    highest,
    total,
    key,
    guess,
    draft_ptr,
    draft_row,
    draft_stride,
    TILE: tl.constexpr,
):
    """A draw from max(p - q, 0), or from p where rounding leaves nothing of it."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_ids = tl.full([TILE], _NO_ID, tl.int32)
    plain_best, plain_ids = best, best_ids
    for begin in range(0, vocab_size, TILE):
        ids = begin + tl.arange(0, TILE)
        values = load_scaled(row_ptr, ids, vocab_size, temperature)
        is_kept = load_kept(values, ids, thresholds_ptr, last_ids_ptr, row)
        p = _probability(values, is_kept, highest, total)
        rest = p - _load_draft(draft_ptr, draft_row, draft_stride, ids, guess, vocab_size)
        noise = gumbel(key, ids)
        score = tl.where(rest > 0.0, tl.log(tl.where(rest > 0.0, rest, 1.0)) + noise, float("-inf"))
        plain = tl.where(p > 0.0, tl.log(tl.where(p > 0.0, p, 1.0)) + noise, float("-inf"))
        best_ids = tl.where(score > best, ids, best_ids)
        plain_ids = tl.where(plain > plain_best, ids, plain_ids)
        best, plain_best = tl.maximum(best, score), tl.maximum(plain_best, plain)
    score, token = best_of(best, best_ids)
    _, plain_token = best_of(plain_best, plain_ids)
    return tl.where(score > float("-inf"), token, plain_token)


@triton.jit(do_not_specialize=["width"])
def resolve_kernel(
    out_ptr,
    begins_ptr,
    decided_ptr,
    highest_ptr,
    totals_ptr,
    logits_ptr,
    guesses_ptr,
    draft_ptr,
    draft_rows_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    thresholds_ptr,
    last_ids_ptr,
    vocab_size,
    logits_stride,
    draft_stride,
    width,
    TILE: tl.constexpr,
):
    """The guesses that stand and one token more. Grid: (requests,)."""
    request = tl.program_id(0).to(tl.int64)
    begin = tl.load(begins_ptr + request).to(tl.int64)
    end = tl.load(begins_ptr + request + 1).to(tl.int64)
    out = out_ptr + request * width
    row = begin
    while row < end:
        guess, token = tl.load(guesses_ptr + row), tl.load(decided_ptr + row)
        if token == _REFUSED:
            draft_row = -1
            if draft_rows_ptr is not None:
                draft_row = tl.load(draft_rows_ptr + row)
            key = row_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), _RESIDUAL)
            token = _replacement(
                *(logits_ptr + row * logits_stride, vocab_size, tl.load(temperature_ptr + row)),
                *(thresholds_ptr, last_ids_ptr, row, tl.load(highest_ptr + row), tl.load(totals_ptr + row)),
                *(key, guess, draft_ptr, draft_row, draft_stride, TILE),
            ).to(tl.int64)
        tl.store(out + row - begin, token)
        if token < NO_TOKEN_:
            # An error leaves the request without any token.
            for index in range(width):
                tl.store(out + index, tl.where(index == 0, token, NO_TOKEN_))
        row = tl.where(token == guess, row + 1, end)


def verify(
    logits: torch.Tensor,
    guesses: Guesses,
    drawn: torch.Tensor,
    sampling: SamplingRows,
    cuts: Cuts | None = None,
    *,
    lenience: float = 1.0,
    tile: int = 1024,
    num_warps: int = 4,
) -> torch.Tensor:
    """[requests, most + 1] int64: each request's guesses that stand, one token more, then NO_TOKEN.

    logits [rows, vocab] after rules (float32 or bfloat16, rows any stride apart), each position under the rules that
    hold after the guesses before it; drawn [rows]: what `draw` gave for them, NO_TOKEN for those that it skipped. A
    request that meets a row which can't be sampled before it ends has that row's NOT_FINITE or NOTHING_ALLOWED as its
    first entry, and no tokens.
    """
    num_requests, (rows, vocab_size) = guesses.begins.shape[0] - 1, logits.shape
    width = guesses.most + 1
    out = torch.full((num_requests, width), NO_TOKEN, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    assert logits.stride(1) == 1
    draft = guesses.draft_probabilities
    assert draft is None or (draft.stride(1) == 1 and draft.shape[1] == vocab_size)
    draft_stride = 0 if draft is None else draft.stride(0)
    thresholds, last_ids = (None, None) if cuts is None else (cuts.thresholds, cuts.last_ids)
    decided = torch.empty(rows, dtype=torch.int64, device=logits.device)
    highest, totals = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    decide_kernel[(rows,)](
        *(decided, highest, totals, logits, guesses.token_ids, drawn, guesses.by_ratio),
        *(draft, guesses.draft_rows, sampling.temperature, sampling.top_k, sampling.seeds, sampling.positions),
        *(thresholds, last_ids, lenience, math.log(lenience), vocab_size, logits.stride(0), draft_stride),
        TILE=tile,
        num_warps=num_warps,
    )
    resolve_kernel[(num_requests,)](
        *(out, guesses.begins, decided, highest, totals, logits, guesses.token_ids, draft, guesses.draft_rows),
        *(sampling.temperature, sampling.seeds, sampling.positions, thresholds, last_ids),
        *(vocab_size, logits.stride(0), draft_stride, width),
        TILE=tile,
        num_warps=num_warps,
    )
    return out
