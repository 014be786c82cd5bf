"""The KV store's tiers beside the machine's own limits and LMCache's backends, in one run: `make bench-kv`.

    python benchmarks/kv.py [--only SECTION] [--rounds 9] [--folder DIR]

memory: numpy's copy. disk: the raw device path (`kv_disk`). index: a million keys. s3: the best plain boto3 concurrency
against the same SeaweedFS. server: a raw Unix socket between the same processes. Ours and the limit alternate within
each round and only ratios of a round count (`kv_rounds`). Writes results/kv.json; with --only, .build/kv.json.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kv_disk import disk_section
from kv_lmcache import LMCACHE, Lmcache
from kv_memory import index_section, memory_section
from kv_rounds import log
from kv_s3 import s3_section
from kv_server import server_section
from report import Report

PARTIAL = Path(__file__).parent.parent / ".build" / "kv.json"


def sections(report: Report, peer: Lmcache, args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """What can be measured, by name, in the order of the report."""
    return {
        "memory": lambda: memory_section(report, peer, args.rounds),
        "disk": lambda: disk_section(report, peer, args.rounds, args.folder),
        "index": lambda: index_section(report),
        "server": lambda: server_section(report, args.rounds),
        "s3": lambda: s3_section(report, Path("/dev/shm"), min(5, args.rounds)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="SECTION", help="repeatable; default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where the disk section writes (default: a temporary folder)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    report, peer = Report("kv"), Lmcache()
    known = sections(report, peer, args)
    wanted = args.only or list(known)
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(known)}")
    report.more["peers"] = {LMCACHE: peer.version or peer.reason}
    begun = time.monotonic()
    try:
        for number, name in enumerate(wanted, 1):
            log.info("[%d/%d] %s, %.0f s so far", number, len(wanted), name, time.monotonic() - begun)
            known[name]()
    finally:
        peer.stop()
    report.more["seconds"] = round(time.monotonic() - begun)
    path = report.write(PARTIAL if args.only else None)
    sys.stdout.write(path.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
