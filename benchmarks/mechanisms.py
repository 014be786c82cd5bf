"""What each mechanism of the engine is worth: the same engine, the same work, the mechanism on and off, as ratios.

Drives the engine's own scheduler and CPU backend in this process, without HTTP, on the real model. Each pair of
variants runs interleaved, ROUNDS times; the medians are compared, so that a change of the machine's speed hits both.

    python benchmarks/mechanisms.py [--only NAME ...]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from inprocess import SOURCE, Engine
from peers import float32_gguf
from report import Bar, Report, Row
from scheduler_step import step_milliseconds

from paceline_engine.config import MIB
from paceline_engine.core.radix_index import branching_loss
from paceline_engine.core_commands import FollowsConstraints
from paceline_engine.models.loader import default_cache_dir, load_model_dir, prepare_model
from paceline_engine.models.source import resolve
from paceline_engine.structured.source import json_schema
from paceline_engine.structured.worker import Setup, Worker
from paceline_engine.tokenizer import Tokenizer

ROUNDS = 2
SEED = 7
TEXT = (
    "The harbour of the old town lies behind a long stone wall. In the morning the boats come back, and the people "
    "of the market wait for them with baskets and ice. A boat that comes late sells little, for the best places are "
    "taken by then. "
)
COPY_TEXT = (
    "Repeat the following list word for word, three times.\n"
    "alpha = 101; beta = 202; gamma = 303; delta = 404; epsilon = 505; zeta = 606; eta = 707; theta = 808;\n"
    "alpha = 101; beta = 202; gamma = 303; delta = 404; epsilon = 505; zeta = 606; eta = 707; theta = 808;\n"
)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "town": {"type": "string"}},
    "required": ["name", "age", "town"],
    "additionalProperties": False,
}

log = logging.getLogger("mechanisms")


def _tokens() -> Tokenizer:
    return Tokenizer(load_model_dir(prepare_model(resolve(SOURCE), default_cache_dir())).tokenizer_file)


def prompt_of(tokenizer: Tokenizer, length: int, start: int = 0) -> list[int]:
    """`length` tokens of running text; different starts share no prefix."""
    ids = tokenizer.encode(f"{start}. " + TEXT * (2 + length // 40), add_special_tokens=False)
    return ids[:length]


def interleaved(variants: dict[str, Callable[[], dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of each variant's figures over ROUNDS interleaved rounds."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            found[name].append(run())
    return {
        name: {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }


def compare(
    report: Report, case: str, units: dict[str, str], on: str, off: str, figures: dict[str, dict[str, float]]
) -> None:
    for metric, unit in units.items():
        report.rows.append(
            Row(f"{case}: {on}", metric, unit, round(figures[on][metric], 4), round(figures[off][metric], 4), off)
        )


def batching(report: Report) -> None:
    """24 requests of mixed output lengths through 8 slots."""
    tokenizer = _tokens()
    prompts = [prompt_of(tokenizer, 24, start) for start in range(24)]
    lengths = [(8, 16, 24, 96)[number % 4] for number in range(24)]

    def variant(policy: str) -> Callable[[], dict[str, float]]:
        engine = Engine(batching=policy, max_num_seqs=8)

        def run() -> dict[str, float]:
            engine.forget()
            for prompt, length in zip(prompts, lengths, strict=True):
                engine.add(prompt, length)
            seconds = engine.run()
            latencies = sorted(request.times[-1] - request.added for request in engine.requests.values())
            return {"output tokens": sum(lengths) / seconds, "median latency": latencies[len(latencies) // 2]}

        return run

    figures = interleaved({policy: variant(policy) for policy in ("continuous", "static", "dynamic")})
    units = {"output tokens": "1/s", "median latency": "s"}
    compare(report, "batching", units, "continuous", "static", figures)
    compare(report, "batching", units, "continuous", "dynamic", figures)
    ratio = figures["continuous"]["output tokens"] / figures["static"]["output tokens"]
    report.bars.append(Bar("continuous over static batching, output tokens/s (ratio)", round(ratio, 2), ">=", 1.0))


def paging(report: Report) -> None:
    """Sequences resident at once in the same memory: blocks of 16 tokens, or one of the maximum length for each."""
    tokenizer = _tokens()

    def variant(block_size: int) -> Callable[[], dict[str, float]]:
        engine = Engine(block_size=block_size, max_num_seqs=64, kv_cache_bytes=384 * MIB, kv_store_bytes=0)

        def run() -> dict[str, float]:
            engine.forget()
            for start in range(48):
                engine.add(prompt_of(tokenizer, 64, start), 32)
            seconds = engine.run()
            return {"sequences resident": engine.most_running, "output tokens": 48 * 32 / seconds}

        return run

    figures = interleaved({"paged": variant(16), "reserved": variant(2048)})
    compare(report, "memory", {"sequences resident": "count", "output tokens": "1/s"}, "paged", "reserved", figures)


def chunked_prefill(report: Report) -> None:
    """Four running decodes and a short request beside a prompt of 4,000 tokens."""
    tokenizer = _tokens()
    long_prompt = prompt_of(tokenizer, 4000)

    def variant(chunk: int) -> Callable[[], dict[str, float]]:
        engine = Engine(max_model_len=4608, prefill_chunk_tokens=chunk, max_num_batched_tokens=chunk + 64)

        def run() -> dict[str, float]:
            engine.forget()
            decodes = [engine.add(prompt_of(tokenizer, 16, start), 120) for start in range(1, 5)]
            for _ in range(4):
                engine.step()
            prefill = engine.requests[engine.add(long_prompt, 4)]
            short = engine.add(prompt_of(tokenizer, 24, 9), 4)
            engine.run()
            # Only those beside the prefill: a run of quiet gaps before and after would hide them.
            gaps = sorted(
                gap
                for name in decodes
                for gap, end in zip(engine.requests[name].gaps, engine.requests[name].times[1:], strict=True)
                if prefill.added < end <= prefill.ttft + prefill.added
            )
            return {
                "p99 inter-token gap of decodes": gaps[int(len(gaps) * 0.99)],
                "TTFT of a short request": engine.requests[short].ttft,
            }

        return run

    figures = interleaved({"chunks of 256": variant(256), "whole prompts": variant(4096)})
    units = {"p99 inter-token gap of decodes": "s", "TTFT of a short request": "s"}
    compare(report, "chunked prefill", units, "chunks of 256", "whole prompts", figures)


def prefix_cache(report: Report) -> None:
    """Eight requests that share 480 tokens, one after the other as users ask."""
    tokenizer = _tokens()
    shared = prompt_of(tokenizer, 480)
    questions = [shared + prompt_of(tokenizer, 20, start) for start in range(1, 9)]

    def variant(**options: Any) -> Callable[[], dict[str, float]]:
        engine = Engine(**options)

        def run() -> dict[str, float]:
            engine.forget()
            for question in questions:
                engine.add(question, 8)
                engine.run()
            ttfts = [request.ttft for request in engine.requests.values()]
            return {"median TTFT": statistics.median(ttfts), "time for all": sum(ttfts)}

        return run

    variants = {
        "hash": variant(enable_prefix_caching=True, prefix_index="hash"),
        "radix": variant(enable_prefix_caching=True, prefix_index="radix"),
        "no cache": variant(enable_prefix_caching=False),
    }
    figures = interleaved(variants)
    units = {"median TTFT": "s", "time for all": "s"}
    compare(report, "prefix cache", units, "hash", "no cache", figures)
    compare(report, "prefix cache", units, "radix", "no cache", figures)


def speculation(report: Report) -> None:
    """One request that copies, and one that chats, with and without guesses.

    Self-draft is tried on weights that need all 32 bits: where ours keeps them in 4 anyway, 4 bits are no cheaper.
    """
    tokenizer = _tokens()
    prompts = {
        "copy": tokenizer.encode(COPY_TEXT, add_special_tokens=False),
        "chat": tokenizer.encode("The capital of France is", add_special_tokens=False),
    }

    def variant(prompt: list[int], source: str, options: dict[str, Any]) -> Callable[[], dict[str, float]]:
        engine = Engine(source, **options)

        def run() -> dict[str, float]:
            engine.forget()
            name = engine.add(prompt, 96)
            engine.run()
            request = engine.requests[name]
            share = request.num_accepted / request.num_drafts if request.num_drafts else 0.0
            return {"TPOT": request.tpot, "guesses kept": share}

        return run

    self_draft = {"speculative_method": "selfDraft", "speculative_num_tokens": 3}
    methods = {
        "ngram": (SOURCE, {"speculative_method": "ngram"}),
        "int4 self-draft": (f"file://{float32_gguf()}", self_draft),
    }
    units = {"TPOT": "s", "guesses kept": "share"}
    for name, prompt in prompts.items():
        for method, (source, options) in methods.items():
            figures = interleaved({method: variant(prompt, source, options), "none": variant(prompt, source, {})})
            compare(report, f"speculation, {name}", units, method, "none", figures)
            ratio = figures["none"]["TPOT"] / figures[method]["TPOT"]
            report.bars.append(Bar(f"speed-up by {method}, {name} (ratio)", round(ratio, 2), ">=", 1.0))


def constraints(report: Report) -> None:
    """TPOT under a JSON schema and free, eight requests at once."""
    model = load_model_dir(prepare_model(resolve(SOURCE), default_cache_dir()))
    config = model.config
    setup = Setup(
        tokenizer_file=str(model.tokenizer_file), vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
    )
    source = json_schema(SCHEMA)
    begin = time.perf_counter()
    worker = Worker(setup)
    grammar = worker.compile(source).grammar
    report.rows.append(Row("constraint", "load xgrammar and compile", "s", round(time.perf_counter() - begin, 3)))
    prompt = _tokens().encode("A person as JSON:\n", add_special_tokens=False)
    engine = Engine()
    assert isinstance(engine.core.backend, FollowsConstraints)
    engine.core.backend.grammars.prepare(worker.vocabulary())
    engine.core.backend.grammars.load(0, grammar, lambda num_bytes, error: None)

    def variant(grammar_id: int | None) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            engine.forget()
            for number in range(8):
                engine.add(prompt, 48, grammar_id, temperature=0.8, seed=number)
            engine.run()
            return {"TPOT": statistics.median(request.tpot for request in engine.requests.values())}

        return run

    variant(0)()  # Waits for the grammar.
    figures = interleaved({"JSON schema": variant(0), "free": variant(None)})
    compare(report, "constraint", {"TPOT": "s"}, "JSON schema", "free", figures)
    stats = engine.core.backend.stats
    for name in sorted(name for name in stats if name.endswith("_seconds")):
        report.rows.append(Row("constraint", name.replace("_", " "), "s", round(stats[name], 5)))


def loops(report: Report) -> None:
    """The core's own loop, messages and encoding included: plain, several steps in a round trip, overlapped."""
    tokenizer = _tokens()
    ways = {"plain": {}, "8 steps": {"num_scheduler_steps": 8}, "overlapped": {"async_scheduling": True}}
    devices = {
        "CPU, batch 8": (8, 96, {}),
        "simulated, batch 64": (
            64,
            256,
            {"device": "simulated", "simulated_alpha_ms": 1.0, "simulated_beta_ms": 0.01, "max_num_seqs": 64},
        ),
    }

    def variant(batch: int, length: int, options: dict[str, Any]) -> Callable[[], dict[str, float]]:
        engine = Engine(**options)
        prompts = [prompt_of(tokenizer, 24, start) for start in range(batch)]

        def run() -> dict[str, float]:
            engine.forget()
            for prompt in prompts:
                engine.post(prompt, length)
            return {"output tokens": batch * length / engine.loop()}

        return run

    for device, (batch, length, options) in devices.items():
        figures = interleaved({way: variant(batch, length, options | more) for way, more in ways.items()})
        for way in ("8 steps", "overlapped"):
            compare(report, f"loop, {device}", {"output tokens": "1/s"}, way, "plain", figures)
            ratio = figures[way]["output tokens"] / figures["plain"]["output tokens"]
            report.bars.append(Bar(f"{way} over the plain loop, {device} (ratio)", round(ratio, 3), ">=", 1.0))


