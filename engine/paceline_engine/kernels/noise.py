"""The CPU sampler's noise on the device: a pure function of (seed, position, token id, stream).

The integers are those of `paceline_engine.sampling.noise`, bit for bit; only the logarithms are taken in float32, so a
seed gives the same token on both unless two scores are equal to about six digits. Functions for other kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB)
_MASK = tl.constexpr((1 << 64) - 1)
_HIGHEST_53 = tl.constexpr((1 << 53) - 1)
_TO_UNIT = tl.constexpr(2.0**-53)


@triton.jit
def mix(x):
    """SplitMix64's output function, of uint64."""
    x = (x ^ (x >> 30)) * _MULTIPLY_1
    x = (x ^ (x >> 27)) * _MULTIPLY_2
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, position, STREAM: tl.constexpr):
    """Key of a position's numbers; seed and position int64, STREAM a value of `sampling.noise.Stream`."""
    key = mix(mix(seed.to(tl.uint64) + _GOLDEN) + (position.to(tl.uint64) + 1) * _GOLDEN)
    if STREAM != 0:
        key = mix(key + ((STREAM * _GOLDEN) & _MASK))
    return key


@triton.jit
def uniform(key):
    """One number in (0, 1), in float64: the CPU's exactly."""
    return ((mix(key + _GOLDEN) >> 11).to(tl.float64) + 0.5) * _TO_UNIT


@triton.jit
def gumbel(key, token_ids):
    """Gumbel noise -log(-log(u)) of tokens, in float32 to about six digits for every u.

    A large noise comes from u just below 1, which float32 can't hold: there the logarithm is a series in 1 - u.
    """
    bits = mix(key + (token_ids.to(tl.uint64) + 1) * _GOLDEN) >> 11
    from_0 = (bits.to(tl.float32) + 0.5) * _TO_UNIT
    from_1 = ((bits ^ _HIGHEST_53).to(tl.float32) + 0.5) * _TO_UNIT
    series = 0.25 + from_1 * (0.2 + from_1 * (1.0 / 6.0))
    series = from_1 * (1.0 + from_1 * (0.5 + from_1 * (1.0 / 3.0 + from_1 * series)))
    return -tl.log(tl.where(from_1 < 0.0625, series, -tl.log(from_0)))
