"""Interleaved rounds of the KV store's benchmarks: each action once a round, in every order; ratios within a round.

Absolute figures vary by machine and hour, so only ratios of a round count. The share of the CPU that others took is
recorded; rounds in which it was above a tenth are left out if enough others remain.
"""

from __future__ import annotations

import logging
import mmap
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, permutations
from pathlib import Path

import numpy as np
import numpy.typing as npt
from report import Bar, Report, Row

from paceline_kvstore import ChunkKey

MIB = 1 << 20
ROUNDS_ENOUGH = 5
OTHERS_MAX = 0.1
OURS, LIMIT = "ours", "limit"
Bytes = npt.NDArray[np.uint8]
log = logging.getLogger("bench")

Action = Callable[[], float]
"""Does its work once; the seconds that it took."""


@dataclass(frozen=True)
class Round:
    """Seconds of each action, and the share of the CPU that other processes took meanwhile."""

    seconds: dict[str, float]
    others: float


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 256)


def buffer(size: int, fill: int) -> Bytes:
    """Touched memory that begins on a page."""
    memory: Bytes = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    memory[:] = np.random.default_rng(fill).integers(0, 256, size, dtype=np.uint8)
    return memory


def timed(function: Callable[[], object]) -> Action:
    def action() -> float:
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin

    return action


def measure(
    actions: Mapping[str, Action],
    rounds: int,
    before: Callable[[], object] = lambda: None,
    helpers: Sequence[int] = (),
) -> list[Round]:
    """Without the disturbed rounds if enough remain. `before` runs before each round. helpers: processes of our own."""
    for action in actions.values():
        before()
        action()  # First touches and connections are nobody's.
    # Every order in turn: what one leaves behind (work of the file system, caches) must not always fall to the same.
    orders, measured = cycle(permutations(actions)), list[Round]()
    for _ in range(rounds):
        before()
        busy, own, start = _busy_seconds(), _own_seconds(helpers), time.perf_counter()
        seconds = {name: actions[name]() for name in next(orders)}
        others = _busy_seconds() - busy - (_own_seconds(helpers) - own)
        share = max(0.0, others) / (time.perf_counter() - start) / (os.cpu_count() or 1)
        measured.append(Round(seconds, share))
    calm = [one for one in measured if one.others <= OTHERS_MAX]
    return calm if len(calm) >= ROUNDS_ENOUGH else measured


def compare(report: Report, case: str, num_bytes: int, rounds: Sequence[Round], bounds: Mapping[str, float]) -> None:
    """Beside each other action: GB/s (1e9), the median ratio of the rounds, and its bar where there is a bound."""
    ours = num_bytes / statistics.median(one.seconds[OURS] for one in rounds) / 1e9
    texts: list[str] = []
    for name in sorted(rounds[0].seconds, reverse=True):
        if name == OURS:
            continue
        theirs = num_bytes / statistics.median(one.seconds[name] for one in rounds) / 1e9
        ratio = statistics.median(one.seconds[name] / one.seconds[OURS] for one in rounds)
        report.rows.append(Row(case, "bandwidth", "GB/s", round(ours, 3), round(theirs, 3), name))
        report.rows.append(Row(case, f"x {name}, median of rounds", "", round(ratio, 3)))
        if name in bounds:
            report.bars.append(Bar(f"{case}: x {name}", round(ratio, 3), ">=", bounds[name]))
        texts.append(f"{ratio:.2f} x {name} ({theirs:.2f})")
    report.rows.append(Row(case, "CPU share of others, worst", "", round(max(one.others for one in rounds), 2)))
    log.info("  %s: %.2f GB/s, %s", case, ours, ", ".join(texts))


def pairs(
    report: Report,
    case: str,
    num_bytes: int,
    actions: Mapping[str, Action],
    rounds: int,
    bounds: Mapping[str, float],
    before: Callable[[], object] = lambda: None,
    helpers: Sequence[int] = (),
) -> None:
    """`compare` ours with each other action, in rounds of the two alone: a peer must not disturb what it is not in."""
    for name, action in actions.items():
        if name != OURS:
            measured = measure({OURS: actions[OURS], name: action}, rounds, before, helpers)
            compare(report, case, num_bytes, measured, bounds)


def _busy_seconds() -> float:
    """CPU seconds of the whole machine that were not idle."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _own_seconds(helpers: Sequence[int]) -> float:
    """CPU seconds of this process and of its helpers."""
    ticks = 0
    for pid in helpers:
        # Its name may have spaces, and ends with the last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return sum(os.times()[:2]) + ticks / os.sysconf("SC_CLK_TCK")