def scheduler(report: Report) -> None:
    """The pure part of a step with 256 running sequences."""
    times = step_milliseconds(256, 300)
    median = round(statistics.median(times), 3)
    report.bars.append(Bar("scheduler step, 256 running sequences, median ms", median, "<=", 1.0))


def branching(report: Report) -> None:
    """Prompt tokens that whole-block matching leaves out where many prompts branch from one trunk within a block."""
    tokenizer = _tokens()
    trunk = prompt_of(tokenizer, 200)
    prompts = [trunk[: 200 - cut] + prompt_of(tokenizer, 40, cut) for cut in range(1, 33)]
    loss = branching_loss(prompts, 16)
    report.rows.append(
        Row(
            "prefix index, branches within a block",
            f"of {loss.num_tokens} tokens found by whole blocks",
            "tokens",
            loss.num_block_tokens,
            loss.num_seen_tokens,
            "token-level tree",
        )
    )


MECHANISMS: dict[str, Callable[[Report], None]] = {
    "batching": batching,
    "paging": paging,
    "chunked-prefill": chunked_prefill,
    "prefix-cache": prefix_cache,
    "speculation": speculation,
    "constraints": constraints,
    "loops": loops,
    "scheduler": scheduler,
    "branching": branching,
}


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(MECHANISMS), default=list(MECHANISMS))
    chosen = parser.parse_args().only
    report = Report("mechanisms", seed=SEED)
    for number, name in enumerate(chosen, 1):
        log.info("[%d/%d] %s", number, len(chosen), name)
        MECHANISMS[name](report)
    path = report.write()
    log.info("%s", path.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
