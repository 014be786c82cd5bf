"""The disk tier: what was put is there after a restart, within the byte bound, and goes suffix before prefix."""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline_kvstore import ChunkKey, CorruptChunk
from paceline_kvstore.disk.catalog import CLOCK_TOLERANCE_S
from paceline_kvstore.disk.record import BLOCK, record_bytes
from paceline_kvstore.errors import FolderUnusable
from paceline_kvstore.tiers import DiskOptions, DiskTier, Tier

CAPACITY = 1 << 20
SEGMENT = 64 << 10


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 16)


def payload_of(number: int, size: int = 3000) -> bytes:
    return random.Random(number).randbytes(size)


def check_bound(tier: DiskTier) -> None:
    """What the file system says, but for one block a file that it may need for its own map of the file."""
    sizes = [path.stat().st_blocks * 512 for path in tier.folder.glob("segment-*")]
    assert sum(sizes) <= tier.capacity
    assert sum(sizes) - BLOCK * len(sizes) <= tier.bytes_used <= tier.capacity


class DiskTierAgainstModel(RuleBasedStateMachine):
    """Puts, reads, deletes and restarts. The tier may forget what was evicted; all else it has, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(DiskTierAgainstModel.base) / f"run-{DiskTierAgainstModel.runs}"
        DiskTierAgainstModel.runs += 1
        self.model: dict[int, bytes] = {}
        self.open()

    base = "."
    runs = 0

    def open(self) -> None:
        self.tier = DiskTier(self.folder, 256 << 10, DiskOptions(segment_bytes=32 << 10, staging_bytes=1 << 20))

    @rule(number=st.integers(0, 19), size=st.integers(0, 20_000), durable=st.booleans())
    def put(self, number: int, size: int, durable: bool) -> None:
        evictions = self.tier.stats.evictions
        assert self.tier.put(key(number), payload_of(number, size), durable=durable)
        self.model.setdefault(number, payload_of(number, size))
        self.sync_model(evictions)

    def sync_model(self, evictions: int) -> None:
        held = set(self.tier.keys())
        lost = [number for number in self.model if key(number) not in held]
        assert len(lost) == self.tier.stats.evictions - evictions
        for number in lost:
            del self.model[number]

    @rule(number=st.integers(0, 19), leased=st.booleans())
    def read(self, number: int, leased: bool) -> None:
        expected = self.model.get(number)
        if leased:
            lease = self.tier.lease(key(number))
            assert (None if lease is None else lease.payload) == expected
        else:
            assert self.tier.get(key(number)) == expected

    @rule(number=st.integers(0, 19))
    def read_into(self, number: int) -> None:
        target = bytearray(20_000)
        size = self.tier.read_into(key(number), target)
        assert (None if size is None else bytes(target[:size])) == self.model.get(number)

    @rule(number=st.integers(0, 19))
    def delete(self, number: int) -> None:
        assert self.tier.delete(key(number)) is (self.model.pop(number, None) is not None)

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.open()

    @invariant()
    def balanced(self) -> None:
        self.tier.check_integrity()
        assert set(self.tier.keys()) == {key(number) for number in self.model}
        check_bound(self.tier)

    def teardown(self) -> None:
        self.tier.close()


def test_disk_tier_against_model(tmp_path: Path):
    DiskTierAgainstModel.base = str(tmp_path)
    run = DiskTierAgainstModel.TestCase()
    run.settings = settings(
        max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run.runTest()


def test_it_is_a_tier(open_tier):
    tier: Tier = open_tier()
    assert tier.put(key(1), b"abc", durable=True)
    assert tier.get(key(1)) == b"abc"
    assert tier.flush()


def test_a_restart_finds_everything(open_tier):
    tier = open_tier()
    for number in range(20):
        assert tier.put(key(number), payload_of(number), parent=key(number - 1) if number else None)
    used = tier.bytes_used
    tier = open_tier()
    assert tier.contains([key(number) for number in range(25)]) == 20
    assert all(tier.get(key(number)) == payload_of(number) for number in range(20))
    assert tier.bytes_used == used
    assert tier.stats.corrupt == 0


@pytest.mark.parametrize("direct", [False, None])
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, (2 << 20) + 5 * BLOCK + 7])
def test_any_size_into_aligned_and_other_buffers(tmp_path: Path, direct: bool | None, size: int):
    tier = DiskTier(tmp_path, 64 << 20, DiskOptions(direct=direct, staging_bytes=1 << 20))
    payload = payload_of(size, size)
    aligned = memoryview(mmap.mmap(-1, size + BLOCK))
    other = memoryview(mmap.mmap(-1, size + BLOCK))[3:]
    aligned[:size] = payload
    assert tier.put(key(1), aligned[:size])
    assert tier.put(key(2), payload)
    for number in (1, 2):
        for target in (aligned, other):
            target[:] = b"\xee" * len(target)
            assert tier.read_into(key(number), target) == size
            assert target[:size] == payload
            assert bytes(target[size:]) == b"\xee" * (len(target) - size)
    tier.close()


def test_a_buffer_that_is_too_small_is_refused(open_tier):
    tier = open_tier()
    tier.put(key(1), bytes(10))
    with pytest.raises(ValueError, match="the payload has 10 bytes, the buffer 9"):
        tier.read_into(key(1), bytearray(9))
    assert tier.get(key(1)) == bytes(10)


def test_a_lease_outlives_delete_and_close(open_tier):
    tier = open_tier()
    tier.put(key(1), payload_of(1))
    lease = tier.lease(key(1))
    assert lease is not None
    tier.delete(key(1))
    tier.close()
    assert lease.payload == payload_of(1)
    lease.release()


def test_the_byte_bound_holds_across_restarts_and_when_it_shrinks(open_tier):
    tier = open_tier()
    for number in range(400):
        assert tier.put(key(number), payload_of(number, number * 61 % 30_000))
        check_bound(tier)
    assert tier.stats.evictions > 0
    assert tier.get(key(399)) == payload_of(399, 399 * 61 % 30_000)
    held = len(tier)
    tier = open_tier(CAPACITY // 2)
    check_bound(tier)
    assert 0 < len(tier) < held


def test_a_chunk_larger_than_a_quarter_is_refused_and_costs_nothing(open_tier):
    tier = open_tier()
    tier.put(key(1), b"x")
    assert not tier.put(key(2), bytes(CAPACITY // 4))
    assert tier.stats.refused == 1
    assert tier.get(key(1)) == b"x"


def test_used_chunks_stay_and_unused_go(open_tier):
    tier = open_tier()
    for number in range(300):
        tier.put(key(number), payload_of(number))
        tier.get(key(number % 10))
    assert tier.contains([key(number) for number in range(10)]) == 10
    assert tier.stats.evictions > 50


def test_what_hangs_on_a_chunk_goes_with_it_and_never_after_it(open_tier):
    tier = open_tier()
    for number in range(600):
        # Chains of 15, written round robin, so that a chain lies across many segments.
        chain, position = number % 40, number // 40
        parent = key(100 * chain + position - 1) if position else None
        if parent is None or tier.contains([parent]):
            tier.put(key(100 * chain + position), payload_of(number), parent=parent)
        held = {int.from_bytes(chunk.chain, "big") for chunk in list(tier.keys())}
        assert all(member - 1 in held for member in held if member % 100)
    assert tier.stats.evictions > 0


def test_spared_chunks_stay_with_all_before_them(open_tier):
    tier = open_tier(spared=lambda chunk: chunk == key(2))
    for number in range(3):
        tier.put(key(number), payload_of(number), parent=key(number - 1) if number else None)
    for number in range(10, 500):
        tier.put(key(number), payload_of(number))
    assert tier.contains([key(0), key(1), key(2)]) == 3


def test_when_nothing_may_go_puts_are_refused(open_tier):
    tier = open_tier(spared=lambda _: True)
    kept = 0
    while tier.put(key(kept), payload_of(kept)):
        kept += 1
    assert not tier.put(key(kept + 1), b"small")
    assert all(tier.get(key(number)) == payload_of(number) for number in range(kept))


def test_deleted_chunks_stay_deleted_after_a_restart(open_tier):
    tier = open_tier()
    for number in range(6):
        tier.put(key(number), payload_of(number), tenant="a" if number < 3 else "b")
    assert tier.delete(key(5))
    assert tier.clear(tenant="a") == 3
    assert tier.clear(tenant="nobody") == 0
    assert tier.flush()
    tier = open_tier()
    assert set(tier.keys()) == {key(3), key(4)}
    assert tier.clear(tenant="b", namespace=b"m" * 32) == 0
    assert tier.clear(tenant="b", namespace=b"n" * 32) == 2
    assert len(open_tier()) == 0


def test_no_older_record_of_a_deleted_chunk_comes_back(open_tier):
    """Evicted with its chain, put again, deleted: neither record may be found by the next scan."""
    tier = open_tier()
    tier.put(key(0), payload_of(0))
    for number in range(10, 16):
        tier.put(key(number), payload_of(number))
    # In a later segment than the one that goes, which takes it along.
    tier.put(key(1), payload_of(1), parent=key(0))
    number = 100
    while tier.contains([key(1)]):
        tier.put(key(number), payload_of(number))
        number += 1
    assert tier.put(key(1), payload_of(1))
    assert tier.delete(key(1))
    assert tier.flush()
    assert open_tier().get(key(1)) is None


def test_two_records_of_one_chunk_are_one_after_a_restart(open_tier, tmp_path: Path):
    """A crash between a copy and the end of its original leaves both; a delete later on must end both."""
    tier = open_tier()
    tier.put(key(1), payload_of(1))
    first = next(iter(tier.folder.glob("segment-*")))
    saved = first.read_bytes()
    tier.delete(key(1))
    for number in range(2, 10):
        tier.put(key(number), payload_of(number))
    tier.put(key(1), payload_of(1))
    tier.close()
    first.write_bytes(saved + first.read_bytes()[len(saved) :])
    tier = open_tier()
    assert tier.get(key(1)) == payload_of(1)
    tier.check_integrity()
    assert tier.delete(key(1))
    assert open_tier().get(key(1)) is None


def test_a_segment_that_may_not_be_opened_is_a_clear_error(open_tier):
    tier = open_tier()
    tier.put(key(1), b"x")
    tier.close()
    path = next(iter(tier.folder.glob("segment-*")))
    path.rename(path.with_suffix(".saved"))
    path.mkdir()
    with pytest.raises(FolderUnusable, match="cannot be opened: Is a directory"):
        open_tier()
    path.rmdir()
    path.with_suffix(".saved").rename(path)
    assert open_tier().get(key(1)) == b"x"


def test_a_full_tier_writes_to_files_it_has(open_tier):
    """Laid-out blocks are reused; what a file held before is found by no scan, also if the new use was short."""
    tier = open_tier()
    number = 0
    while not tier.stats.evictions:
        assert tier.put(key(number), payload_of(number))
        number += 1
    files = {path.stat().st_ino for path in tier.folder.iterdir()}
    for _ in range(150):
        assert tier.put(key(number), payload_of(number))
        tier.check_integrity()
        number += 1
    assert len({path.stat().st_ino for path in tier.folder.iterdir()} - files) <= 2
    held = set(tier.keys())
    tier = open_tier()
    assert set(tier.keys()) == held
    assert all(tier.get(chunk) is not None for chunk in held)
    assert tier.stats.corrupt == 0
    check_bound(tier)


def test_a_mark_that_comes_late_does_not_touch_the_files_next_use(open_tier):
    tier = open_tier()
    tier.put(key(0), payload_of(0))
    place = tier._look(key(0).to_bytes())
    assert place is not None
    number = 1
    while tier.contains([key(0)]) or place.segment.path.name != "spare.kv":
        assert tier.put(key(number), payload_of(number))
        number += 1
    for number in range(1000, 1008):
        assert tier.put(key(number), payload_of(number))
    place.kill()
    assert all(tier.get(key(number)) == payload_of(number) for number in range(1000, 1008))
    with pytest.raises(CorruptChunk):
        place.segment.read_header(place.offset)


def test_dead_bytes_come_back(open_tier):
    tier = open_tier()
    for number in range(1000):
        assert tier.put(key(number), payload_of(number))
        tier.delete(key(number))
    assert tier.stats.evictions == 0
    assert tier.bytes_used <= CAPACITY


def test_many_small_segments_of_many_restarts_are_one(open_tier):
    for number in range(5):
        open_tier().put(key(number), payload_of(number))
    tier = open_tier()
    assert len(list(tier.folder.glob("segment-*"))) == 1
    assert tier.bytes_used == BLOCK + 5 * record_bytes(3000)


def test_a_folder_has_one_owner(open_tier, tmp_path: Path):
    tier = open_tier()
    with pytest.raises(FolderUnusable, match=r"is in use by process \d+: give each store a folder of its own"):
        DiskTier(tier.folder, CAPACITY)
    code = (
        "import sys; from pathlib import Path; from paceline_kvstore.tiers import DiskTier\n"
        "try: DiskTier(Path(sys.argv[1]), 1 << 20)\n"
        "except Exception as error: print(error)\n"
    )
    other = [sys.executable, "-c", code, str(tier.folder)]
    assert "in use by process" in subprocess.run(other, check=True, capture_output=True, text=True).stdout
    tier.close()
    assert subprocess.run(other, check=True, capture_output=True, text=True).stdout == ""


def test_a_folder_that_cannot_be_is_a_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderUnusable, match="cannot be used"):
        DiskTier(tmp_path / "file", CAPACITY)
    with pytest.raises(ValueError, match="capacity must be at least"):
        DiskTier(tmp_path, 1000)


def test_files_of_others_are_left_alone(open_tier, tmp_path: Path):
    folder = tmp_path / "kv"
    folder.mkdir()
    for name in ("notes.txt", "segment-1.kv", "segment-x.kv"):
        (folder / name).write_text("mine")
    tier = open_tier()
    tier.put(key(1), b"x")
    assert all((folder / name).read_text() == "mine" for name in ("notes.txt", "segment-1.kv", "segment-x.kv"))


def test_a_closed_tier_answers_misses(open_tier):
    tier = open_tier()
    tier.put(key(1), b"x")
    tier.close()
    tier.close()
    assert tier.get(key(1)) is None
    assert not tier.put(key(2), b"y")
    assert not tier.flush()
    assert len(tier) == tier.bytes_used == 0


class TestTimeToLive:
    def test_old_chunks_go_also_across_restarts(self, open_tier, clock):
        tier = open_tier(ttl_s=100)
        tier.put(key(1), b"old")
        clock.pass_time(60)
        tier = open_tier(ttl_s=100)
        tier.put(key(2), b"new")
        clock.pass_time(50)
        assert tier.get(key(1)) is None
        assert tier.get(key(2)) == b"new"
        assert tier.stats.expired == 1
        clock.pass_time(60)
        assert len(open_tier(ttl_s=100)) == 0

    def test_copies_on_the_log_do_not_make_a_chunk_younger(self, open_tier, clock):
        tier = open_tier(ttl_s=100)
        tier.put(key(0), payload_of(0))
        for number in range(1, 600):
            tier.put(key(number), payload_of(number))
            assert tier.get(key(0)) is not None
        assert tier.stats.evictions > 0
        clock.pass_time(99)
        assert open_tier(ttl_s=100).get(key(0)) == payload_of(0)
        clock.pass_time(2)
        assert open_tier(ttl_s=100).get(key(0)) is None

    @pytest.mark.parametrize("jump", [-1e6, 1e6])
    def test_a_jump_of_the_wall_clock_changes_nothing_in_a_running_tier(self, open_tier, clock, jump: float):
        tier = open_tier(ttl_s=100)
        tier.put(key(1), b"x")
        clock.wall_s += jump
        clock.pass_time(98)
        assert tier.get(key(1)) == b"x"
        clock.pass_time(4)
        assert tier.get(key(1)) is None

    def test_a_chunk_from_the_future_is_not_immortal(self, open_tier, clock):
        tier = open_tier(ttl_s=100)
        clock.wall_s += 1e6
        tier.put(key(1), b"x")
        clock.wall_s -= 1e6
        assert tier.get(key(1)) == b"x"
        assert open_tier(ttl_s=100).get(key(1)) is None

    def test_clocks_that_differ_a_little_lose_nothing(self, open_tier, clock):
        open_tier(ttl_s=100).put(key(1), b"x")
        clock.wall_s -= CLOCK_TOLERANCE_S - 1
        assert open_tier(ttl_s=100).get(key(1)) == b"x"

    def test_without_a_time_to_live_dates_do_not_matter(self, open_tier, clock):
        open_tier().put(key(1), b"x")
        for jump in (-1e8, 1e9):
            clock.wall_s += jump
            assert open_tier().get(key(1)) == b"x"


def test_counts_and_bytes_add_up_under_threads(open_tier):
    tier = open_tier(capacity=256 << 10, segment_bytes=32 << 10)

    def work(seed: int) -> int:
        rng, gets = random.Random(seed), 0
        for _ in range(150):
            number = rng.randrange(60)
            action = rng.random()
            if action < 0.4:
                tier.put(key(number), payload_of(number), durable=action < 0.02)
            elif action < 0.5:
                tier.delete(key(number))
            else:
                gets += 1
                payload = tier.get(key(number))
                assert payload is None or payload == payload_of(number)
        return gets

    with ThreadPoolExecutor(6) as pool:
        gets = sum(pool.map(work, range(6)))
    tier.check_integrity()
    assert tier.stats.hits + tier.stats.misses == gets
    assert tier.stats.corrupt == tier.stats.errors == 0
    held = set(tier.keys())
    assert set(open_tier(capacity=256 << 10, segment_bytes=32 << 10).keys()) == held
