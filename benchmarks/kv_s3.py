"""The S3 tier beside plain boto3 against the same server: gets of chunks, and puts until they are durable.

A SeaweedFS keeps its data in a folder in memory. Variants are interleaved: every round runs each of them once, over the
same objects, and a ratio is the median of the rounds' own ratios. Plain boto3 runs with the numbers of threads that
anyone would try; the best of them in a round is the peer. It checks nothing; the tier verifies every chunk.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from kv_rounds import MIB, log
from report import Bar, Report, Row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hack"))

import seaweedfs

from paceline_kvstore import ChunkKey
from paceline_kvstore.breaker import BreakerLimits
from paceline_kvstore.s3.names import object_name
from paceline_kvstore.s3.session import make_client, make_session
from paceline_kvstore.s3.settings import S3Settings
from paceline_kvstore.tiers.guarded import GuardedTier
from paceline_kvstore.tiers.s3 import open_s3

SIZES = (1 * MIB, 8 * MIB, 32 * MIB)
THREADS = (1, 4, 8, 16)
BYTES_A_ROUND = 64 * MIB
GET_SHARE = 0.8


@contextmanager
def server(folder: Path) -> Iterator[S3Settings]:
    """An empty bucket on a server of its own."""
    data = Path(tempfile.mkdtemp(prefix="kv-s3-", dir=folder))
    try:
        with seaweedfs.serve(data) as url:
            settings = S3Settings(
                bucket="bench", endpoint=url, access_key=seaweedfs.ACCESS_KEY, secret_key=seaweedfs.SECRET_KEY,
                read_deadline=60.0, pack_chunk_bytes=0, breaker=BreakerLimits(slow_seconds=60.0),
            )  # fmt: skip
            _make_bucket(settings)
            yield settings
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _make_bucket(settings: S3Settings) -> None:
    client = make_client(make_session(settings), settings, connections=1, read_timeout=10.0)
    deadline = time.monotonic() + 60
    while True:  # The gateway listens a moment before its filer serves and volumes grow.
        try:
            client.create_bucket(Bucket=settings.bucket)
            client.put_object(Bucket=settings.bucket, Key="ready", Body=b"")
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _key(number: int, num_bytes: int) -> ChunkKey:
    return ChunkKey(num_bytes.to_bytes(32, "big"), os.urandom(30) + number.to_bytes(2, "big"), 256)


def _seconds(call: Callable[[Any], object], items: Sequence[Any], threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))  # Threads start outside the measurement.
        begun = time.perf_counter()
        list(pool.map(call, items))
        return time.perf_counter() - begun


class Gets:
    """Gets of one size of chunk, both ways."""

    def __init__(self, settings: S3Settings, tier: GuardedTier, num_bytes: int) -> None:
        self.keys = [_key(number, num_bytes) for number in range(max(BYTES_A_ROUND // num_bytes, 4))]
        self.total = len(self.keys) * num_bytes
        payload = os.urandom(num_bytes)
        for key in self.keys:
            if not tier.put(key, payload, durable=True):
                raise RuntimeError("the server did not take a chunk")
        self.tier = tier
        self.settings = settings
        self.client = make_client(make_session(settings), settings, connections=max(THREADS), read_timeout=60.0)

    def ours(self, key: ChunkKey) -> None:
        if self.tier.get(key) is None:
            raise RuntimeError("the tier missed a chunk that is there")

    def plain(self, key: ChunkKey) -> None:
        name = object_name(self.settings.prefix, key)
        self.client.get_object(Bucket=self.settings.bucket, Key=name)["Body"].read()

    def round(self) -> dict[tuple[str, int], float]:
        """Bytes a second of each way and number of threads."""
        speeds: dict[tuple[str, int], float] = {}
        for threads in THREADS:
            speeds["plain", threads] = self.total / _seconds(self.plain, self.keys, threads)
            speeds["ours", threads] = self.total / _seconds(self.ours, self.keys, threads)
        return speeds


def _best(speeds: dict[tuple[str, int], float], way: str) -> float:
    return max(speed for (name, _), speed in speeds.items() if name == way)


def get_speeds(report: Report, settings: S3Settings, tier: GuardedTier, num_bytes: int, rounds: int) -> None:
    """Rows and the bar for gets of one size."""
    gets = Gets(settings, tier, num_bytes)
    gets.round()  # Connections and memory of both ways are warm.
    measured = [gets.round() for _ in range(rounds)]
    size = f"{num_bytes // MIB} MiB"
    for threads in THREADS:
        ours, plain = (median(speeds[way, threads] for speeds in measured) / 1e6 for way in ("ours", "plain"))
        report.rows.append(Row(f"S3 get {size}, {threads} at a time", "speed", "MB/s", ours, plain, "boto3"))
    ratio = median(_best(speeds, "ours") / _best(speeds, "plain") for speeds in measured)
    report.bars.append(Bar(f"S3 get {size} / best plain boto3", round(ratio, 3), ">=", GET_SHARE))
    log.info("  S3 get %s: %.2f x best plain boto3", size, ratio)


def put_speeds(report: Report, settings: S3Settings, tier: GuardedTier, rounds: int) -> None:
    """Rows for puts of 8 MiB: until `flush` says that all are durable, and by plain boto3 with as many threads."""
    client = make_client(make_session(settings), settings, connections=max(THREADS), read_timeout=60.0)
    payload = os.urandom(8 * MIB)

    def ours() -> None:
        for number in range(8):
            tier.put(_key(number, 8 * MIB), payload)
        if not tier.flush():
            raise RuntimeError("the server did not take a chunk")

    def plain(number: int) -> None:
        client.put_object(Bucket=settings.bucket, Key=f"plain/{os.urandom(8).hex()}-{number}", Body=payload)

    speeds: list[tuple[float, float]] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        ours()
        ended = time.perf_counter()
        speeds.append((ended - begun, _seconds(plain, range(8), settings.write_workers)))
    mine, theirs = (median(8 * 8 * MIB / pair[way] / 1e6 for pair in speeds) for way in (0, 1))
    report.rows.append(Row(f"S3 put 8 MiB, {settings.write_workers} at a time", "speed", "MB/s", mine, theirs, "boto3"))
    log.info("  S3 put 8 MiB: %.0f MB/s, plain boto3 %.0f", mine, theirs)


def s3_section(report: Report, folder: Path, rounds: int) -> None:
    """Add the S3 tier's rows and bars. `folder` should be in memory; it takes about 1 GiB for a while."""
    with server(folder) as settings:
        tier = open_s3(settings)
        try:
            for num_bytes in SIZES:
                get_speeds(report, settings, tier, num_bytes, rounds)
            put_speeds(report, settings, tier, min(rounds, 3))
        finally:
            tier.close()
