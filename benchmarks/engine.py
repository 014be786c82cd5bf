"""Our engine on the CPU beside llama.cpp's server, transformers and the machine's roof: `make bench-engine`.

Same weights, precision, threads, prompts and lengths on all sides; runs are interleaved, medians compared, so that a
noisy neighbour hits everybody. Requests never share a prefix, so no side's cache helps. Writes results/engine.json and
engine.md. See peers.py for where llama.cpp comes from; without it its bars say that they were not measured.

    python benchmarks/engine.py [--rounds=5] [--only=float32]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import numpy as np
from peers import find_llama_server, float32_gguf, llama_server, packaged_gguf
from report import Bar, Report, Row
from skeleton import BATCHES, Peer, engine

from paceline_engine.backends.threads import num_threads
from paceline_engine.models.loader import default_cache_dir
from paceline_engine.native.build import ensure_library
from paceline_engine.native.library import load_library

OUTPUT_TOKENS = 64
MIXED_TOKENS = tuple(8 + 120 * index // 31 for index in range(32))
LONG_PROMPT_WORDS = 1000
NEXT_TO_LLAMA = {1: 1.0, 8: 1.5, 32: 2.0}
OF_THE_ROOF = 0.6
log = logging.getLogger("bench")
# llama.cpp closes idle connections after 5 s; ours to it must be given up before.
CONNECTIONS = httpx.Limits(max_connections=64, keepalive_expiry=1.0)
_serial = itertools.count(1)


def prompt() -> str:
    """About 30 tokens, unlike any other from the first word on."""
    return f"{next(_serial)} is a number. Tell me a short story in which it plays a part, and say why the sky is blue."


def long_prompt() -> str:
    """About LONG_PROMPT_WORDS tokens, unlike any other from the first word on."""
    words = ("the", "cat", "sat", "on", "a", "red", "mat", "and", "saw", "the", "dog", "run", "to", "the", "sea")
    return f"{next(_serial)} " + " ".join(itertools.islice(itertools.cycle(words), LONG_PROMPT_WORDS))


def body(text: str, tokens: int) -> dict[str, object]:
    """A request that both servers understand; neither may reuse a cached prompt."""
    return {
        "model": "smollm2",
        "prompt": text,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }


def tokens_per_second(base: str, client: httpx.Client, lengths: Sequence[int]) -> float:
    """Output tokens a second of requests with these output lengths, sent at once."""

    def one(tokens: int) -> int:
        answer = client.post(f"{base}/v1/completions", json=sent(base, body(prompt(), tokens)), timeout=600)
        answer.raise_for_status()
        return answer.json()["usage"]["completion_tokens"]

    started = time.perf_counter()
    with ThreadPoolExecutor(len(lengths)) as pool:
        counted = sum(pool.map(one, lengths))
    seconds = time.perf_counter() - started
    assert counted == sum(lengths), f"{base} answered {counted} tokens, not {sum(lengths)}"
    return counted / seconds


def roof_shares(report: Report, args: argparse.Namespace, base: str, threads: int) -> None:
    """How near ours comes to the machine's roofs, each measured between ours' runs."""
    roofs, peer = Roofs(threads), Peer()
    parameters = sum(tensor.numel() for tensor in peer.parameters())
    head = peer.parameters()[0].numel()
    prompt_tokens = peer.num_tokens(prompt())
    with httpx.Client(limits=CONNECTIONS) as client:
        one, read = medians(
            [partial(tokens_per_second, base, client, [OUTPUT_TOKENS]), roofs.bytes_per_second], args.rounds
        )
        many, flops = medians(
            [partial(tokens_per_second, base, client, [OUTPUT_TOKENS] * 32), roofs.flops], args.rounds
        )
    # Prompt tokens are computed too, but for the head.
    per_output = 2 * (parameters + prompt_tokens / OUTPUT_TOKENS * (parameters - head))
    report.rows.append(Row("machine", f"memory read by {threads} threads", "GB/s", round(read / 1e9, 1)))
    report.rows.append(Row("machine", f"multiply-adds of {threads} threads", "GFLOP/s", round(flops / 1e9)))
    report.bars.append(
        Bar("share of the memory's roof, 1 at once", round(one * parameters * 4 / read, 2), ">=", OF_THE_ROOF)
    )
    report.bars.append(
        Bar("share of the arithmetic's roof, 32 at once", round(many * per_output / flops, 2), ">=", OF_THE_ROOF)
    )


def sent(base: str, fields: dict[str, object]) -> dict[str, object]:
    """Without what only llama.cpp knows, for ours."""
    return fields if base in LLAMA_BASES else {k: v for k, v in fields.items() if k != "cache_prompt"}


LLAMA_BASES: set[str] = set()


def first_token_seconds(base: str, client: httpx.Client) -> float:
    """From the request with a long prompt to its first token."""
    fields = sent(base, body(long_prompt(), 2) | {"stream": True})
    started = time.perf_counter()
    with client.stream("POST", f"{base}/v1/completions", json=fields, timeout=600) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                return time.perf_counter() - started
    raise RuntimeError(f"{base} sent no token: {answer.status_code}")


def medians(runs: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """Median of each, after `rounds` rounds in which each runs once."""
    columns = zip(*[[run() for run in runs] for _ in range(rounds)], strict=True)
    return [statistics.median(column) for column in columns]


class Roofs:
    """What this machine's memory and arithmetic can do at most, measured by loops of the same library."""

    def __init__(self, threads: int) -> None:
        self._library = load_library(ensure_library(default_cache_dir()))
        self._data = np.ones(400_000_000, dtype=np.uint8)
        self._threads = threads

    def bytes_per_second(self) -> float:
        """Read from memory by all threads; half a second."""
        read = self._library.paceline_read_roof
        return statistics.median(read(self._data.ctypes.data, self._data.nbytes, self._threads) for _ in range(20))

    def flops(self) -> float:
        """Floating-point operations a second of all threads, all in registers; half a second."""
        return statistics.median(self._library.paceline_multiply_add_roof(30_000, self._threads) for _ in range(15))


