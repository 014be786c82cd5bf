"""Payloads that are checked while they are read or written: the same promises, with and without asynchronous I/O."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paceline_kvstore import ChunkKey
from paceline_kvstore.arena import Arena, pages
from paceline_kvstore.disk import aio
from paceline_kvstore.disk.blockio import PIECE_BYTES
from paceline_kvstore.disk.record import BLOCK

CAPACITY, SEGMENT = 256 << 20, 32 << 20
SIZES = (PIECE_BYTES, PIECE_BYTES + 1, PIECE_BYTES + BLOCK, 2 * PIECE_BYTES, 3 * PIECE_BYTES - 5)


@pytest.fixture(params=["asynchronous", "plain"])
def tier(request: pytest.FixtureRequest, open_tier, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    if request.param == "plain":
        monkeypatch.setattr(aio, "_NUMBERS", {})
    aio._local.flight = None
    tier = open_tier(CAPACITY, segment_bytes=SEGMENT, staging_bytes=32 << 20)
    if not tier.direct:
        pytest.skip("no direct I/O here")
    assert aio.flight().available == (request.param == "asynchronous")
    yield tier
    aio._local.flight = None


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 16)


def aligned(size: int, seed: int) -> memoryview:
    memory = Arena(pages(size)).take(size)
    assert memory is not None
    memory[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return memory.data


def test_every_size_comes_back_to_aligned_and_other_memory(tier):
    for number, size in enumerate(SIZES):
        payload = aligned(size, number)
        assert tier.put(key(number), payload)
        assert tier.put(key(100 + number), bytes(payload)), "from memory on no boundary"
        for wanted in (number, 100 + number):
            target = aligned(size, 99)
            assert tier.read_into(key(wanted), target) == size
            assert target == payload
            odd = memoryview(bytearray(size + 1))[1:]
            assert tier.read_into(key(wanted), odd) == size
            assert odd == payload
    tier.check_integrity()


def test_it_survives_a_restart(tier, open_tier):
    payload = aligned(SIZES[-1], 1)
    assert tier.put(key(1), payload, durable=True)
    assert open_tier(CAPACITY, segment_bytes=SEGMENT).get(key(1)) == payload


@pytest.mark.parametrize("place", [BLOCK + 9, BLOCK + PIECE_BYTES - 1, BLOCK + 2 * PIECE_BYTES - 1])
def test_a_flipped_bit_in_any_piece_is_a_counted_miss(tier, place: int):
    assert tier.put(key(1), aligned(2 * PIECE_BYTES, 1))
    (path,) = tier.folder.glob("segment-*.kv")
    with path.open("r+b") as file:
        file.seek(BLOCK + place)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    assert tier.get(key(1)) is None
    assert tier.stats.corrupt == 1


@pytest.mark.parametrize("kept", [PIECE_BYTES, BLOCK + PIECE_BYTES + 100])
def test_a_file_that_was_cut_is_a_counted_miss(tier, kept: int):
    assert tier.put(key(1), aligned(2 * PIECE_BYTES, 1))
    (path,) = tier.folder.glob("segment-*.kv")
    os.truncate(path, kept)
    assert tier.get(key(1)) is None
    assert tier.stats.corrupt == 1


def test_a_write_that_fails_is_not_kept_and_the_next_one_is(tier, clock):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE_BYTES, old[1]))
    try:
        assert not tier.put(key(1), aligned(2 * PIECE_BYTES, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert tier.get(key(1)) is None
    assert tier.stats.errors >= 1
    clock.pass_time(100)
    assert tier.put(key(1), aligned(2 * PIECE_BYTES, 1))
    tier.check_integrity()


def test_threads_do_not_get_each_others_bytes(tier):
    payloads = [aligned(2 * PIECE_BYTES, number) for number in range(4)]
    start = threading.Barrier(4)

    def use(number: int) -> bool:
        start.wait()
        assert tier.put(key(number), payloads[number])
        return all(tier.get(key(number)) == payloads[number] for _ in range(4))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(4)))
    tier.check_integrity()


def test_a_forked_child_reads_without_the_parents_flights(tier):
    payload = aligned(2 * PIECE_BYTES, 1)
    assert tier.put(key(1), payload)
    child = os.fork()
    if not child:
        os._exit(0 if tier.get(key(1)) == payload and not aio.flight().available else 1)
    assert os.waitpid(child, 0)[1] == 0
