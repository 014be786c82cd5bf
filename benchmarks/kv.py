"""The KV store's tiers beside the machine's own limits: `python benchmarks/kv.py [memory] [disk] [index] [s3]`.

Memory: puts, copies out and leases against numpy's copy of as many buffers of the same size. Disk: puts, durable puts
and reads into aligned memory against the same writes and reads of plain files with O_DIRECT. A store of new chunks
appends, so writes are compared with appending to a new file; what overwriting blocks that are laid out already gives
is a row of its own. The tier is full before it is timed, as it is in use: its puts pay for the segments that go, and
both sides write to blocks of the device that were written before. Index: a million keys.

Ours and the limit alternate within each round and only ratios of a round count: absolute figures vary by machine and
hour. The share of the CPU that others took is recorded; rounds in which it was above a tenth are left out if enough
others remain. Everything is touched once before it is timed. Writes results/kv.json.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kv_s3 import s3_section
from report import Bar, Report, Row

from paceline_kvstore import ChunkKey
from paceline_kvstore.disk.index import Index
from paceline_kvstore.tiers import DiskOptions, DiskTier, MemoryTier

MIB = 1 << 20
ROUNDS = 9
ROUNDS_ENOUGH = 5
OTHERS_MAX = 0.1
TOTAL_BYTES = 128 * MIB
NUM_KEYS = 1_000_000
Bytes = npt.NDArray[np.uint8]
log = logging.getLogger("bench")


@dataclass(frozen=True)
class Pair:
    """What one round measured: seconds of ours and of the limit, and the share of the CPU that others took."""

    ours: float
    limit: float
    others: float


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 256)


def buffer(size: int, fill: int) -> Bytes:
    """Touched memory that begins on a page."""
    memory: Bytes = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    memory[:] = np.random.default_rng(fill).integers(0, 256, size, dtype=np.uint8)
    return memory


def busy_seconds() -> float:
    """CPU seconds of the whole machine that were not idle."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def alternate(ours: Callable[[], None], limit: Callable[[], None], before: Callable[[], None]) -> list[Pair]:
    """ROUNDS rounds, the order turned round each time; without the disturbed ones if enough remain."""
    pairs: list[Pair] = []
    for number in range(ROUNDS):
        before()
        busy, own, start = busy_seconds(), sum(os.times()[:2]), time.perf_counter()
        seconds = {}
        for function in (ours, limit) if number % 2 else (limit, ours):
            begin = time.perf_counter()
            function()
            seconds[function] = time.perf_counter() - begin
        others = busy_seconds() - busy - (sum(os.times()[:2]) - own)
        share = max(0.0, others) / (time.perf_counter() - start) / (os.cpu_count() or 1)
        pairs.append(Pair(seconds[ours], seconds[limit], share))
    calm = [pair for pair in pairs if pair.others <= OTHERS_MAX]
    return calm if len(calm) >= ROUNDS_ENOUGH else pairs


def compare(report: Report, case: str, size: int, pairs: list[Pair], bound: float | None) -> None:
    """Rows in GB/s (1e9), the median ratio of the rounds, and its bar."""
    ratio = statistics.median(pair.limit / pair.ours for pair in pairs)
    ours = size / statistics.median(pair.ours for pair in pairs) / 1e9
    limit = size / statistics.median(pair.limit for pair in pairs) / 1e9
    report.rows.append(Row(case, "bandwidth", "GB/s", ours, limit, "limit"))
    report.rows.append(Row(case, "ratio, median of rounds", "", ratio))
    report.rows.append(Row(case, "CPU share of others, worst", "", max(pair.others for pair in pairs)))
    if bound is not None:
        report.bars.append(Bar(f"{case}: x limit", round(ratio, 3), ">=", bound))
    log.info("%s: %.2f GB/s, limit %.2f, ratio %.2f", case, ours, limit, ratio)


def memory_section(report: Report) -> None:
    for chunk in (8 * MIB, 32 * MIB):
        count = TOTAL_BYTES // chunk
        sources = [buffer(chunk, number) for number in range(count)]
        copies = [buffer(chunk, number) for number in range(count)]
        target = buffer(chunk, 0)
        tier = MemoryTier(TOTAL_BYTES)

        def put(tier: MemoryTier = tier, sources: list[Bytes] = sources) -> None:
            for number, source in enumerate(sources):
                assert tier.put(key(number), source.data)

        def copy_in(sources: list[Bytes] = sources, copies: list[Bytes] = copies) -> None:
            for copy, source in zip(copies, sources, strict=True):
                np.copyto(copy, source)

        def read(tier: MemoryTier = tier, count: int = count, target: Bytes = target) -> None:
            for number in range(count):
                assert tier.read_into(key(number), target.data)

        def copy_out(copies: list[Bytes] = copies, target: Bytes = target) -> None:
            for copy in copies:
                np.copyto(target, copy)

        put()
        name = f"memory, {chunk // MIB} MiB"
        compare(report, f"{name}, put with checksum", TOTAL_BYTES, alternate(put, copy_in, tier.clear), None)
        tier.clear()
        put()
        compare(report, f"{name}, get copied out", TOTAL_BYTES, alternate(read, copy_out, lambda: None), 0.8)
        lease_times(report, name, tier, count)


