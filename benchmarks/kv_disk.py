"""The disk tier beside the raw device path.

The raw path is what a program without any promise would do on the same file system: whole chunks of the same size
through O_DIRECT (or the page cache, where the tier cannot go past it either), from and to aligned memory, as many calls
at a time, no sync, over blocks of a file that are laid out already. The tier makes and checks checksums,
indexes, and is full before it is timed, as it is in use: its puts pay for the segments that go. Rows beside the bars:
appending to a new file, which is what a store without reuse would do, and a sync after each chunk (`durable`).
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kv_lmcache import LMCACHE, Lmcache
from kv_rounds import LIMIT, MIB, OURS, Bytes, buffer, compare, key, measure, pairs, timed
from report import Report, Row

from paceline_kvstore import ChunkKey
from paceline_kvstore.tiers import DiskOptions, DiskTier

TOTAL_BYTES = 128 * MIB
CHUNK_SIZES = (8 * MIB, 32 * MIB)
PUT_BOUNDS = {LIMIT: 0.7, LMCACHE: 1.5}
READERS = 4
"""As many as a store's read pool has; LMCache's own call for a prefix reads with threads, too."""
GET_BOUNDS = {LIMIT: 0.8, LMCACHE: 1.5}


class PlainFile:
    """A file of TOTAL_BYTES without any of a store's promises."""

    def __init__(self, path: Path, chunk: int, *, direct: bool) -> None:
        self._path, self._flags = path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self._chunks = TOTAL_BYTES // chunk
        self._source, self._target = buffer(chunk, 1), buffer(chunk, 2)
        self._fd = os.open(path, self._flags)

    def renew(self) -> None:
        """An empty file in place of the old one."""
        self.close()
        self._fd = os.open(self._path, self._flags)

    def write(self, *, durable: bool = False) -> None:
        for number in range(self._chunks):
            os.pwritev(self._fd, [self._source.data], number * len(self._source))
            if durable:
                os.fdatasync(self._fd)

    def read(self) -> None:
        for number in range(self._chunks):
            os.preadv(self._fd, [self._target.data], number * len(self._target))

    def read_at_a_time(self, pool: ThreadPoolExecutor, targets: Sequence[Bytes]) -> None:
        def one(number: int) -> int:
            return os.preadv(self._fd, [targets[number % len(targets)].data], number * len(self._target))

        assert all(pool.map(one, range(self._chunks)))

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink()


class Ours:
    """A full tier: each put evicts."""

    def __init__(self, folder: Path, chunk: int) -> None:
        self.tier = DiskTier(folder, 8 * TOTAL_BYTES, DiskOptions(segment_bytes=TOTAL_BYTES))
        self._count = TOTAL_BYTES // chunk
        self._source, self._target = buffer(chunk, 1), buffer(chunk, 2)
        self._numbers = itertools.count()
        while not self.tier.stats.evictions:
            self.put()

    def put(self, *, durable: bool = False) -> None:
        for number in itertools.islice(self._numbers, self._count):
            assert self.tier.put(key(number), self._source.data, durable=durable)

    def get(self) -> None:
        for wanted in itertools.islice(self.tier.keys(), self._count):
            assert self.tier.read_into(wanted, self._target.data)

    def get_at_a_time(self, pool: ThreadPoolExecutor, targets: Sequence[Bytes]) -> None:
        def one(item: tuple[int, ChunkKey]) -> int | None:
            return self.tier.read_into(item[1], targets[item[0] % len(targets)].data)

        assert all(pool.map(one, enumerate(itertools.islice(self.tier.keys(), self._count))))


def disk_section(report: Report, peer: Lmcache, rounds: int, folder: Path | None) -> None:
    """`folder`: on the device to measure; None: the system's temporary folder."""
    for chunk in CHUNK_SIZES:
        with tempfile.TemporaryDirectory(dir=folder, prefix="bench-kv-") as name:
            _chunks_of(report, peer, rounds, chunk, Path(name))


def _chunks_of(report: Report, peer: Lmcache, rounds: int, chunk: int, folder: Path) -> None:
    ours = Ours(folder / "tier", chunk)
    plain = PlainFile(folder / "plain", chunk, direct=ours.tier.direct)
    theirs = peer.actions("disk", chunk, TOTAL_BYTES // chunk, folder / "lmcache")
    name = f"disk, {chunk // MIB} MiB"
    report.rows.append(Row(name, "direct I/O", "", float(ours.tier.direct)))
    puts = {OURS: timed(ours.put), LIMIT: timed(plain.write), **theirs("put")}
    pairs(report, f"{name}, put", TOTAL_BYTES, puts, rounds, PUT_BOUNDS, helpers=peer.pids)
    peer.explain(report, f"{name}, put", PUT_BOUNDS)
    gets = {OURS: timed(ours.get), LIMIT: timed(plain.read), **theirs("get")}
    pairs(report, f"{name}, get", TOTAL_BYTES, gets, rounds, GET_BOUNDS, helpers=peer.pids)
    peer.explain(report, f"{name}, get", GET_BOUNDS)
    few = min(rounds, 5)
    targets = [buffer(chunk, number) for number in range(2 * READERS)]
    with ThreadPoolExecutor(READERS) as pool:
        prefixes = {
            OURS: timed(lambda: ours.get_at_a_time(pool, targets)),
            LIMIT: timed(lambda: plain.read_at_a_time(pool, targets)),
            **theirs("prefix"),
        }
        case = f"{name}, get, {READERS} at a time"
        bound = {LMCACHE: GET_BOUNDS[LMCACHE]}
        pairs(report, case, TOTAL_BYTES, prefixes, few, bound, helpers=peer.pids)
    peer.explain(report, case, bound)
    durable = {OURS: timed(lambda: ours.put(durable=True)), LIMIT: timed(lambda: plain.write(durable=True))}
    compare(report, f"{name}, durable put", TOTAL_BYTES, measure(durable, few), {})
    appends = {OURS: timed(ours.put), LIMIT: timed(plain.write)}
    rounds_of_appends = measure(appends, few, plain.renew)
    compare(report, f"{name}, put beside appending to a new file", TOTAL_BYTES, rounds_of_appends, {})
    plain.close()
    ours.tier.close()
    peer.close("disk")
    shutil.rmtree(folder / "tier")
