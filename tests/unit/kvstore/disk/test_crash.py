"""What a crash leaves behind: killed writers, torn and reordered writes, bad bits, files that vanish. A tier that
opens on it serves exactly what was put, or a miss, and goes on."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline_kvstore import ChunkKey
from paceline_kvstore.disk.record import BLOCK, record_bytes
from paceline_kvstore.tiers import DiskOptions, DiskTier

CAPACITY = 1 << 20
SIZES = [0, 1, 5000, BLOCK, 9000, 12_345]
NEW = 99

ANY_TIME = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 16)


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(SIZES[number] if number < len(SIZES) else 5000)


@contextmanager
def opened(folder: Path) -> Iterator[DiskTier]:
    tier = DiskTier(folder, CAPACITY, DiskOptions(segment_bytes=128 << 10, staging_bytes=1 << 20))
    try:
        yield tier
    finally:
        tier.close()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one segment of len(SIZES) records, each on the one before."""
    folder = tmp_path_factory.mktemp("clean")
    with opened(folder) as tier:
        for number in range(len(SIZES)):
            tier.put(key(number), payload_of(number), parent=key(number - 1) if number else None)
    return folder


def segment_of(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("segment-*"))))


def starts() -> list[int]:
    """Offsets of the records, and where the last one ends."""
    return [BLOCK, *itertools.accumulate((record_bytes(size) for size in SIZES), initial=BLOCK)][1:]


def damaged(clean: Path, tmp_path: Path, content: bytes) -> Path:
    """A copy of the clean folder whose segment has that content."""
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / segment_of(clean).name).write_bytes(content)
    return folder


def check(folder: Path, intact: set[int]) -> None:
    """All of `intact` are served, nothing is wrong, and the tier works on, across another restart."""
    with opened(folder) as tier:
        tier.check_integrity()
        assert sum(path.stat().st_size for path in folder.glob("segment-*")) == tier.bytes_used, (
            "no rest is left uncounted"
        )
        for number in range(len(SIZES)):
            payload = tier.get(key(number))
            assert payload == payload_of(number) or (payload is None and number not in intact), number
        assert tier.put(key(NEW), payload_of(NEW), durable=True)
    with opened(folder) as tier:
        tier.check_integrity()
        assert tier.stats.corrupt == 0, "what was found bad once is not found again"
        for number in (*intact, NEW):
            assert tier.get(key(number)) == payload_of(number)