def compare_speed(
    report: Report, args: argparse.Namespace, label: str, ours: str, llama: str | None, bars: bool = True
) -> None:
    """Rows, and bars, of ours beside llama.cpp at each number of requests."""
    with httpx.Client(limits=CONNECTIONS) as client:
        bases = [ours] if llama is None else [ours, llama]
        for base in bases:
            tokens_per_second(base, client, [8] * 4)
        for batch in BATCHES:
            lengths = [OUTPUT_TOKENS] * batch
            values = medians([partial(tokens_per_second, base, client, lengths) for base in bases], args.rounds)
            bar = (">=", NEXT_TO_LLAMA[batch]) if bars else None
            add(report, f"{label}, {batch} at once", "output tokens", "1/s", values, bar)
        values = medians([partial(first_token_seconds, base, client) for base in bases], args.rounds)
        add(report, f"{label}, 1,000-token prompt", "time to first token", "s", values, ("<=", 1.0) if bars else None)


def add(
    report: Report, case: str, metric: str, unit: str, values: Sequence[float], bar: tuple[str, float] | None
) -> None:
    """A row, and the bar of its ratio to llama.cpp: operator and bound."""
    theirs = values[1] if len(values) > 1 else None
    report.rows.append(Row(case, metric, unit, round(values[0], 3), theirs and round(theirs, 3), "llama.cpp"))
    log.info("%s, %s: %s %s", case, metric, [round(value, 3) for value in values], unit)
    if bar is not None:
        ratio = round(values[0] / theirs, 2) if theirs else None
        reason = None if theirs else "no llama.cpp server here: see benchmarks/peers.py"
        report.bars.append(Bar(f"{metric}, {case}, beside llama.cpp (ratio)", ratio, *bar, reason))


@contextlib.contextmanager
def llama_or_none(path: Path, threads: int, kv_type: str) -> Iterator[str | None]:
    """llama.cpp's server over a file, where there is one."""
    if find_llama_server() is None:
        yield None
        return
    with llama_server(path, slots=32, tokens_per_slot=1280, threads=threads, kv_type=kv_type) as base:
        LLAMA_BASES.add(base)
        yield base


def float32_speed(report: Report, args: argparse.Namespace, threads: int) -> None:
    path = float32_gguf()
    with llama_or_none(path, threads, "f32") as llama:
        with engine("--cpu-kernels=native", "--max-num-seqs=32", f"--model=file://{path}") as (ours, _):
            compare_speed(report, args, "float32", ours, llama)
            roof_shares(report, args, ours, threads)
            beside_transformers(report, args, ours)
        with engine("--cpu-kernels=native", "--max-num-seqs=32") as (ours, _):
            label = "float32 from a 4-bit checkpoint, kept in its 4 bits by ours"
            compare_speed(report, args, label, ours, llama, bars=False)


def beside_transformers(report: Report, args: argparse.Namespace, ours: str) -> None:
    """32 requests at once, with equal and with mixed lengths: transformers runs each batch to its longest."""
    peer = Peer()
    cases = (("equal lengths", [OUTPUT_TOKENS] * 32, 1.5), ("mixed lengths", list(MIXED_TOKENS), 2.5))
    with httpx.Client(limits=CONNECTIONS) as client:
        for name, lengths, bound in cases:
            longest = max(lengths)
            useful = sum(lengths) / (longest * len(lengths))
            mine, theirs = medians(
                [
                    lambda n=lengths: tokens_per_second(ours, client, n),
                    lambda m=longest, u=useful: peer.tokens_per_second(32, m) * u,
                ],
                args.rounds,
            )
            case = f"float32, 32 at once, {name}"
            report.rows.append(Row(case, "output tokens", "1/s", round(mine, 1), round(theirs, 1), "transformers"))
            ratio = round(mine / theirs, 2)
            report.bars.append(Bar(f"output tokens, {case}, beside transformers (ratio)", ratio, ">=", bound))
            log.info("%s: ours %.1f, transformers %.1f", name, mine, theirs)


def four_bit_speed(report: Report, args: argparse.Namespace, threads: int) -> None:
    options = ("--cpu-kernels=native", "--quantization=int4", "--dtype=bfloat16", "--max-num-seqs=32")
    with llama_or_none(packaged_gguf(), threads, "f16") as llama, engine(*options) as (ours, _):
        compare_speed(report, args, "4-bit weights, 16-bit KV", ours, llama)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("float32", "4-bit"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    threads = num_threads()
    log.info("%d threads a side, 32 slots, about 30 prompt and %d output tokens", threads, OUTPUT_TOKENS)
    report = Report("engine")
    if args.only != "4-bit":
        float32_speed(report, args, threads)
    if args.only != "float32":
        four_bit_speed(report, args, threads)
    path = report.write()
    log.info("%s", path.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
