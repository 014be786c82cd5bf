"""A disk that is full or failing: the tier counts, writes less for a while, serves what it has, and comes back."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_kvstore import ChunkKey
from paceline_kvstore.disk.writer import FULL_S, PAUSE_S
from paceline_kvstore.tiers import DiskOptions, DiskTier

DISK_BYTES = 1 << 20


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 16)


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(10_000)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of DISK_BYTES."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    subprocess.run(command, capture_output=True, check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_lived_with(small_disk: Path, clock):
    """The tier may have 4x of what the disk has: it works on with what there is, and tries to grow again later."""
    options = DiskOptions(segment_bytes=128 << 10, staging_bytes=1 << 20, clocks=clock.clocks)
    tier = DiskTier(small_disk / "kv", 4 * DISK_BYTES, options)
    durable = {number for number in range(60) if tier.put(key(number), payload_of(number), durable=True)}
    before = tier.stats
    assert before.errors == before.evictions == 0
    assert durable == set(range(60))
    for number in range(60, 300):
        tier.put(key(number), payload_of(number))
        assert tier.writable
    stats = tier.stats
    assert 0 < stats.errors < 10, "after the first refusal it stays below what the disk has"
    assert stats.evictions > 100
    assert tier.get(key(299)) == payload_of(299)
    held = list(tier.keys())
    assert len(held) > 30
    assert all(tier.get(chunk) is not None for chunk in held)
    tier.check_integrity()
    clock.pass_time(FULL_S + 1)
    for number in range(300, 400):
        tier.put(key(number), payload_of(number))
    assert tier.get(key(399)) == payload_of(399)
    tier.close()
    tier = DiskTier(small_disk / "kv", 4 * DISK_BYTES, options)
    assert tier.get(key(399)) == payload_of(399)
    assert tier.stats.corrupt == 0
    tier.close()


def test_somebody_elses_file_fills_the_disk_and_goes(small_disk: Path, clock):
    options = DiskOptions(segment_bytes=128 << 10, staging_bytes=1 << 20, clocks=clock.clocks)
    tier = DiskTier(small_disk / "kv", DISK_BYTES // 2, options)
    assert all(tier.put(key(number), payload_of(number), durable=True) for number in range(10))
    filler = small_disk / "filler"
    free = os.statvfs(small_disk)
    filler.write_bytes(bytes((free.f_bavail - 2) * free.f_frsize))
    assert not all(tier.put(key(number), payload_of(number), durable=True) for number in range(10, 30))
    assert tier.stats.errors > 0
    tier.check_integrity()
    filler.unlink()
    clock.pass_time(FULL_S + 1)
    assert tier.put(key(50), payload_of(50), durable=True)
    tier.close()


def test_a_limit_on_file_size_is_a_full_disk(tmp_path: Path):
    """RLIMIT_FSIZE: writes are cut short, then fail."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from paceline_kvstore import ChunkKey; from paceline_kvstore.tiers import DiskOptions, DiskTier\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "key = lambda n: ChunkKey(b'n' * 32, n.to_bytes(32, 'big'), 16)\n"
        "options = DiskOptions(segment_bytes=128 << 10, staging_bytes=1 << 20)\n"
        "tier = DiskTier(Path(sys.argv[1]), 1 << 20, options)\n"
        "kept = [n for n in range(50) if tier.put(key(n), bytes([n]) * 10_000, durable=True)]\n"
        "held = [n for n in range(50) if tier.get(key(n)) == bytes([n]) * 10_000]\n"
        "tier.check_integrity()\n"
        "assert tier.stats.errors and tier.stats.refused, tier.stats\n"
        "assert held and set(held) <= set(kept), (held, kept)\n"
        "tier.close()\n"
        "tier = DiskTier(Path(sys.argv[1]), 1 << 20, options)\n"
        "assert [n for n in range(50) if tier.get(key(n)) == bytes([n]) * 10_000] == held\n"
        "assert tier.stats.corrupt == 0, tier.quarantine.latest()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "kv")], check=True)


