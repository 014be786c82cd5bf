"""`paceline kv bench`: how fast a place stores and gives back chunks. What it stores, it removes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline_cli.commands.kv.place import Place, Stored, size_of
from paceline_cli.commands.kv.report import human, progress, say
from paceline_cli.errors import EXIT_DONE, BadInput, CliError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiers.disk import DiskTier


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`chunks` chunks of `chunk_size` bytes (such as 8Mi) by `threads` threads."""

    chunks: int
    chunk_size: str
    threads: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One kind of call over all chunks: bytes per second in all, seconds of single calls."""

    bytes_per_s: float
    p50_s: float
    p95_s: float

    def line(self, what: str) -> str:
        calls = f"a call returns in {self.p50_s * 1e3:.2f} ms (p95 {self.p95_s * 1e3:.2f} ms)"
        return f"  {what}: {human(self.bytes_per_s)}/s, {calls}"


def run(place: Place, options: BenchOptions, *, as_json: bool) -> int:
    """Put all chunks, make them durable, get them all, in random bytes that do not compress."""
    size = size_of("--chunk-size", options.chunk_size)
    if size < 1:
        raise BadInput("--chunk-size: a chunk has at least 1 byte")
    with _scratch(place, size * options.chunks) as tier:
        namespace = os.urandom(32)
        keys = [ChunkKey(namespace, number.to_bytes(32, "big"), 1) for number in range(options.chunks)]
        payload = os.urandom(size)
        # A node server may have nothing but memory, where nothing becomes durable.
        finish = (lambda: True) if place.is_node else tier.flush
        try:
            put = _time(keys, size, options.threads, "writing", lambda key: _put(tier, key, payload), finish)
            get = _time(keys, size, options.threads, "reading", lambda key: _get(tier, key, size))
        finally:
            tier.clear(namespace=namespace)
    facts: dict[str, Any] = {"place": place.where, "chunks": options.chunks, "chunk_bytes": size}
    facts |= {name: _facts(timing) for name, timing in (("put", put), ("get", get))}
    durable = "" if place.is_node else " until durable"
    lines = [f"{place.where}: {options.chunks} chunks of {human(size)}, {options.threads} threads"]
    say(facts, [*lines, put.line(f"put{durable}"), get.line("get")], as_json=as_json)
    return EXIT_DONE


@contextmanager
def _scratch(place: Place, num_bytes: int) -> Iterator[Stored]:
    """A tier that nobody else uses: in a new folder inside the place, or under a prefix of its own."""
    if place.is_s3:
        name = f"bench-{os.urandom(4).hex()}"
        with replace(place, where=f"{place.where.rstrip('/')}/{name}").open() as tier:
            yield tier
        return
    if place.is_node:
        with place.open() as tier:
            yield tier
        return
    if not Path(place.where).is_dir():
        raise BadInput(f"{place.where}: no such folder; give one on the device to measure")
    free = shutil.disk_usage(place.where).free
    needed = 2 * num_bytes + (64 << 20)
    if free < needed:
        raise BadInput(f"{place.where}: {human(needed)} are needed and {human(free)} free; use fewer --chunks")
    folder = Path(tempfile.mkdtemp(prefix=".paceline-kv-bench-", dir=place.where))
    try:
        DiskTier(folder, needed).close()
        with replace(place, where=str(folder)).open(needed) as tier:
            yield tier
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)


def _put(tier: Stored, key: ChunkKey, payload: bytes) -> None:
    if not tier.put(key, payload):
        raise CliError("a chunk was not kept: the place is full or its queue is; use fewer or smaller chunks")


def _get(tier: Stored, key: ChunkKey, size: int) -> None:
    payload = tier.get(key)
    if payload is None or payload.nbytes != size:
        raise CliError("a chunk that was just stored is gone: the place is too small or fails")


def _time(
    keys: Sequence[ChunkKey],
    size: int,
    threads: int,
    what: str,
    call: Callable[[ChunkKey], None],
    finish: Callable[[], bool] = lambda: True,
) -> Timing:
    def one(key: ChunkKey) -> float:
        begun = time.perf_counter()
        call(key)
        return time.perf_counter() - begun

    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        try:
            seconds = sorted(progress(pool.map(one, keys), what, len(keys)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not finish():
        raise CliError("the chunks did not become durable")
    total = time.perf_counter() - begun
    return Timing(size * len(keys) / total, seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.95)])


def _facts(timing: Timing) -> dict[str, float]:
    return {"bytes_per_s": timing.bytes_per_s, "p50_s": timing.p50_s, "p95_s": timing.p95_s}
