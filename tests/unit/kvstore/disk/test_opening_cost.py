"""Opening a folder reads what it must: small records many at a time, large ones by their headers alone."""

from __future__ import annotations

import logging
import os

import pytest

from paceline_kvstore import ChunkKey
from paceline_kvstore.disk import recovery
from paceline_kvstore.disk.record import BLOCK


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 16)


class Reads:
    """Counts what the process reads from files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.bytes = 0
        real = os.preadv

        def count(fd: int, buffers, offset: int) -> int:
            got = real(fd, buffers, offset)
            self.calls += 1
            self.bytes += got
            return got

        monkeypatch.setattr(os, "preadv", count)


def test_small_records_are_read_many_at_a_time(open_tier, monkeypatch: pytest.MonkeyPatch):
    tier = open_tier(16 << 20, segment_bytes=1 << 20)
    for number in range(600):
        assert tier.put(key(number), bytes(100), parent=key(number - 1) if number else None)
    tier.close()
    reads = Reads(monkeypatch)
    again = open_tier(16 << 20, segment_bytes=1 << 20)
    assert len(again) == 600
    assert again.contains([key(number) for number in range(600)]) == 600
    again.check_integrity()
    assert reads.calls < 40


def test_large_records_are_read_by_their_headers(open_tier, monkeypatch: pytest.MonkeyPatch):
    tier = open_tier(64 << 20, segment_bytes=4 << 20)
    for number in range(30):
        assert tier.put(key(number), bytes(1 << 20))
    last = max(tier.folder.glob("segment-*"))
    tier.close()
    reads = Reads(monkeypatch)
    assert len(open_tier(64 << 20, segment_bytes=4 << 20)) == 30
    # The last segment's payloads are checked, and what follows the records of any is looked at.
    assert reads.bytes < last.stat().st_size + 64 * BLOCK + 8 * (2 << 20)


def test_a_long_opening_says_how_far_it_is(
    open_tier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tier = open_tier()
    for number in range(40):
        assert tier.put(key(number), bytes(3000))
    segments = len(list(tier.folder.glob("segment-*")))
    tier.close()
    monkeypatch.setattr(recovery, "PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO, logger=recovery.__name__):
        open_tier()
    assert segments > 2
    assert f"{segments} of {segments} segments read, 40 chunks" in caplog.messages[-1]
