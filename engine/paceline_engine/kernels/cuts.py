"""Which tokens of each row may be drawn: min_p, then top_k, then top_p, without a sort.

Each cut is "every token above a value, and the first few of those equal to it", so it is found by bisection: how many
tokens, or how much probability, lie above a pivot. A pass over the row answers that for one pivot; once few enough
values are between the bounds they are gathered, and the rest of the search is among these. After Park et al., "Qrita"
(arXiv 2602.01518) and FlashInfer (arXiv 2501.01005). The same tokens as `paceline_engine.sampling.cuts.kept_tokens`,
up to float32's rounding of the sum of probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline_engine.sampling.row import MIN_TEMPERATURE

_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
# Most cuts are at tokens at most this far below the likeliest one, in nats; the first pivot.
_NEAR = tl.constexpr(8.0)
_NO_LIMIT = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """How each row is drawn, fields [rows] as in SamplingParams; cuts that no row has are None.

    temperature, top_p, min_p float32; top_k int32; seeds int64, modulo 2^64; positions int64: of the token to draw.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Cuts:
    """Tokens above thresholds[row] may be drawn, and those equal to it with ids up to last_ids[row]."""

    thresholds: torch.Tensor
    last_ids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CutsTiling:
    """tile: values that a program looks at together; capacity: how many gathered values end the passes over the row."""

    tile: int = 4096
    capacity: int = 8192
    num_warps: int = 16


@triton.jit
def is_greedy(temperature_ptr, top_k_ptr, row):
    """Whether the row takes its likeliest token."""
    greedy = tl.load(temperature_ptr + row) < _MIN_TEMPERATURE
    if top_k_ptr is not None:
        greedy = greedy | (tl.load(top_k_ptr + row) == 1)
    return greedy


@triton.jit
def load_scaled(row_ptr, ids, vocab_size, temperature):
    """Logits after temperature, float32 and rounded as on the CPU; -inf behind the vocabulary."""
    values = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(values, temperature)


@triton.jit
def load_kept(values, ids, thresholds_ptr, last_ids_ptr, row):
    """Which of a row's values may be drawn; all where there are no cuts."""
    is_kept = values > float("-inf")
    if thresholds_ptr is not None:
        threshold = tl.load(thresholds_ptr + row)
        is_kept = (values > threshold) | ((values == threshold) & (ids <= tl.load(last_ids_ptr + row)))
    return is_kept


@triton.jit
def _key(value):
    """An int32 that orders floats as they are ordered."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Half way; their sum may not fit into 32 bits."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _maximum(row_ptr, vocab_size, temperature, TILE: tl.constexpr):
    """The row's highest value; NaN if it holds one."""
    highest = tl.full([TILE], float("-inf"), tl.float32)
    is_nan = tl.zeros([TILE], tl.int32)
    for begin in range(0, vocab_size, TILE):
        values = load_scaled(row_ptr, begin + tl.arange(0, TILE), vocab_size, temperature)
        is_nan |= (values != values).to(tl.int32)
        highest = tl.maximum(highest, tl.where(values != values, float("-inf"), values))
    return tl.where(tl.max(is_nan, axis=0) > 0, float("nan"), tl.max(highest, axis=0))


@triton.jit
def _above(source_ptr, size, temperature, pivot, maximum, TILE: tl.constexpr):
    """How many values exceed `pivot`, and the sum of their exp(value - maximum)."""
    count = tl.zeros([TILE], tl.int32)
    weight = tl.zeros([TILE], tl.float32)
    for begin in range(0, size, TILE):
        values = load_scaled(source_ptr, begin + tl.arange(0, TILE), size, temperature)
        is_above = values > pivot
        count += is_above.to(tl.int32)
        weight += tl.where(is_above, tl.exp(values - maximum), 0.0)
    return tl.sum(count, axis=0), tl.sum(weight, axis=0)


@triton.jit
def _gather(row_ptr, scratch_ptr, vocab_size, temperature, low, high, TILE: tl.constexpr):
    """Write the row's values in (low, high] one after the other; returns how many."""
    size = 0
    for begin in range(0, vocab_size, TILE):
        values = load_scaled(row_ptr, begin + tl.arange(0, TILE), vocab_size, temperature)
        is_between = (values > low) & (values <= high)
        found = tl.sum(is_between.to(tl.int32), axis=0)
        if found > 0:
            places = size + tl.cumsum(is_between.to(tl.int32), axis=0) - 1
            tl.store(scratch_ptr + places, values, mask=is_between)
        size += found
    # What other threads of this program wrote is read next.
    tl.debug_barrier()
    return size