def survivors(blocks: set[int]) -> set[int]:
    """Records none of whose blocks (numbers within the file) were touched."""
    spans = [range(begin // BLOCK, end // BLOCK) for begin, end in itertools.pairwise(starts())]
    return set() if 0 in blocks else {number for number, span in enumerate(spans) if blocks.isdisjoint(span)}


@pytest.mark.parametrize(("rounds", "capacity"), [(100, 64 << 20), (20, 1 << 20)])
@pytest.mark.timeout(300)
def test_a_writer_killed_at_random_points_loses_nothing_it_promised(tmp_path: Path, rounds: int, capacity: int):
    """The many rounds are in memory where that can be: the death of a process does not depend on the device."""
    script = Path(__file__).with_name("crash_rounds.py")
    memory = Path("/dev/shm")
    base = memory if rounds > 20 and os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=base) as folder:
        command = [sys.executable, str(script), folder, str(rounds), "7", str(capacity)]
        report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert report["wrong"] == []
    assert report["back"] == []
    assert report["held"] > 10
    assert report["killed_within_a_put"] > rounds // 10
    if capacity == 64 << 20:
        assert report["lost"] == []
        assert report["durable"] > rounds


def cuts() -> list[int]:
    boundaries = range(0, starts()[-1] + BLOCK, BLOCK)
    edges = {cut + nudge for cut in boundaries for nudge in (-1, 0, 1, 264, 280)}
    return sorted(cut for cut in edges if 0 <= cut < starts()[-1])


def test_a_segment_cut_anywhere_serves_the_records_before_the_cut(clean: Path, tmp_path: Path):
    content = segment_of(clean).read_bytes()
    for cut in cuts():
        whole = {number for number, end in enumerate(starts()[1:]) if end <= cut}
        check(damaged(clean, tmp_path, content[:cut]), whole)


def test_blocks_that_changed_places_are_never_served(clean: Path, tmp_path: Path):
    content = segment_of(clean).read_bytes()
    blocks = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
    for one, other in itertools.combinations(range(len(blocks)), 2):
        if blocks[one] != blocks[other]:
            swapped = list(blocks)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            check(damaged(clean, tmp_path, b"".join(swapped)), survivors({one, other}))


@given(st.sets(st.integers(1, starts()[-1] // BLOCK - 1)))
@ANY_TIME
def test_writes_that_never_arrived_hide_nothing_behind_them(clean: Path, tmp_path: Path, missing: set[int]):
    """Any subset of the blocks reached the device before the crash: the others are holes."""
    content = bytearray(segment_of(clean).read_bytes())
    for block in missing:
        content[block * BLOCK : (block + 1) * BLOCK] = bytes(BLOCK)
    check(damaged(clean, tmp_path, bytes(content)), survivors(missing))


@given(st.lists(st.integers(0, 8 * starts()[-1] - 1), min_size=1, max_size=4, unique=True))
@ANY_TIME
def test_bad_bits_cost_the_records_they_are_in(clean: Path, tmp_path: Path, bits: list[int]):
    content = bytearray(segment_of(clean).read_bytes())
    for bit in bits:
        content[bit // 8] ^= 1 << bit % 8
    check(damaged(clean, tmp_path, bytes(content)), survivors({bit // 8 // BLOCK for bit in bits}))


def test_a_record_copied_to_another_place_or_segment_is_not_one(clean: Path, tmp_path: Path):
    """Stale blocks of an older file, or a payload that is itself a record."""
    content = segment_of(clean).read_bytes()
    begin, end = starts()[2], starts()[3]
    folder = damaged(clean, tmp_path, content[:begin])
    with opened(folder) as tier:
        assert tier.put(key(50), content[begin:end])
        assert tier.get(key(2)) is None
    segment = segment_of(folder)
    segment.write_bytes(segment.read_bytes() + content[begin:end])
    with opened(folder) as tier:
        assert set(tier.keys()) == {key(0), key(1), key(50)}
        assert tier.get(key(50)) == content[begin:end]


def test_a_torn_copy_does_not_replace_the_record_it_was_made_from(tmp_path: Path):
    """A crash while a segment is cleaned: the copies are torn, and writing went on in a file after them."""
    folder = tmp_path / "kv"
    fill = itertools.count(100)
    with opened(folder) as tier:
        assert tier.put(key(0), payload_of(NEW), durable=True)
        while len(list(folder.glob("segment-*"))) < 2:
            tier.put(key(next(fill)), payload_of(NEW))
    first = segment_of(folder)
    before = first.read_bytes()
    with opened(folder) as tier:
        tier.delete(key(0))
        tier.put(key(0), payload_of(NEW))
        while len(list(folder.glob("segment-*"))) < 3:
            tier.put(key(next(fill)), payload_of(NEW))
    first.write_bytes(before)
    second = sorted(folder.glob("segment-*"))[1]
    content = second.read_bytes()
    at = content.index(key(0).to_bytes()) // BLOCK * BLOCK
    second.write_bytes(content[: at + BLOCK] + bytes(record_bytes(5000) - BLOCK) + content[at + record_bytes(5000) :])
    with opened(folder) as tier:
        assert tier.get(key(0)) == payload_of(NEW)
        assert tier.quarantine.counts["corrupt"] == 1
    with opened(folder) as tier:
        assert tier.get(key(0)) == payload_of(NEW)
        assert tier.quarantine.total == 0


def test_bad_bits_in_an_open_tier_are_counted_with_their_place(clean: Path, tmp_path: Path):
    folder = damaged(clean, tmp_path, segment_of(clean).read_bytes())
    with opened(folder) as tier:
        with segment_of(folder).open("r+b") as file:
            file.seek(starts()[2] + BLOCK + 17)
            file.write(b"\xff\x00\xff")
        assert tier.get(key(2)) is None
        assert tier.stats.corrupt == tier.quarantine.counts["corrupt"] == 1
        refusal = tier.quarantine.latest()[0]
        assert refusal.key == key(2)
        assert refusal.place.endswith(f"{segment_of(folder).name}:{starts()[2]}")
        assert tier.contains([key(2)]) == 0
        assert tier.put(key(2), payload_of(2)), "the chunk may come back"
        assert tier.get(key(2)) == payload_of(2)
    check(folder, set(range(len(SIZES))))


def test_a_bad_record_is_no_reason_to_call_its_chunk_durable(clean: Path, tmp_path: Path):
    """A crash tore it, and whoever computed the chunk again puts it again."""
    folder = damaged(clean, tmp_path, segment_of(clean).read_bytes())
    with opened(folder) as tier:
        with segment_of(folder).open("r+b") as file:
            file.seek(starts()[2] + BLOCK)
            file.write(bytes(BLOCK))
        assert tier.put(key(2), payload_of(2), durable=True)
        assert tier.get(key(2)) == payload_of(2)
        assert (tier.stats.hits, tier.stats.misses, tier.stats.corrupt) == (1, 0, 1)
    check(folder, set(range(len(SIZES))))


@pytest.mark.parametrize("cut", [0, 5, BLOCK, starts()[3], starts()[3] + 100, starts()[-1] - 1])
def test_a_segment_cut_under_an_open_tier_is_misses(clean: Path, tmp_path: Path, cut: int):
    folder = damaged(clean, tmp_path, segment_of(clean).read_bytes())
    whole = {number for number, end in enumerate(starts()[1:]) if end <= cut}
    with opened(folder) as tier:
        with segment_of(folder).open("r+b") as file:
            file.truncate(cut)
        for number in range(len(SIZES)):
            assert tier.get(key(number)) == (payload_of(number) if number in whole else None)
        assert tier.put(key(NEW), payload_of(NEW))
        assert tier.get(key(NEW)) == payload_of(NEW)
        tier.check_integrity()


def test_files_deleted_under_an_open_tier(tmp_path: Path):
    folder = tmp_path / "kv"
    with opened(folder) as tier:
        for number in range(60):
            tier.put(key(number), payload_of(NEW))
        for path in folder.glob("segment-*"):
            path.unlink()
        for number in range(60):
            assert tier.get(key(number)) in (None, payload_of(NEW))
        for number in range(100, 400):
            assert tier.put(key(number), payload_of(NEW))
        tier.check_integrity()
    with opened(folder) as tier:
        assert tier.get(key(399)) == payload_of(NEW)
        assert tier.get(key(0)) is None


def test_one_segment_lost_while_closed_costs_its_own_chunks_only(tmp_path: Path):
    folder = tmp_path / "kv"
    with opened(folder) as tier:
        for number in range(100, 140):
            tier.put(key(number), payload_of(number))
        held = len(tier)
    first, *others = sorted(folder.glob("segment-*"))
    assert others
    first.unlink()
    with opened(folder) as tier:
        assert 0 < len(tier) < held
        assert all(tier.get(chunk) is not None for chunk in list(tier.keys()))
