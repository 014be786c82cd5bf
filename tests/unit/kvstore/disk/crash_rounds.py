"""Run by test_crash.py: children write to one folder and are killed at random points; the parent reopens and checks.

Usage: crash_rounds.py FOLDER ROUNDS SEED CAPACITY. Prints one JSON object. Forks, so it must stay free of threads.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from paceline_kvstore import ChunkKey
from paceline_kvstore.tiers import DiskOptions, DiskTier

KEYS_PER_ROUND = 12


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 16)


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(random.Random(-number - 1).randrange(30_000))


def open_tier(folder: Path, capacity: int) -> DiskTier:
    options = DiskOptions(segment_bytes=max(128 << 10, capacity // 64), staging_bytes=1 << 20)
    return DiskTier(folder, capacity, options)


def write_until_killed(folder: Path, capacity: int, first: int, out: int) -> None:
    """Puts, some durable, some deleted again; a line when each begins and when it is acknowledged."""
    tier = open_tier(folder, capacity)
    rng = random.Random(first)
    for number in range(first, first + KEYS_PER_ROUND):
        os.write(out, b"begin\n")
        durable = rng.random() < 0.4
        parent = key(number - 1) if number % 8 else None
        if tier.put(key(number), payload_of(number), parent=parent, durable=durable):
            os.write(out, b"durable %d\n" % number if durable else b"put %d\n" % number)
        if rng.random() < 0.15:
            tier.delete(key(number))
            if tier.flush():
                os.write(out, b"deleted %d\n" % number)
    os.write(out, b"done\n")
    signal.pause()


def run_child(folder: Path, capacity: int, first: int, rng: random.Random) -> list[str]:
    """Lines of a child that was killed after a random number of them, and a random time later."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            write_until_killed(folder, capacity, first, writer)
        finally:
            os._exit(3)
    os.close(writer)
    stop_after = rng.randrange(1, 2 * KEYS_PER_ROUND)
    received = b""
    while received.count(b"\n") < stop_after and b"done" not in received and (more := os.read(reader, 4096)):
        received += more
    until = time.perf_counter() + rng.random() * 0.003
    while time.perf_counter() < until:
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 4096):
        received += more
    os.close(reader)
    return received.decode().splitlines()


def main() -> None:
    folder, rounds, seed, capacity = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    rng = random.Random(seed)
    promised: set[int] = set()
    gone: set[int] = set()
    report = {"durable": 0, "killed_within_a_put": 0, "lost": [], "back": [], "wrong": [], "held": 0, "evictions": 0}
    for round_number in range(rounds):
        lines = run_child(folder, capacity, round_number * KEYS_PER_ROUND, rng)
        for word, _, number in (line.partition(" ") for line in lines):
            if word == "durable":
                promised.add(int(number))
            elif word == "deleted":
                promised.discard(int(number))
                gone.add(int(number))
        report["killed_within_a_put"] += bool(lines) and lines[-1] == "begin"
        # A delete that was under way may have happened: its put was the last to be acknowledged.
        unsure = int(lines[-1].split()[1]) if lines and lines[-1].startswith(("durable", "put")) else -1
        promised.discard(unsure)
        tier = open_tier(folder, capacity)
        tier.check_integrity()
        report["evictions"] += tier.stats.evictions
        # All keys are looked up each time, the payloads of earlier rounds are read once, at the end.
        first = 0 if round_number == rounds - 1 else (round_number - 1) * KEYS_PER_ROUND
        held = {int.from_bytes(chunk.chain, "big"): chunk for chunk in list(tier.keys())}
        payloads = {number: tier.get(chunk) for number, chunk in held.items() if number >= first}
        report["wrong"] += [n for n, payload in payloads.items() if payload is not None and payload != payload_of(n)]
        report["lost"] += [n for n in promised if n not in held or payloads.get(n, b"") is None]
        report["back"] += [n for n in held if n in gone]
        report["held"] = len(held)
        tier.close()
    report["durable"] = len(promised)
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
