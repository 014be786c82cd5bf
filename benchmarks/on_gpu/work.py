"""One launch to be measured: what it must move and compute at least, and how it is shown to be right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from on_gpu.device import Device
from on_gpu.run import Run
from report import Row

# Dense bfloat16 operations an H200 does in the time in which it moves a byte; fewer are bound by bandwidth.
BALANCE = 206
# Relative error of a result whose operands have bfloat16.
BF16_ERROR = 1e-2


class WrongResultError(AssertionError):
    """What was to be timed computes something else."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """run: what is timed. num_bytes: each input read once and each output written once; num_flops: products alone.

    error: |result - reference| / |reference|, at most `tolerance`; None where the kernel's own cases are all there is.
    peers: others' ways to the same result, by name.
    """

    run: Callable[[], object]
    num_bytes: int
    num_flops: int = 0
    error: Callable[[], float] | None = None
    tolerance: float = BF16_ERROR
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected| over all elements."""
    wide = expected.float()
    return float((got.float() - wide).norm() / wide.norm())


def check(work: Work) -> None:
    """Raise WrongResultError where the result isn't the reference's."""
    error = 0.0 if work.error is None else work.error()
    # NaN is neither.
    if not error <= work.tolerance:
        raise WrongResultError(f"relative error {error:.3g}, allowed is {work.tolerance:.3g}")


def measure(run: Run, device: Device, case: str, work: Work) -> float | None:
    """Check, time and report; the share of the datasheet's limit, None where it isn't known."""
    check(work)
    timing = device.time(work.run)
    name = case if timing.is_graph or device.is_dry else f"{case} (no graph)"
    micros = round(timing.seconds * 1e6, 2)
    rows = [Row(name, "time", "us", micros), Row(name, "spread of the times", "share", round(timing.spread, 4))]
    is_bound_by_flops = work.num_flops > BALANCE * work.num_bytes
    amount, metric, unit = (
        (work.num_flops, "bf16 products", "TFLOP/s") if is_bound_by_flops else (work.num_bytes, "bandwidth", "TB/s")
    )
    rate = amount / timing.seconds
    share = None
    # In a dry run no limit means anything.
    for limits, source in ((device.datasheet, "datasheet"), (device.measured, "measured here")):
        if limits is None or device.is_dry:
            continue
        limit = limits.flops if is_bound_by_flops else limits.bandwidth
        rows.append(Row(name, metric, unit, round(rate / 1e12, 4), round(limit / 1e12, 4), source))
        share = rate / limit if source == "datasheet" else share
    for peer, other in work.peers.items():
        rows.append(Row(name, "time", "us", micros, round(device.time(other).seconds * 1e6, 2), peer))
    run.add(*rows)
    return share
