"""Paging is real: outputs don't depend on physical blocks, on what free blocks hold, or on losing blocks half way."""

from __future__ import annotations

import random

import pytest
import torch

from paceline_engine.kv_transfer import KVTransfer
from paceline_kvstore.tiers.memory import MemoryTier

NAMESPACE = "ab" * 32
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def prompts(tiny, prompts_for):
    return prompts_for(6, tiny.config.vocab_size, seed=3, longest=30)


@pytest.fixture(scope="module")
def expected(tiny, prompts):
    return {str(i): tiny.reference_tokens(prompt, MAX_TOKENS) for i, prompt in enumerate(prompts)}


def run(loop, prompts, **sampling):
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, MAX_TOKENS, **sampling)
    return loop.run()


def poison_free_blocks(loop) -> None:
    """Before each step all blocks that nobody holds are NaN, as are the slots of held blocks not yet written."""
    kv, pool = loop.runner.kv, loop.scheduler.kv.pool
    free = [block_id for block_id in range(pool.num_blocks) if pool.ref_count(block_id) == 0]
    kv.tensor[:, :, free] = torch.nan
    for request in loop.scheduler._running:
        used = request.num_computed_tokens
        for index, block_id in enumerate(request.block_ids):
            kv.tensor[:, :, block_id, max(0, used - index * kv.block_size) :] = torch.nan


@pytest.mark.parametrize("seed", range(3))
def test_permuted_blocks_and_nan_everywhere_else_change_nothing(tiny, new_loop, prompts, expected, seed):
    order = list(range(90))
    random.Random(seed).shuffle(order)
    loop = new_loop(tiny, num_blocks=90, order=order)
    loop.before_step = lambda: poison_free_blocks(loop)
    assert run(loop, prompts) == expected


def tiny_pool(new_loop, tiny, tier=None, **options):
    """14 blocks of 4 tokens: one sequence fits, two grow into each other."""

    def make_store(kv):
        return KVTransfer(kv, tier, NAMESPACE, chunk_tokens=8)

    loop = new_loop(tiny, num_blocks=14, make_store=make_store if tier is not None else None, **options)
    loop.before_step = lambda: poison_free_blocks(loop)
    return loop


def test_preemption_with_recompute_changes_nothing(tiny, new_loop, prompts, expected):
    loop = tiny_pool(new_loop, tiny)
    assert run(loop, prompts) == expected
    assert loop.scheduler.num_preemptions > 0


def test_preemption_with_offload_changes_nothing(tiny, new_loop, prompts, expected):
    tier = MemoryTier(64 << 20)
    loop = tiny_pool(new_loop, tiny, tier)
    assert run(loop, prompts) == expected
    kv = loop.scheduler.kv
    assert kv.num_offloaded_sequences > 0
    assert kv.num_restored_sequences == kv.num_offloaded_sequences
    assert tier.stats.hits > 0
    assert tier.bytes_used == 0


def test_restored_tokens_are_not_computed_again(tiny, new_loop, prompts):
    def computed_tokens(tier):
        loop = tiny_pool(new_loop, tiny, tier)
        counted = []
        schedule = loop.scheduler.schedule

        def counting():
            plan = schedule()
            counted.append(plan.num_tokens)
            return plan

        loop.scheduler.schedule = counting
        run(loop, prompts)
        return sum(counted)

    needed = sum(len(prompt) + MAX_TOKENS - 1 for prompt in prompts)
    assert computed_tokens(MemoryTier(64 << 20)) == needed
    assert computed_tokens(None) > needed


def test_a_tier_that_forgets_costs_time_not_correctness(tiny, new_loop, prompts, expected):
    """Some chunks are lost; those in front of a lost one are still restored."""
    tier = MemoryTier(64 << 20)
    rng = random.Random(5)
    put = tier.put

    def forgetful_put(key, payload, **attributes):
        kept = put(key, payload, **attributes)
        if rng.random() < 0.3:
            tier.delete(key)
        return kept

    tier.put = forgetful_put
    loop = tiny_pool(new_loop, tiny, tier)
    assert run(loop, prompts) == expected
    assert tier.stats.misses > 0
    assert loop.scheduler.kv.num_restored_sequences > 0


