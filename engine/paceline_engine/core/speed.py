"""How fast the device is, from the durations of its steps.

A step of n tokens takes about alpha + beta * n seconds. Both are fitted by least squares over recent steps, older ones
fading, so that the figures follow the load of the machine. Takes durations; reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

FADE = 0.98
# Steps with at least this share and number of prompt tokens measure prefill; a short prompt's step is mostly alpha.
PREFILL_SHARE = 0.5
PREFILL_TOKENS = 64
PREFILL_FADE = 0.8


class StepSpeed:
    """Running fit of step time. Everything is 0 until a step that took time has been seen.

    largest_share: most prompt tokens that one request can have in a step.
    """

    def __init__(self, largest_share: int = PREFILL_TOKENS) -> None:
        self._prefill_tokens = min(PREFILL_TOKENS, largest_share)
        self.prefill_tokens_per_second = 0.0
        self._weight = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._tokens_squared = 0.0
        self._tokens_seconds = 0.0

    def observe(self, num_tokens: float, num_prefill_tokens: float, seconds: float) -> None:
        """A step of `num_tokens` tokens, some of them prompt tokens, took `seconds`; or the mean of several."""
        if num_tokens <= 0 or seconds <= 0.0:
            return
        self._weight = self._weight * FADE + 1.0
        self._tokens = self._tokens * FADE + num_tokens
        self._seconds = self._seconds * FADE + seconds
        self._tokens_squared = self._tokens_squared * FADE + num_tokens * num_tokens
        self._tokens_seconds = self._tokens_seconds * FADE + num_tokens * seconds
        if num_prefill_tokens >= max(self._prefill_tokens, PREFILL_SHARE * num_tokens):
            measured, known = num_tokens / seconds, self.prefill_tokens_per_second
            share = PREFILL_FADE if known > 0.0 else 0.0
            self.prefill_tokens_per_second = known * share + measured * (1.0 - share)

    def sums(self) -> tuple[float, ...]:
        """The fit's state; what `restore` takes."""
        fit = (self._weight, self._tokens, self._seconds, self._tokens_squared, self._tokens_seconds)
        return (*fit, self.prefill_tokens_per_second)

    def restore(self, sums: Sequence[float]) -> None:
        """Go on from an earlier fit."""
        self._weight, self._tokens, self._seconds, self._tokens_squared, self._tokens_seconds = sums[:5]
        self.prefill_tokens_per_second = sums[5]

    @property
    def beta(self) -> float:
        """Seconds that one token more adds to a step. With steps of one size only, all of it is put down to tokens."""
        if self._weight == 0.0:
            return 0.0
        spread = self._tokens_squared - self._tokens * self._tokens / self._weight
        if spread <= 1e-9 * self._tokens_squared:
            return self._seconds / self._tokens
        slope = (self._tokens_seconds - self._tokens * self._seconds / self._weight) / spread
        return min(max(0.0, slope), self._seconds / self._tokens)

    @property
    def alpha(self) -> float:
        """Seconds of a step whatever its tokens."""
        return max(0.0, (self._seconds - self.beta * self._tokens) / self._weight) if self._weight else 0.0

    def step_seconds(self, num_tokens: int) -> float:
        """What a step of `num_tokens` tokens takes."""
        return self.alpha + self.beta * num_tokens

    def verification_share(self, num_sequences: int) -> float:
        """Extra time when each of `num_sequences` verifies one token more, over the time of a step without."""
        extra = self.beta * num_sequences
        whole = self.alpha + extra
        return extra / whole if whole > 0.0 else 0.0
