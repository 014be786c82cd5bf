"""Which tokens of a row may be drawn: min_p, then top_k, then top_p, on logits after temperature.

Works on one row at a time and sorts only tokens near the maximum: a vocabulary's tail holds almost no probability, so
the search widens from there until the answer is certain. Imports no torch.
"""

from __future__ import annotations

import math

import numpy as np

from paceline_engine.messages import SamplingParams
from paceline_engine.sampling.noise import Float32Array, FloatArray, IntArray

# How far below the maximum tokens are looked for, in nats; the last pass takes all.
_WIDTHS = (8.0, 16.0, math.inf)


def has_cuts(sampling: SamplingParams) -> bool:
    """Whether anything but the whole vocabulary may be left."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def kept_tokens(scaled: Float32Array, sampling: SamplingParams) -> IntArray:
    """Ids, ascending, that may be drawn from a row [vocab] whose maximum is finite; at least one.

    min_p keeps tokens of at least min_p times the likeliest one's probability; top_k that many of them, the first ids
    among equals; top_p the fewest likeliest of the rest that hold that share of the rest's probability.
    """
    maximum = float(scaled.max())
    floor = maximum + math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    for width in _WIDTHS:
        if maximum - width > floor:
            bound, whole = maximum - width, False
        else:
            bound, whole = floor, True
        ids = np.flatnonzero((scaled >= bound) & (scaled > -math.inf))
        kept = _top(scaled, ids, sampling, floor, whole)
        if kept is not None:
            return np.sort(kept)
    raise AssertionError("the last pass takes every token")


def _top(scaled: Float32Array, ids: IntArray, sampling: SamplingParams, floor: float, whole: bool) -> IntArray | None:
    """The kept among `ids`; None if tokens outside of `ids` might belong to them. `whole`: nothing is outside."""
    if sampling.top_k > 0:
        if not whole and len(ids) < sampling.top_k:
            return None
        ids = _top_k(scaled, ids, sampling.top_k)
        whole = True
    values = scaled[ids].astype(np.float64)
    order = np.argsort(-values, kind="stable")
    if sampling.top_p >= 1.0:
        return ids[order] if whole else None
    weights = np.exp(values[order] - float(scaled.max()))
    total = float(weights.sum()) if whole else _total_weight(scaled, floor)
    before = np.cumsum(weights) - weights
    count = int(np.searchsorted(before, sampling.top_p * total, side="left"))
    if not whole and count >= len(order):
        return None
    return ids[order[: max(1, count)]]


def _top_k(scaled: Float32Array, ids: IntArray, count: int) -> IntArray:
    """The `count` likeliest of ascending `ids`, ascending; the first ids among equals."""
    if len(ids) <= count:
        return ids
    values = scaled[ids]
    least = np.partition(values, len(ids) - count)[len(ids) - count]
    above = ids[values > least]
    return np.sort(np.concatenate((above, ids[values == least][: count - len(above)])))


def _total_weight(scaled: Float32Array, floor: float) -> float:
    """Sum of exp(x - maximum) over tokens that min_p leaves."""
    weights = np.exp(scaled - scaled.max())
    return float(weights.sum(dtype=np.float64, where=scaled >= floor))


def probabilities(scaled: Float32Array, sampling: SamplingParams) -> FloatArray:
    """[vocab] float64: the distribution that a draw under the cuts has."""
    result = np.zeros(scaled.shape, dtype=np.float64)
    if has_cuts(sampling):
        ids = kept_tokens(scaled, sampling)
        weights = np.exp(scaled[ids].astype(np.float64) - float(scaled.max()))
        result[ids] = weights / weights.sum()
        return result
    np.exp(scaled.astype(np.float64) - float(scaled.max()), out=result)
    return result / result.sum()
