"""Time of one pure scheduler step (schedule and update, no device) with many running sequences, in milliseconds.

python benchmarks/scheduler_step.py [--sequences 256] [--steps 400]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.core.prefix_cache import PrefixCache
from paceline_engine.core.scheduler import Scheduler, SchedulerConfig
from paceline_engine.core.spec import SpeculationConfig, SpeculativeMethod
from paceline_engine.messages import AddRequest, SamplingParams

PROMPT_TOKENS = 64


def running(num_sequences: int, num_steps: int, method: SpeculativeMethod = "none") -> Scheduler:
    """A scheduler with `num_sequences` requests of different prompts, all past their prefill."""
    max_len = PROMPT_TOKENS + 16 + 10 * num_steps
    pool = BlockPool(num_sequences * (max_len // 16 + 2))
    config = SchedulerConfig(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=1 << 20,
        prefill_chunk_tokens=512,
        max_model_len=max_len,
        max_num_waiting=num_sequences,
    )
    kv = KVManager(pool, 16, cache=PrefixCache(pool, 16))
    scheduler = Scheduler(config, kv, (0,), SpeculationConfig(method=method, num_tokens=4))
    sampling = SamplingParams(max_tokens=max_len)
    for number in range(num_sequences):
        # Lengths of all sizes modulo the block's, so that each step sees as many blocks filled as the next.
        length = PROMPT_TOKENS + number % 16
        prompt = tuple((number * 31 + position * 7) % 49_000 + 1 for position in range(length))
        scheduler.add(AddRequest(request_id=f"request-{number:06d}", prompt_token_ids=prompt, sampling=sampling))
    while scheduler.num_waiting:
        scheduler.update(plan := scheduler.schedule(), answers(plan, 5))
    return scheduler


def answers(plan: StepPlan, token_id: int) -> list[StepResult]:
    """What a device would return: one token each, every guess rejected."""
    return [StepResult(item.request_id, (token_id,)) for item in plan.scheduled if item.sample]


def step_milliseconds(num_sequences: int, num_steps: int, method: SpeculativeMethod = "none") -> list[float]:
    """Times of `num_steps` steps, the device's part left out."""
    scheduler = running(num_sequences, num_steps, method)
    cache = scheduler.kv.cache
    times: list[float] = []
    for number in range(num_steps):
        begin = time.perf_counter()
        plan = scheduler.schedule(float(number))
        middle = time.perf_counter()
        results = answers(plan, 5 + number % 1000)
        resumed = time.perf_counter()
        scheduler.update(plan, results, number + 0.5)
        times.append((time.perf_counter() - resumed + middle - begin) * 1000.0)
        if cache is not None:
            cache.take_events()
    return times


def main() -> None:
    """Print median, 90th percentile and worst step as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--speculative-method", default="none", choices=("none", "ngram"))
    options = parser.parse_args()
    times = sorted(step_milliseconds(options.sequences, options.steps, options.speculative_method))
    result = {
        "sequences": options.sequences,
        "median_ms": round(statistics.median(times), 3),
        "p90_ms": round(times[int(len(times) * 0.9)], 3),
        "max_ms": round(times[-1], 3),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