def test_a_corrupt_chunk_is_recomputed(tiny, new_loop, prompts, expected):
    tier = MemoryTier(64 << 20)
    put = tier.put

    def corrupting_put(key, payload, **attributes):
        kept = put(key, payload, **attributes)
        tier._chunks[key].payload[-1] ^= 1
        return kept

    tier.put = corrupting_put
    loop = tiny_pool(new_loop, tiny, tier)
    assert run(loop, prompts) == expected
    assert tier.stats.corrupt > 0
    assert loop.scheduler.kv.num_restored_sequences == 0


def test_a_tier_smaller_than_a_sequence_keeps_its_head(tiny, new_loop, prompts, expected):
    one_token = 2 * tiny.config.num_layers * tiny.config.num_kv_heads * tiny.config.head_dim * 4
    tier = MemoryTier(2 * MemoryTier.footprint(8 * one_token))
    loop = tiny_pool(new_loop, tiny, tier)
    assert run(loop, prompts) == expected
    assert loop.scheduler.kv.num_restored_sequences > 0


@pytest.mark.parametrize("capacity", [100, 64 << 20])
def test_requests_that_ended_leave_nothing_behind_whatever_the_tier_held(tiny, new_loop, prompts, capacity):
    tier = MemoryTier(capacity)
    transfers = []

    def make_store(kv):
        transfers.append(KVTransfer(kv, tier, NAMESPACE, chunk_tokens=8))
        return transfers[-1]

    loop = new_loop(tiny, num_blocks=14, make_store=make_store)
    run(loop, prompts)
    assert loop.scheduler.num_preemptions > 0
    assert transfers[0]._chunks_of == {}
    assert tier.bytes_used == 0


def test_equal_prompts_of_two_tenants_do_not_share_stored_kv(tiny, new_loop):
    tier = MemoryTier(64 << 20)
    loop = new_loop(tiny)
    transfer = KVTransfer(loop.runner.kv, tier, NAMESPACE)
    loop.add("a", [1, 2, 3, 4, 5], 8)
    loop.step()
    request = loop.scheduler._requests["a"]
    transfer.save(request)
    request.salt = "another tenant"
    transfer.save(request)
    assert len(tier) == 2


def test_same_seed_same_text_alone_together_and_through_preemption(tiny, new_loop, prompts):
    sampling = {"temperature": 1.0, "seed": 42, "top_p": 0.95, "top_k": 50}
    together = run(new_loop(tiny), prompts, **sampling)
    assert together == run(new_loop(tiny), prompts, **sampling)
    preempting = tiny_pool(new_loop, tiny)
    assert run(preempting, prompts, **sampling) == together
    assert preempting.scheduler.num_preemptions > 0
    alone = new_loop(tiny)
    alone.add("2", prompts[2], MAX_TOKENS, **sampling)
    assert alone.run()["2"] == together["2"]
    assert run(new_loop(tiny), prompts, **{**sampling, "seed": 43}) != together


def test_nan_in_one_sequence_ends_that_one_only(tiny, new_loop, prompts, expected):
    loop = new_loop(tiny)
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, MAX_TOKENS)
    while not all(loop.tokens.get(str(i)) for i in range(len(prompts))):
        loop.step()
    victim = loop.scheduler._requests["3"]
    loop.runner.kv.tensor[1, 1, victim.block_ids[0], 0] = torch.nan
    loop.run()
    assert loop.finished["3"].finish_reason == "error"
    assert "isn't finite" in loop.finished["3"].error
    for i in range(len(prompts)):
        if i != 3:
            assert loop.tokens[str(i)] == expected[str(i)]
