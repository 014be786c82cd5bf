"""Counter-based noise: a pure function of (seed, position, token id, stream), never a generator with state.

argmax(x + g) with Gumbel noise g draws from softmax(x) (the Gumbel-max trick). Nothing but a request's own seed and
positions enters, so a seeded request gives the same text alone, in any batch and after a preemption. The hash is
SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
KeyArray = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3, _UNUSED_BITS = (np.uint64(n) for n in (30, 27, 31, 11))
# Tokens this far below the likeliest one are looked at only where their noise is extreme.
_NEAR = 6.0


class Stream(IntEnum):
    """What a number is drawn for. Streams of one (seed, position) are independent of each other."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def mix(x: KeyArray) -> KeyArray:
    """SplitMix64's output function, element by element; arithmetic modulo 2^64."""
    x = (x ^ (x >> _SHIFT_1)) * _MULTIPLY_1
    x = (x ^ (x >> _SHIFT_2)) * _MULTIPLY_2
    return x ^ (x >> _SHIFT_3)


def row_keys(seeds: Sequence[int], positions: Sequence[int], stream: Stream = Stream.TOKEN) -> KeyArray:
    """[rows] keys. Seeds count modulo 2^64."""
    seed = np.array([(value + _GOLDEN) & _MASK for value in seeds], dtype=np.uint64)
    offset = np.array([(position + 1) * _GOLDEN & _MASK for position in positions], dtype=np.uint64)
    keys = mix(mix(seed) + offset)
    return keys if stream is Stream.TOKEN else mix(keys + np.uint64(stream * _GOLDEN & _MASK))


def _uniform(bits: KeyArray) -> FloatArray:
    """53 bits, centred in their interval: never exactly 0 or 1, so both logarithms below are finite."""
    return ((bits >> _UNUSED_BITS).astype(np.float64) + 0.5) * 2.0**-53


def uniforms(keys: KeyArray) -> FloatArray:
    """[rows] one number in (0, 1) for each key."""
    return _uniform(mix(keys + np.uint64(_GOLDEN)))


def gumbel_at(keys: KeyArray | np.uint64, token_ids: IntArray) -> FloatArray:
    """Gumbel noise of tokens; shapes broadcast, so keys [rows, 1] and ids [vocab] give [rows, vocab]."""
    counters = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return -np.log(-np.log(_uniform(mix(keys + counters))))


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> FloatArray:
    """[rows, vocab_size] noise of the TOKEN stream."""
    return gumbel_at(row_keys(seeds, positions)[:, None], np.arange(vocab_size))


class GumbelDraw:
    """argmax(x + noise) over a whole vocabulary without most of its noise.

    A token below the maximum by more than _NEAR wins only if its noise is large, which the hash tells before any
    logarithm is taken. Equal to the plain formula, tens of times faster; holds two scratch rows.
    """

    def __init__(self, vocab_size: int) -> None:
        self._counters = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._bits = np.empty(vocab_size, dtype=np.uint64)
        self._shifted = np.empty(vocab_size, dtype=np.uint64)

    def __call__(self, x: Float32Array, key: np.uint64) -> int:
        """The winner for one row [vocab] whose maximum is finite; -inf is never drawn."""
        maximum = float(x.max())
        near = np.flatnonzero(x >= maximum - _NEAR)
        scores = x[near] + gumbel_at(key, near)
        best = float(scores.max())
        # Anyone else's noise must exceed this; rounding of the bound is on the safe side.
        needed = best - (maximum - _NEAR) - 1e-6
        far = np.flatnonzero(self._hash(key) >= np.uint64(_least_bits(needed)))
        far = far[x[far] < maximum - _NEAR]
        if far.size:
            far_scores = x[far] + gumbel_at(key, far)
            if far_scores.max() > best:
                return int(far[far_scores.argmax()])
        return int(near[scores.argmax()])

    def _hash(self, key: np.uint64) -> KeyArray:
        """`mix` without its last step, which leaves the leading 31 bits alone; in place, since this is the hot loop."""
        bits, shifted = self._bits, self._shifted
        np.add(self._counters, key, out=bits)
        np.right_shift(bits, _SHIFT_1, out=shifted)
        np.bitwise_xor(bits, shifted, out=bits)
        np.multiply(bits, _MULTIPLY_1, out=bits)
        np.right_shift(bits, _SHIFT_2, out=shifted)
        np.bitwise_xor(bits, shifted, out=bits)
        np.multiply(bits, _MULTIPLY_2, out=bits)
        return bits


def _least_bits(gumbel: float) -> int:
    """A lower bound, exact in its leading 31 bits, on hashes whose noise is at least `gumbel`."""
    uniform = math.exp(-math.exp(min(-gumbel, 700.0)))
    return min(int(uniform * 2.0**31), 2**31 - 1) << 33
