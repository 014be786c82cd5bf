"""Live estimates of how long transfers take: a fitted line and a quantile sketch, both of bounded size. Pure.

Time is an argument, in seconds on a clock that never goes back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIB = float(1 << 20)
KEPT = 0.97
"""What an older sample still weighs when one more comes: about the last 30 count."""
HALF_LIFE_S = 30.0
"""Samples lose half their weight in that time, so that a place that was slow gets another chance without any reads."""
PRIOR_WEIGHT = 1.0
"""The prior weighs as much as this many samples."""
_SECONDS_MIN, _SECONDS_MAX = 1e-7, 1e5


@dataclass(frozen=True, slots=True)
class Prior:
    """What a place is taken for before it was used: seconds of the smallest read, bytes per second of a long one."""

    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bandwidth > 0):
            raise ValueError(
                f"a prior needs a latency of 0 or more and a bandwidth above 0, not {self.latency_s} s and "
                f"{self.bandwidth} bytes/s"
            )


class TransferTime:
    """Seconds of one transfer by its bytes: latency + bytes / bandwidth.

    Least squares over samples whose weight decays with each new one (an EWMA of the moments) and with time, and over
    two points of the prior. Neither latency nor the time of a byte comes out below zero.
    """

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self._moments = [0.0] * 5
        self._at = 0.0

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        """A transfer of that size took that long."""
        x, y = num_bytes / MIB, min(max(seconds, 0.0), _SECONDS_MAX)
        self._moments = [KEPT * old + new for old, new in zip(self._aged(now), (1.0, x, y, x * x, x * y), strict=True)]
        self._at = now

    def line(self, now: float) -> Prior:
        """Latency and bandwidth as they are taken to be now."""
        weight, sx, sy, sxx, sxy = self._with_prior(now)
        spread = weight * sxx - sx * sx
        slope = (weight * sxy - sx * sy) / spread
        if slope <= 0:
            return Prior(sy / weight, math.inf)
        latency = (sy - slope * sx) / weight
        if latency < 0:
            latency, slope = 0.0, sxy / sxx
        return Prior(latency, MIB / slope)

    def seconds(self, num_bytes: int, now: float) -> float:
        """Predicted time of a transfer."""
        line = self.line(now)
        return line.latency_s + num_bytes / line.bandwidth

    def _aged(self, now: float) -> list[float]:
        kept = 0.5 ** (max(now - self._at, 0.0) / HALF_LIFE_S)
        return [kept * moment for moment in self._moments]

    def _with_prior(self, now: float) -> list[float]:
        moments = self._aged(now)
        # Its long transfer has the size of those seen, else it would say little about them.
        mean = moments[1] / moments[0] if moments[0] > 1e-9 else 1.0
        for x in (0.0, max(mean, 1.0)):
            y = self.prior.latency_s + x * MIB / self.prior.bandwidth
            point = (1.0, x, y, x * x, x * y)
            moments = [old + PRIOR_WEIGHT / 2 * new for old, new in zip(moments, point, strict=True)]
        return moments


class Quantiles:
    """Quantiles of positive values within 5 %, of about the last `remembered` (DDSketch; Masson et al., VLDB 2019)."""

    ACCURACY = 0.05
    _LOG_GAMMA = math.log((1 + ACCURACY) / (1 - ACCURACY))

    def __init__(self, remembered: int = 1000) -> None:
        self._remembered = remembered
        self._counts: dict[int, float] = {}
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value; one outside of 0.1 us to a day counts as the nearer end."""
        bounded = min(max(value, _SECONDS_MIN), _SECONDS_MAX)
        bucket = math.ceil(math.log(bounded) / self._LOG_GAMMA)
        self._counts[bucket] = self._counts.get(bucket, 0.0) + 1.0
        self._total += 1.0
        if self._total > self._remembered:
            self._counts = {bucket: count / 2 for bucket, count in self._counts.items() if count > 0.25}
            self._total = sum(self._counts.values())

    def at(self, share: float) -> float | None:
        """The value that this share of the values does not exceed; None before the first."""
        left = share * self._total
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return 2 * math.exp(bucket * self._LOG_GAMMA) / (1 + math.exp(self._LOG_GAMMA))
        return None