def lease_times(report: Report, name: str, tier: MemoryTier, count: int) -> None:
    times: list[float] = []
    for number in range(5000):
        wanted = key(number % count)
        begin = time.perf_counter()
        lease = tier.lease(wanted)
        assert lease is not None
        lease.release()
        times.append(1e6 * (time.perf_counter() - begin))
    times.sort()
    report.rows.append(Row(name, "lease and release, p50", "us", times[len(times) // 2]))
    report.rows.append(Row(name, "lease and release, p99", "us", times[len(times) * 99 // 100]))
    report.bars.append(Bar(f"{name}: lease p50, us", round(times[len(times) // 2], 2), "<=", 20))


class PlainFile:
    """A file without any of a store's promises, past the page cache where that works."""

    def __init__(self, path: Path, chunk: int) -> None:
        self._path = path
        self._chunks = TOTAL_BYTES // chunk
        self._source, self._target = buffer(chunk, 1), buffer(chunk, 2)
        self.fd = -1
        self.renew()

    def renew(self) -> None:
        """An empty file in place of the old one."""
        self.close()
        try:
            self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        except OSError:
            self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT)

    def write(self, durable: bool = False) -> None:
        for number in range(self._chunks):
            os.pwritev(self.fd, [self._source.data], number * len(self._source))
            if durable:
                os.fdatasync(self.fd)

    def read(self) -> None:
        for number in range(self._chunks):
            os.preadv(self.fd, [self._target.data], number * len(self._target))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self._path.unlink()
            self.fd = -1


def disk_section(report: Report, folder: Path) -> None:
    for chunk in (8 * MIB, 32 * MIB):
        count = TOTAL_BYTES // chunk
        source, target = buffer(chunk, 1), buffer(chunk, 2)
        plain = PlainFile(folder / "plain", chunk)
        tier = DiskTier(folder / "tier", 8 * TOTAL_BYTES, DiskOptions(segment_bytes=TOTAL_BYTES))
        numbers = itertools.count()

        def put(
            durable: bool = False, tier: DiskTier = tier, source: Bytes = source, numbers: Iterator[int] = numbers
        ) -> None:
            for number in itertools.islice(numbers, TOTAL_BYTES // len(source)):
                assert tier.put(key(number), source.data, durable=durable)

        def put_durable(put: Callable[[bool], None] = put) -> None:
            put(True)

        def write_durable(plain: PlainFile = plain) -> None:
            plain.write(durable=True)

        def get(tier: DiskTier = tier, target: Bytes = target, count: int = count) -> None:
            for wanted in itertools.islice(tier.keys(), count):
                assert tier.read_into(wanted, target.data)

        name = f"disk, {chunk // MIB} MiB"
        while not tier.stats.evictions:
            put()
        compare(report, f"{name}, put", TOTAL_BYTES, alternate(put, plain.write, plain.renew), 0.7)
        pairs = alternate(put_durable, write_durable, plain.renew)
        compare(report, f"{name}, durable put", TOTAL_BYTES, pairs, None)
        pairs = alternate(put, plain.write, lambda: None)
        compare(report, f"{name}, put against overwriting", TOTAL_BYTES, pairs, None)
        compare(report, f"{name}, get", TOTAL_BYTES, alternate(get, plain.read, lambda: None), 0.8)
        report.rows.append(Row(name, "direct I/O", "", float(tier.direct)))
        plain.close()
        tier.close()
        shutil.rmtree(folder / "tier")


def index_section(report: Report) -> None:
    index, rng = Index(), np.random.default_rng(0)
    chains = rng.bytes(32 * NUM_KEYS)
    wires = [ChunkKey(b"n" * 32, chains[at : at + 32], 256).to_bytes() for at in range(0, 32 * 20_000, 32)]
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    adds = 0.0
    for number in range(NUM_KEYS):
        wire = ChunkKey(b"n" * 32, chains[32 * number : 32 * number + 32], 256).to_bytes()
        begin = time.perf_counter()
        index.add(wire, 1 + number // 1000, 1 + number % 1000, MIB, parent=number if number % 16 else 0)
        adds = max(adds, time.perf_counter() - begin)
    grown = (int(Path("/proc/self/statm").read_text().split()[1]) - resident) * os.sysconf("SC_PAGE_SIZE")
    times: list[float] = []
    for wire in wires:
        begin = time.perf_counter()
        assert index.find(wire)
        times.append(1e6 * (time.perf_counter() - begin))
    times.sort()
    case = "index, 1M keys"
    report.rows += [
        Row(case, "memory of its arrays per key", "bytes", index.memory_bytes / NUM_KEYS),
        Row(case, "growth of the process per key", "bytes", grown / NUM_KEYS),
        Row(case, "lookup p50", "us", times[len(times) // 2]),
        Row(case, "lookup p99", "us", times[len(times) * 99 // 100]),
        Row(case, "slowest add", "ms", 1e3 * adds),
    ]
    report.bars += [
        Bar(f"{case}: bytes per key", round(grown / NUM_KEYS, 1), "<=", 200),
        Bar(f"{case}: lookup p50, us", round(times[len(times) // 2], 2), "<=", 10),
    ]


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sections", nargs="*", choices=["memory", "disk", "index", "s3", []], help="default: all")
    parser.add_argument("--folder", type=Path, help="where the disk section writes (default: a temporary folder)")
    arguments = parser.parse_args()
    sections = arguments.sections or ["memory", "disk", "index", "s3"]
    report = Report("kv")
    if "memory" in sections:
        memory_section(report)
    if "disk" in sections:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-kv-") as folder:
            disk_section(report, Path(folder))
    if "index" in sections:
        index_section(report)
    if "s3" in sections:
        s3_section(report, Path("/dev/shm"), ROUNDS_ENOUGH)
    sys.stdout.write(report.write().with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
