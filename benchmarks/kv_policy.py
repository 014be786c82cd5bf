"""Share of prompt tokens that a cache of KV blocks would have found, by order of eviction, on a trace of real prompts.

python benchmarks/kv_policy.py TRACE...: JSONL files, gzip or not, of objects with `hash_ids`, the ids of a prompt's
blocks, first block first, equal ids for equal prefixes (the form of Mooncake's traces, Qin et al., FAST 2025). A
prompt finds its leading blocks as far as they are held, as `contains` does; all its blocks are touched or put, each
with its parent. `no chains` is the order alone, without the rule that a suffix goes before its prefix. `disk` is the
real disk tier with empty payloads, which take a block each, so its capacity is what its index holds when it is full.
Nothing is random or timed. Writes results/kv_policy.json.
"""

from __future__ import annotations

import gzip
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from report import Bar, Report, Row
from s3fifo import S3Fifo

from paceline_kvstore import ChunkKey
from paceline_kvstore.disk.record import BLOCK
from paceline_kvstore.policy.admission import SecondOffer
from paceline_kvstore.policy.eviction import AdaptiveLru, Eviction, Lru
from paceline_kvstore.tiers import DiskOptions, DiskTier

SHARES = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.4)
SOME = (0.02, 0.1, 0.3)
"""Sizes at which admission and the disk tier are tried, too: they take minutes."""
log = logging.getLogger("bench")
Prompts = list[list[int]]


def read(path: Path) -> Prompts:
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    return [json.loads(line)["hash_ids"] for line in lines]


def in_memory(
    prompts: Prompts, capacity: int, order: Eviction[int], *, chains: bool = True, admission: int = 0
) -> float:
    """Share of blocks found. A put that finds no room but its own prefix is refused, as in the memory tier."""
    held: set[int] = set()
    admit: SecondOffer[int] = SecondOffer(admission)
    found = total = 0
    for blocks in prompts:
        total += len(blocks)
        leading = next((at for at, block in enumerate(blocks) if block not in held), len(blocks))
        found += leading
        parent: int | None = None
        for at, block in enumerate(blocks):
            if block in held:
                order.touch(block)
            elif at < leading or admit.offer(block):
                if len(held) == capacity:
                    victim = order.evict(parent=parent)
                    if victim is None:
                        break
                    held.remove(victim)
                order.add(block, 1, parent if chains else None)
                held.add(block)
            parent = block
    return found / total


def on_disk(prompts: Prompts, capacity: int) -> float:
    """The same with a disk tier. Reads are those of the blocks found."""

    def key(block: int) -> ChunkKey:
        return ChunkKey(b"n" * 32, block.to_bytes(32, "big"), 512)

    found = total = 0
    with tempfile.TemporaryDirectory(prefix="bench-kv-") as folder:
        # One segment and a half are kept free for copies.
        size = BLOCK * capacity * 32 // 31
        tier = DiskTier(Path(folder), size, DiskOptions(segment_bytes=size // 32, direct=False))
        for blocks in prompts:
            keys = [key(block) for block in blocks]
            total += len(keys)
            leading = tier.contains(keys)
            found += leading
            for chunk in keys[:leading]:
                tier.read_into(chunk, bytearray())
            for at in range(leading, len(keys)):
                if not tier.put(keys[at], b"", parent=keys[at - 1] if at else None):
                    break
        log.info("disk: %d of %d blocks held at the end, %d evicted", len(tier), capacity, tier.stats.evictions)
        tier.close()
    return found / total


def runs(prompts: Prompts, capacity: int, *, all_of_them: bool) -> dict[str, Callable[[], float]]:
    """What is measured at one size, by name."""
    orders: dict[str, Callable[[], float]] = {
        "LRU, no chains": lambda: in_memory(prompts, capacity, Lru(), chains=False),
        "LRU": lambda: in_memory(prompts, capacity, Lru()),
        "S3-FIFO": lambda: in_memory(prompts, capacity, S3Fifo()),
        "ours": lambda: in_memory(prompts, capacity, AdaptiveLru()),
    }
    more: dict[str, Callable[[], float]] = {
        "ours, second offer": lambda: in_memory(prompts, capacity, AdaptiveLru(), admission=4 * capacity),
        "disk": lambda: on_disk(prompts, capacity),
    }
    return orders | more if all_of_them else orders


def measure(report: Report, trace: Path) -> None:
    prompts = read(trace)
    name = trace.name.split(".")[0]
    distinct = len({block for blocks in prompts for block in blocks})
    report.rows.append(Row(name, "blocks found with room for all", "", 1 - distinct / sum(map(len, prompts))))
    worst, best_small = 1.0, 0.0
    for share in SHARES:
        case = f"{name}, room for {share:.0%} of its blocks"
        found: dict[str, float] = {}
        for order, run in runs(prompts, int(share * distinct), all_of_them=share in SOME).items():
            found[order] = run()
            log.info("%s, %s: %.4f", case, order, found[order])
        lru = max(found["LRU"], found["LRU, no chains"])
        for order, value in found.items():
            report.rows.append(Row(case, f"{order}: blocks found", "", round(value, 4), round(lru, 4), "LRU"))
        worst = min(worst, found["ours"] - lru)
        best_small = max(best_small, found["ours"] / lru)
    report.bars.append(Bar(f"{name}: ours - LRU, the worst size", round(worst, 4), ">=", -0.002))
    report.bars.append(Bar(f"{name}: ours / LRU, the best size", round(best_small, 3), ">=", 1.05))


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if len(sys.argv) < 2:
        sys.stderr.write("usage: python benchmarks/kv_policy.py TRACE.jsonl[.gz] ...\n")
        return 2
    report = Report("kv_policy")
    for trace in map(Path, sys.argv[1:]):
        measure(report, trace)
    sys.stdout.write(report.write().with_suffix(".md").read_text())
    return 0 if all(bar.document()["holds"] for bar in report.bars) else 1


if __name__ == "__main__":
    sys.exit(main())
