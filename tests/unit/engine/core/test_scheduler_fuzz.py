"""Random schedules: whatever arrives and leaves, books balance, KV and texts are right, everyone ends exactly once.

The device here has a memory: each KV slot remembers of which tokens, tenant and adapter it is the state. So a block
that is shared, restored, loaded, guessed into or reused wrongly is noticed by whoever reads it, and a request's text
follows from its prompt alone. Some schedules let the device make several steps at once, half are planned ahead of
results where that is allowed. PACELINE_FUZZ_SCHEDULES says how many.
"""

from __future__ import annotations

import os
import random

import pytest
from fuzz_client import EOS, Client, make_client
from fuzz_device import Device, Memory

from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.scheduler import Scheduler, SchedulerConfig

NUM_SCHEDULES = int(os.environ.get("PACELINE_FUZZ_SCHEDULES", "10000"))
BATCHES = 20


def run_schedule(seed: int) -> None:
    client = make_client(seed)
    scheduler, rng = client.scheduler, client.rng
    for _ in range(rng.randint(1, 25)):
        for _ in range(rng.choice((0, 0, 1, 3))):
            client.add()
        if rng.random() < 0.15:
            client.disturb()
        client.step()
    # A step computes at least one token. A request has at most 60 of them, and is computed anew at most once for each
    # preemption; far beyond that it is a livelock. Only a dynamic batch may wait, for two steps, and who waits for the
    # store, for as long as that may take.
    idle = 0
    for _ in range(60 * len(client.started) * 5 + 100):
        if not scheduler.has_work:
            break
        was_loading = client.is_loading
        has_moved = client.step().scheduled or not scheduler.has_work
        idle = 0 if has_moved or was_loading or client.is_loading else idle + 1
        # With all work in flight there is nothing to plan. A load that began in a step may be aborted with it.
        allowed = (3 if scheduler.config.batching == "dynamic" else 0) + client.overlapped + bool(client.prefixes)
        assert idle <= allowed, "work, but nobody was scheduled"
    client.settle()
    assert not scheduler.has_work
    assert set(client.ended) == set(client.started)
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks
    store = client.store
    assert store is None or not store.kept, "the store still holds KV of requests that ended"
    prefixes = client.prefixes
    assert prefixes is None or not (prefixes.loading or prefixes.asked), "the store still loads for requests that ended"
    assert (scheduler.num_running, scheduler.num_waiting, len(scheduler._deadlines)) <= (0, 0, 64)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_everyone_ends_exactly_once_and_all_blocks_come_back(batch):
    for seed in range(batch, NUM_SCHEDULES, BATCHES):
        try:
            run_schedule(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_the_first_in_rank_progresses_in_every_step():
    """No starvation: under constant pressure the request at the head is never preempted and never skipped."""
    rng = random.Random(7)
    config = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=5, prefill_chunk_tokens=8, max_model_len=60, max_num_waiting=50
    )
    memory = Memory(16, 4)
    scheduler = Scheduler(config, KVManager(BlockPool(16), 4), (EOS,))
    client = Client(rng, scheduler, Device(rng, memory))
    for _ in range(400):
        if scheduler.num_waiting < 20:
            client.add()
        head = scheduler._running[0] if scheduler.num_running else None
        before = head.num_computed_tokens if head else 0
        client.step()
        assert head is None or head.request_id in client.ended or head.num_computed_tokens > before
    assert scheduler.num_preemptions > 0