@triton.jit
def _bisect(
    source_ptr,
    size,
    temperature,
    maximum,
    base_count,
    base_weight,
    low,
    high,
    pivot,
    low_count,
    count,
    weight,
    most,
    share,
    ENOUGH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Narrow (low, high] around the least key above which are fewer than `most` tokens and less weight than `share`.

    Above low are low_count tokens, above high `count` of `weight`; base_count and base_weight of them aren't in the
    source. Ends with at most ENOUGH tokens between the bounds, or none but equal ones.
    """
    while (high - 1 > low) & (low_count - count > ENOUGH):
        more, heavier = _above(source_ptr, size, temperature, _value(pivot), maximum, TILE)
        more += base_count
        heavier += base_weight
        if (more < most) & (heavier < share):
            high = pivot
            count = more
            weight = heavier
        else:
            low = pivot
            low_count = more
        pivot = _middle(low, high)
    return low, high, low_count, count, weight


@triton.jit
def _search(
    row_ptr,
    scratch_ptr,
    vocab_size,
    temperature,
    maximum,
    low,
    low_count,
    most,
    share,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """(key, count, weight, ties): the least key above which are fewer than `most` tokens and less weight than `share`.

    That is not so above `low`, where low_count tokens are. `count` of `weight` are above the key, `ties` equal to it.
    """
    high = _key(maximum)
    pivot = _key(maximum - _NEAR)
    pivot = tl.where(pivot > low, pivot, _middle(low, high))
    low, high, low_count, count, weight = _bisect(
        *(row_ptr, vocab_size, temperature, maximum, 0, 0.0),
        *(low, high, pivot, low_count, low_count * 0, maximum * 0.0, most, share, CAPACITY, TILE),
    )
    if high - 1 > low:
        size = _gather(row_ptr, scratch_ptr, vocab_size, temperature, _value(low), _value(high), TILE)
        low, high, low_count, count, weight = _bisect(
            *(scratch_ptr, size, 1.0, maximum, count, weight),
            *(low, high, _middle(low, high), low_count, count, weight, most, share, 0, TILE),
        )
    return high, count, weight, low_count - count


@triton.jit
def _last_equal(row_ptr, vocab_size, temperature, threshold, nth, TILE: tl.constexpr):
    """Id of the row's nth value that equals `threshold`, from 1."""
    last = vocab_size - 1
    seen = 0
    begin = 0
    while (begin < vocab_size) & (seen < nth):
        ids = begin + tl.arange(0, TILE)
        is_equal = (load_scaled(row_ptr, ids, vocab_size, temperature) == threshold).to(tl.int32)
        places = seen + tl.cumsum(is_equal, axis=0)
        is_nth = (is_equal > 0) & (places == nth)
        last = tl.minimum(last, tl.min(tl.where(is_nth, ids, vocab_size - 1), axis=0))
        seen += tl.sum(is_equal, axis=0)
        begin += TILE
    return last


@triton.jit
def cuts_kernel(
    thresholds_ptr,
    last_ids_ptr,
    scratch_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    vocab_size,
    logits_stride,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """See `find_cuts`. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    temperature, most = tl.load(temperature_ptr + row), vocab_size
    top_p, min_p = tl.full([], 1.0, tl.float32), tl.full([], 0.0, tl.float32)
    if top_k_ptr is not None:
        most = tl.load(top_k_ptr + row)
        most = tl.where((most <= 0) | (most > vocab_size), vocab_size, most)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + row)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + row)
    tl.store(thresholds_ptr + row, float("-inf"))
    tl.store(last_ids_ptr + row, -1)
    if is_greedy(temperature_ptr, top_k_ptr, row) or (most == vocab_size and top_p >= 1.0 and min_p <= 0.0):
        return
    source = logits_ptr + row * logits_stride
    scratch = scratch_ptr + row * CAPACITY
    maximum = _maximum(source, vocab_size, temperature, TILE)
    # Neither NaN nor an infinity: those rows are an error, which the draw reports.
    if not (tl.abs(maximum) < float("inf")):
        return
    # Kept are `count` tokens of `weight` above low and the first `extra` of those equal to it; cut: there are more.
    low = _key(tl.full([], float("-inf"), tl.float32))
    if min_p > 0.0:
        low = _key((maximum.to(tl.float64) + tl.log(min_p.to(tl.float64))).to(tl.float32)) - 1
    count, weight = _above(source, vocab_size, temperature, _value(low), maximum, TILE)
    extra, cut = 0, 0
    if count > most:
        low, count, weight, ties = _search(
            *(source, scratch, vocab_size, temperature, maximum, low, count, most, float("inf"), CAPACITY, TILE)
        )
        extra = most - count
        cut = (extra < ties).to(tl.int32)
    if top_p < 1.0:
        share = top_p * (weight + extra * tl.exp(_value(low) - maximum))
        ties = extra
        if weight >= share:
            low, count, weight, ties = _search(
                *(source, scratch, vocab_size, temperature, maximum, low, count, _NO_LIMIT, share, CAPACITY, TILE)
            )
            cut = 0
        fill = tl.ceil((share - weight) / tl.exp(_value(low) - maximum))
        extra = tl.maximum(tl.minimum(fill, ties.to(tl.float32)).to(tl.int32), 1)
        cut |= (extra < ties).to(tl.int32)
    tl.store(thresholds_ptr + row, _value(low))
    if cut > 0:
        tl.store(last_ids_ptr + row, _last_equal(source, vocab_size, temperature, _value(low), extra, TILE))
    elif extra > 0:
        tl.store(last_ids_ptr + row, vocab_size)


def find_cuts(logits: torch.Tensor, sampling: SamplingRows, tiling: CutsTiling | None = None) -> Cuts | None:
    """Cuts of logits [rows, vocab] (float32 or bfloat16, rows any stride apart) after rules; None if no row has any.

    Rows that are greedy, or hold NaN or an infinity, are left whole.
    """
    rows, vocab_size = logits.shape
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    if rows == 0 or (top_k is None and top_p is None and min_p is None):
        return None
    assert logits.stride(1) == 1
    tiling = tiling or CutsTiling()
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    last_ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    scratch = torch.empty(rows, tiling.capacity, dtype=torch.float32, device=logits.device)
    cuts_kernel[(rows,)](
        *(thresholds, last_ids, scratch, logits, sampling.temperature, top_k, top_p, min_p),
        *(vocab_size, logits.stride(0)),
        CAPACITY=tiling.capacity,
        TILE=tiling.tile,
        num_warps=tiling.num_warps,
    )
    return Cuts(thresholds, last_ids)
