"""Disk tiers on a folder of the test's own, closed when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline_kvstore.disk.catalog import Clocks
from paceline_kvstore.tiers import DiskOptions, DiskTier

CAPACITY = 1 << 20
SEGMENT = 64 << 10

OpenTier = Callable[..., DiskTier]


class Clock:
    """Both clocks in the test's hands."""

    def __init__(self) -> None:
        self.wall_s = 1_700_000_000.0
        self.steady_s = 1000.0

    def pass_time(self, seconds: float) -> None:
        self.wall_s += seconds
        self.steady_s += seconds

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.wall_s, lambda: self.steady_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_tier(tmp_path: Path, clock: Clock) -> Iterator[OpenTier]:
    """Opens a tier on the test's folder; one that is still open is closed first, as on a restart."""
    tiers: list[DiskTier] = []

    def open_it(capacity: int = CAPACITY, *, folder: Path = tmp_path / "kv", **options: object) -> DiskTier:
        for tier in tiers:
            tier.close()
        given = {"segment_bytes": SEGMENT, "clocks": clock.clocks, "staging_bytes": 1 << 20, **options}
        tiers.append(DiskTier(folder, capacity, DiskOptions(**given)))  # type: ignore[arg-type]
        return tiers[-1]

    yield open_it
    for tier in tiers:
        tier.close()