class Device:
    """Makes one system call fail. A device that fails cannot be had without its driver, so this is the one stand-in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.broken = False
        original = getattr(os, call)

        def fail_or_do(*arguments: object) -> object:
            if self.broken:
                raise OSError(errno.EIO, "Input/output error")
            return original(*arguments)

        monkeypatch.setattr(os, call, fail_or_do)


def test_writes_that_fail_pause_the_tier_for_a_while(open_tier, clock, monkeypatch: pytest.MonkeyPatch):
    device = Device(monkeypatch, "pwritev")
    tier = open_tier()
    assert tier.put(key(1), payload_of(1))
    device.broken = True
    assert not tier.put(key(2), payload_of(2))
    assert not tier.writable
    device.broken = False
    errors = tier.stats.errors
    assert not tier.put(key(3), payload_of(3)), "the device is left in peace"
    assert tier.stats.errors == errors
    assert tier.get(key(1)) == payload_of(1)
    clock.pass_time(PAUSE_S)
    assert tier.put(key(4), payload_of(4))
    tier.check_integrity()
    tier = open_tier()
    assert set(tier.keys()) == {key(1), key(4)}


def test_reads_that_fail_are_misses(open_tier, monkeypatch: pytest.MonkeyPatch):
    device = Device(monkeypatch, "preadv")
    tier = open_tier()
    tier.put(key(1), payload_of(1))
    tier.put(key(2), payload_of(2))
    device.broken = True
    assert tier.get(key(1)) is None
    assert tier.read_into(key(1), bytearray(10_000)) is None
    device.broken = False
    assert tier.get(key(2)) == payload_of(2)
    assert (tier.stats.errors, tier.stats.misses, tier.stats.corrupt) == (1, 2, 0)


def test_nothing_is_called_durable_after_a_failed_sync(open_tier, clock, monkeypatch: pytest.MonkeyPatch):
    """The kernel tells of lost pages once, so a later sync that succeeds proves nothing."""
    device = Device(monkeypatch, "fdatasync")
    tier = open_tier()
    assert tier.put(key(1), payload_of(1))
    device.broken = True
    assert not tier.flush()
    device.broken = False
    assert not tier.put(key(1), payload_of(1), durable=True), "in the segment whose sync failed"
    assert not tier.flush()
    clock.pass_time(PAUSE_S)
    assert tier.put(key(2), payload_of(2), durable=True), "in a new segment"


def test_a_durable_put_whose_sync_fails_is_not_kept(open_tier, monkeypatch: pytest.MonkeyPatch):
    device = Device(monkeypatch, "fdatasync")
    tier = open_tier()
    device.broken = True
    assert not tier.put(key(1), payload_of(1), durable=True)
    device.broken = False
    assert tier.get(key(1)) is None
    assert len(open_tier()) == 0


def test_a_delete_that_the_device_did_not_take_is_not_called_durable(open_tier, clock, monkeypatch: pytest.MonkeyPatch):
    device = Device(monkeypatch, "pwritev")
    tier = open_tier()
    assert tier.put(key(1), payload_of(1), tenant="gone", durable=True)
    assert tier.put(key(2), payload_of(2), durable=True)
    device.broken = True
    assert tier.clear(tenant="gone") == 1
    assert not tier.flush()
    device.broken = False
    clock.pass_time(PAUSE_S)
    assert tier.flush(), "the mark is written at last"
    tier = open_tier()
    assert list(tier.keys()) == [key(2)]


def test_nothing_in_a_file_that_was_removed_is_called_durable(open_tier, tmp_path: Path):
    """Somebody tidied up the folder under a running tier, whose file has no name any more."""
    tier = open_tier()
    assert tier.put(key(1), payload_of(1), durable=True)
    for path in (tmp_path / "kv").glob("segment-*"):
        path.unlink()
    assert not tier.put(key(2), payload_of(2), durable=True)
    assert not tier.flush()
    assert tier.get(key(1)) == payload_of(1), "as long as the file is open"
    assert tier.put(key(3), payload_of(3), durable=True), "in a new file"
    tier.check_integrity()
    tier = open_tier()
    assert set(tier.keys()) == {key(3)}


def test_a_durable_put_returns_after_the_sync_of_its_own_bytes(open_tier, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    for name in ("pwritev", "fdatasync", "fsync"):
        original = getattr(os, name)

        def record(*arguments: object, name: str = name, original: object = original) -> object:
            calls.append(name)
            return original(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(os, name, record)
    tier = open_tier()
    calls.clear()
    tier.put(key(1), payload_of(1), durable=True)
    assert calls[-2:] == ["fdatasync", "fsync"], "the first time the file's name, too"
    tier.put(key(2), payload_of(2), durable=True)
    assert calls[-1] == "fdatasync"
    calls.clear()
    tier.put(key(3), payload_of(3))
    assert "fdatasync" not in calls
    tier.put(key(3), payload_of(3), durable=True)
    assert calls[-1] == "fdatasync", "a chunk that is there already is synced before it is called durable"
