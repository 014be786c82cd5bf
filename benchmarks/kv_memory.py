"""The memory tier beside numpy's copy of as many buffers of the same size, and its index beside its bounds.

Puts, copies out and leases; a million keys in the index of the disk tier.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from kv_lmcache import LMCACHE, Lmcache
from kv_rounds import LIMIT, MIB, OURS, buffer, key, log, pairs, timed
from report import Bar, Report, Row

from paceline_kvstore import ChunkKey
from paceline_kvstore.disk.index import Index
from paceline_kvstore.tiers import MemoryTier

TOTAL_BYTES = 128 * MIB
CHUNK_SIZES = (8 * MIB, 32 * MIB)
NUM_KEYS = 1_000_000
BOUNDS = {LIMIT: 0.8, LMCACHE: 1.5}


def memory_section(report: Report, peer: Lmcache, rounds: int) -> None:
    for chunk in CHUNK_SIZES:
        _chunks_of(report, peer, rounds, chunk)


def _chunks_of(report: Report, peer: Lmcache, rounds: int, chunk: int) -> None:
    count = TOTAL_BYTES // chunk
    sources = [buffer(chunk, number) for number in range(count)]
    copies = [buffer(chunk, number) for number in range(count)]
    target = buffer(chunk, 0)
    tier = MemoryTier(TOTAL_BYTES)

    def put() -> None:
        for number, source in enumerate(sources):
            assert tier.put(key(number), source.data)

    def copy_in() -> None:
        for copy, source in zip(copies, sources, strict=True):
            np.copyto(copy, source)

    def read() -> None:
        for number in range(count):
            assert tier.read_into(key(number), target.data)

    def copy_out() -> None:
        for copy in copies:
            np.copyto(target, copy)

    name = f"memory, {chunk // MIB} MiB"
    theirs = peer.actions("memory", chunk, count)
    puts = {OURS: timed(put), LIMIT: timed(copy_in), **theirs("put")}
    pairs(report, f"{name}, put with checksum", TOTAL_BYTES, puts, rounds, {}, tier.clear, peer.pids)
    tier.clear()
    put()
    gets = {OURS: timed(read), LIMIT: timed(copy_out), **theirs("get")}
    pairs(report, f"{name}, get copied out", TOTAL_BYTES, gets, rounds, BOUNDS, helpers=peer.pids)
    peer.explain(report, f"{name}, get copied out", BOUNDS)
    _leases(report, name, tier, count, peer.lease_us(chunk, count))
    peer.close("memory")


def _leases(report: Report, name: str, tier: MemoryTier, count: int, theirs_us: float | None) -> None:
    times: list[float] = []
    for number in range(5000):
        wanted = key(number % count)
        begin = time.perf_counter()
        lease = tier.lease(wanted)
        assert lease is not None
        lease.release()
        times.append(1e6 * (time.perf_counter() - begin))
    times.sort()
    p50 = round(times[len(times) // 2], 2)
    report.rows.append(Row(name, "lease and release, p50", "us", p50, theirs_us and round(theirs_us, 2), LMCACHE))
    report.rows.append(Row(name, "lease and release, p99", "us", round(times[len(times) * 99 // 100], 2)))
    report.bars.append(Bar(f"{name}: lease p50, us", p50, "<=", 20))
    log.info("  %s: lease %.1f us, LMCache %s", name, p50, theirs_us and round(theirs_us, 1))


def index_section(report: Report) -> None:
    index, rng = Index(), np.random.default_rng(0)
    chains = rng.bytes(32 * NUM_KEYS)
    wires = [ChunkKey(b"n" * 32, chains[at : at + 32], 256).to_bytes() for at in range(0, 32 * 20_000, 32)]
    resident = _resident_bytes()
    slowest = 0.0
    for number in range(NUM_KEYS):
        wire = ChunkKey(b"n" * 32, chains[32 * number : 32 * number + 32], 256).to_bytes()
        begin = time.perf_counter()
        index.add(wire, 1 + number // 1000, 1 + number % 1000, MIB, parent=number if number % 16 else 0)
        slowest = max(slowest, time.perf_counter() - begin)
    grown = _resident_bytes() - resident
    times: list[float] = []
    for wire in wires:
        begin = time.perf_counter()
        assert index.find(wire)
        times.append(1e6 * (time.perf_counter() - begin))
    times.sort()
    case, p50 = "index, 1M keys", round(times[len(times) // 2], 2)
    report.rows += [
        Row(case, "memory of its arrays per key", "bytes", round(index.memory_bytes / NUM_KEYS, 1)),
        Row(case, "growth of the process per key", "bytes", round(grown / NUM_KEYS, 1)),
        Row(case, "lookup p50", "us", p50),
        Row(case, "lookup p99", "us", round(times[len(times) * 99 // 100], 2)),
        Row(case, "slowest add", "ms", round(1e3 * slowest, 1)),
    ]
    report.bars += [
        Bar(f"{case}: bytes per key", round(grown / NUM_KEYS, 1), "<=", 200),
        Bar(f"{case}: lookup p50, us", p50, "<=", 10),
    ]
    log.info("  %s: %.0f bytes a key, lookup p50 %.2f us", case, grown / NUM_KEYS, p50)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
