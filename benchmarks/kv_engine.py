"""What the KV store costs an engine, and what it saves: `python benchmarks/kv_engine.py [cost] [restart]`.

Cost: two engines side by side, one of them with a store, get the same prompts, each unlike any other, in turns. What
counts is the CPU time of all their processes, write-behind included, as pairs of the same turn. Restart: the time to
the first token of one prompt of 4,000 tokens, computed by an engine and then loaded by its successor, from disk and
from S3 (SeaweedFS on this machine, with its data in memory), in pairs. Nothing warms the prefix up.

Absolute figures vary by machine and hour, so only ratios of a pair count, and their medians. Writes
results/kv_engine.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from report import Bar, Report, Row
from skeleton import engine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hack"))

import seaweedfs

COST_TURNS = 6
COST_REQUESTS = 2
COST_TOKENS = 1024
OUTPUT_TOKENS = 32
SETTLE_SECONDS = 1.0
RESTARTS = 2
LONG_TOKENS = 4000
COST_BOUND, RESTART_BOUND = 0.03, 0.15
# A file system in memory, where the machine has one: what is measured is the engine, not this machine's disk.
FAST = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
log = logging.getLogger("bench")
_serial = itertools.count(1)
Document = dict[str, Any]


def prompt(num_tokens: int) -> list[int]:
    """Token ids unlike those of any other prompt from the first one on."""
    serial = next(_serial)
    return [1000 + serial, *(1000 + (serial + 7 * index) % 40_001 for index in range(1, num_tokens))]


@contextmanager
def started(settings: Document | None, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """An engine with that store, or none: its URL and its first process."""
    options = ["--max-model-len=4352"]
    if settings is not None:
        file = folder / "kv.json"
        file.write_text(json.dumps(settings))
        options.append(f"--kv-store-config={file}")
    before = {child.pid for child in psutil.Process().children()}
    with engine(*options) as (base, _):
        (process,) = (child for child in psutil.Process().children() if child.pid not in before and is_engine(child))
        yield base, process


def is_engine(process: psutil.Process) -> bool:
    return any("paceline-engine" in word for word in process.cmdline())


def cpu_seconds(process: psutil.Process) -> float:
    """Of an engine's processes since they began."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def ask(base: str, token_ids: list[int], output_tokens: int) -> Document:
    body = {"model": "smollm2", "prompt": token_ids, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{base}/v1/completions", json=body, timeout=600)
    answer.raise_for_status()
    return answer.json()


def cost_of(base: str, process: psutil.Process, prompts: list[list[int]]) -> float:
    """CPU seconds of these prompts, with what is written behind them."""
    begin = cpu_seconds(process)
    for token_ids in prompts:
        usage = ask(base, token_ids, OUTPUT_TOKENS)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    time.sleep(SETTLE_SECONDS)
    return cpu_seconds(process) - begin


def cost_section(report: Report, turns: int, only: str) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-kv-", dir=FAST) as name, ExitStack() as stack:
        folder = Path(name)
        s3 = stack.enter_context(bucket(folder))
        disk = {"path": str(folder / "kv"), "capacity": "1Gi"}
        memory = {"capacity": "512Mi"}
        stores = {
            "disk": {"disk": disk},
            "memory and disk": {"memory": memory, "disk": disk | {"path": str(folder / "kv2")}},
            "memory and S3": {"memory": memory, "s3": s3},
        }
        plain = stack.enter_context(started(None, folder))
        for case, settings in stores.items():
            if only not in ("", case):
                continue
            with started(settings, folder) as stored:
                pairs = [one_turn(number, plain, stored) for number in range(-1, turns)][1:]
            ratios = sorted(ours / theirs for ours, theirs in pairs)
            cost = statistics.median(ratios) - 1.0
            without = statistics.median(theirs for _, theirs in pairs)
            case = f"all-miss traffic, {case}"
            report.rows.append(
                Row(case, "CPU seconds of a turn", "s", without * (1.0 + cost), without, "without a store")
            )
            quarter = len(ratios) // 4
            spread = ratios[-1 - quarter] - ratios[quarter]
            report.rows.append(Row(case, "spread of the middle half of the turns", "", round(spread, 4)))
            report.bars.append(Bar(f"{case}: CPU seconds more, share", round(cost, 4), "<=", COST_BOUND))
            log.info("%s: %+.2f %%, middle half %.2f %%", case, 100 * cost, 100 * spread)


def one_turn(number: int, plain: tuple[str, psutil.Process], stored: tuple[str, psutil.Process]) -> tuple[float, float]:
    """CPU seconds with and without a store, of the same prompts, the order turned round each time."""
    prompts = [prompt(COST_TOKENS) for _ in range(COST_REQUESTS)]
    costs = {each: cost_of(*each, prompts) for each in ((stored, plain) if number % 2 else (plain, stored))}
    return costs[stored], costs[plain]


@contextmanager
def bucket(folder: Path) -> Iterator[Document]:
    """A bucket of a server of its own, as settings name it."""
    data = folder / "weed"
    data.mkdir()
    with seaweedfs.serve(data) as url:
        secret = seaweedfs.credentials(folder / "secret")
        name = seaweedfs.make_bucket(url)
        yield {"bucket": name, "endpoint": url, "region": "us-east-1", "credentialsDir": str(secret)}


def seconds_to_first_token(base: str, token_ids: list[int]) -> tuple[float, Document]:
    """Until an answer of one token is there, and what it says of the cache."""
    begin = time.perf_counter()
    answer = ask(base, token_ids, 1)
    return time.perf_counter() - begin, answer["usage"]["prompt_tokens_details"]


def restart_section(report: Report, restarts: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-kv-", dir=FAST) as name, ExitStack() as stack:
        folder = Path(name)
        s3 = stack.enter_context(bucket(folder))
        stores = {"disk": {"disk": {"path": str(folder / "kv"), "capacity": "1Gi"}}, "s3": {"s3": s3}}
        for tier, settings in stores.items():
            pairs = [restarted(settings, tier, folder) for _ in range(restarts)]
            ratio = statistics.median(loaded / computed for loaded, computed in pairs)
            loaded, computed = (statistics.median(column) for column in zip(*pairs, strict=True))
            case = f"{LONG_TOKENS} tokens after a restart, from {tier}"
            report.rows.append(Row(case, "time to the first token", "s", loaded, computed, "computed"))
            report.bars.append(
                Bar(f"{case}: time to first token beside computing", round(ratio, 3), "<=", RESTART_BOUND)
            )
            log.info("%s: %.2f s, computed %.2f s, ratio %.3f", case, loaded, computed, ratio)
            shutil.rmtree(folder / "kv", ignore_errors=True)


def restarted(settings: Document, tier: str, folder: Path) -> tuple[float, float]:
    """Seconds to the first token of a new prompt, loaded by a second engine and computed by a first one."""
    token_ids = prompt(LONG_TOKENS)
    with started(settings, folder) as (base, _):
        ask(base, prompt(300), 1)
        computed, _ = seconds_to_first_token(base, token_ids)
    with started(settings, folder) as (base, _):
        ask(base, prompt(300), 1)
        loaded, details = seconds_to_first_token(base, token_ids)
    assert details.get("cached_tokens_by_tier", {}).get(tier), f"nothing came from {tier}: {details}"
    return loaded, computed


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sections", nargs="*", choices=["cost", "restart", []], help="default: all")
    parser.add_argument("--turns", type=int, default=COST_TURNS)
    parser.add_argument("--store", default="", help="of the cost section, this one alone: disk, memory and disk, ...")
    parser.add_argument("--restarts", type=int, default=RESTARTS)
    parser.add_argument("--output", type=Path, help="default: results/kv_engine.json")
    arguments = parser.parse_args()
    sections = arguments.sections or ["cost", "restart"]
    report = Report("kv_engine")
    if "cost" in sections:
        cost_section(report, arguments.turns, arguments.store)
    if "restart" in sections:
        restart_section(report, arguments.restarts)
    sys.stdout.write(report.write(arguments.output).with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
