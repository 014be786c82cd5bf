"""Which guesses stand, and what replaces the first that doesn't, so that the output has the target's distribution.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192): keep a guess
x ~ q with probability min(1, p(x) / q(x)); at the first one refused draw from max(p - q, 0), renormalised; behind the
last one kept draw one token more from p.

A lenience l below 1 keeps a guess with min(1, p(x) / (l q(x))) and is not exact: the output no longer has the target's
distribution. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_engine.sampling.noise import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Guesses that a drafting device drew for one row, and from what.

    position: of the first guess. probabilities [len(token_ids), vocab]: the distribution that each was drawn from; None
    where each was the likeliest token.
    """

    position: int
    token_ids: tuple[int, ...]
    probabilities: npt.NDArray[np.float32] | None


def accepts(p: FloatArray, q: FloatArray, uniforms: FloatArray, lenience: float = 1.0) -> npt.NDArray[np.bool_]:
    """Whether guesses stand that have probability p in the target and q in the drafter; uniforms are in (0, 1)."""
    return uniforms * q * lenience < p


def num_accepted(p: FloatArray, q: FloatArray, uniforms: FloatArray, lenience: float = 1.0) -> IntArray:
    """[rows] how many leading guesses stand; p, q and uniforms are [rows, guesses]."""
    kept = accepts(p, q, uniforms, lenience)
    return np.where(kept.all(-1), kept.shape[-1], kept.argmin(-1)).astype(np.int64)


def residual(p: FloatArray, q: FloatArray) -> FloatArray:
    """max(p - q, 0), renormalised over the last axis; p where rounding leaves nothing of it."""
    rest = np.maximum(p - q, 0.0)
    total = rest.sum(-1, keepdims=True)
    return np.where(total > 0.0, rest / np.where(total > 0.0, total, 1.0), p)
