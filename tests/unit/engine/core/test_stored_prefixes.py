"""KV that comes back from the store: who waits for it, for how long, what it may cost, and what never comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from driver import add, finish_all, make, shares, step

from paceline_api.identity import chain_hashes
from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.outputs import StepResult
from paceline_engine.core.prefix_cache import PrefixCache
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.stored_kv import Arrived, ChunkLoad, Wanted
from paceline_engine.core.stored_prefixes import MAX_OFFERS, OFFERS_PER_STEP, StoredPrefixes
from paceline_engine.messages import RequestOutput

LONG = list(range(100, 120))
BLOCK = 4
# Blocks and tokens of a chunk.
CHUNK_BLOCKS, CHUNK = 2, 8


class Store:
    """A store that has what the test says, and does only what the test says."""

    def __init__(self, *prompts: Sequence[int], is_slow: bool = False) -> None:
        self.keys = {key for prompt in prompts for key in chunk_keys(prompt)}
        self.is_slow = is_slow
        self.asked: list[str] = []
        self.loads: dict[str, ChunkLoad] = {}
        self.news: list[Arrived] = []
        self.cancelled: list[str] = []
        self.is_full = False
        self.wanted: Wanted | None = None
        self.offered: list[bytes] = []
        self.tenants: list[str] = []
        self.parents: list[bytes | None] = []
        self.forgotten: list[bytes] = []

    def find(self, wanted: Wanted) -> int | None:
        self.asked.append(wanted.request_id)
        self.wanted = wanted
        there = [*(key in self.keys for key in wanted.chain), False]
        return None if self.is_slow and wanted.may_wait else there.index(False)

    def begin(self, load: ChunkLoad) -> None:
        self.loads[load.request_id] = load

    def poll(self) -> list[Arrived]:
        news, self.news = self.news, []
        return news

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.loads.pop(request_id, None)

    def offer(self, key: bytes, parent: bytes | None, block_ids: Sequence[int], tenant: str) -> bool:
        if self.is_full:
            return False
        self.offered.append(key)
        self.parents.append(parent)
        self.tenants.append(tenant)
        return True

    def forget(self, keys: Sequence[bytes]) -> None:
        self.forgotten += keys

    def clear(self) -> None:
        self.keys.clear()

    def arrive(self, request_id: str, num_chunks: int, *, is_over: bool = True) -> None:
        self.news.append(Arrived(request_id=request_id, tiers=("disk",) * num_chunks, is_over=is_over))
        if is_over:
            del self.loads[request_id]


def chunk_keys(prompt: Sequence[int]) -> list[bytes]:
    return chain_hashes(prompt, BLOCK)[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]


def make_with(store: Store, *, num_blocks: int = 64, **options) -> Scheduler:
    scheduler = make(num_blocks=num_blocks, block_size=BLOCK, **options)
    pool = BlockPool(num_blocks)
    cache = PrefixCache(pool, BLOCK)
    kv = KVManager(pool, BLOCK, None, cache, StoredPrefixes(pool, cache, BLOCK, store, CHUNK_BLOCKS, max_wait_s=10.0))
    return Scheduler(scheduler.config, kv, (99,))


def first_output(outputs: Sequence[RequestOutput], request_id: str) -> RequestOutput:
    return next(output for output in outputs if output.request_id == request_id)


def test_a_stored_prefix_is_loaded_while_others_run_and_not_computed():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", LONG)
    add(scheduler, "other", 6, 20)
    assert shares(step(scheduler)[0]) == {"other": 6}
    assert scheduler.why_waiting()[0].message == "16 of its tokens are being brought back from the KV store"
    load = store.loads["a"]
    assert (list(load.chain), load.first, load.num_present, len(load.block_ids)) == (chunk_keys(LONG), 0, 0, 4)
    assert shares(step(scheduler)[0]) == {"other": 1}
    store.arrive("a", 2)
    plan, outputs = step(scheduler)
    share = next(item for item in plan.scheduled if item.request_id == "a")
    assert (share.start, share.token_ids, share.new_block_ids[:4]) == (16, LONG[16:], list(load.block_ids))
    output = first_output(outputs, "a")
    assert (output.num_cached_tokens, output.loaded_tokens) == (16, {"disk": 16})
    assert store.asked == ["a"]
    assert finish_all(scheduler) == {"a": "length", "other": "length"}
    assert scheduler.kv.pool.num_free_blocks == 64


class Lender:
    """Notes what is lent."""

    def __init__(self) -> None:
        self.lent: list[tuple[str, list[bytes], list[int], float]] = []

    def lend(
        self, request_id: str, chain: Sequence[bytes], block_ids: Sequence[int], seconds: float, tenant: str
    ) -> bool:
        self.lent.append((request_id, list(chain), list(block_ids), seconds))
        return True


def test_a_prompt_that_another_engine_goes_on_with_is_lent_while_its_blocks_are_held():
    scheduler, lender = make_with(Store()), Lender()
    assert scheduler.kv.stored is not None
    scheduler.kv.stored.lender = lender
    add(scheduler, "stays", LONG, 1)
    add(scheduler, "goes", LONG, 1, lends=True, e2e_s=9.0)
    add(scheduler, "ends", [2, *LONG], 1, lends=True)
    held: list[int] = []
    while scheduler.has_work:
        plan, _ = step(
            scheduler, lambda item: StepResult(item.request_id, (99 if item.request_id == "ends" else 1,)), 2.0
        )
        held += [block_id for item in plan.scheduled if item.request_id == "goes" for block_id in item.new_block_ids]
    ((name, chain, block_ids, seconds),) = lender.lent
    assert (name, chain, block_ids, seconds) == ("goes", chunk_keys(LONG), held[:4], 7.0)


def test_a_miss_is_computed_in_the_same_step():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", [1, *LONG])
    assert shares(step(scheduler)[0]) == {"a": 16}
    assert store.asked == ["a"]


def test_what_the_device_has_is_not_loaded_again():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", [*LONG[:12], 1], 1)
    step(scheduler)
    store.arrive("a", 1)
    finish_all(scheduler)
    add(scheduler, "b", LONG)
    step(scheduler)
    load = store.loads["b"]
    # Of the second chunk the first block is there already.
    assert (load.first, load.num_present, len(load.chain), len(load.block_ids)) == (1, 1, 2, 2)
    store.arrive("b", 1)
    output = first_output(step(scheduler)[1], "b")
    assert (output.num_cached_tokens, output.loaded_tokens) == (16, {"disk": 4})


def test_equal_prompts_are_loaded_once_and_all_find_it():
    store = Store(LONG)
    scheduler = make_with(store)
    for name in "abc":
        add(scheduler, name, [*LONG, ord(name)])
    assert not step(scheduler)[0].scheduled
    assert (list(store.loads), store.asked) == (["a"], ["a"])
    store.arrive("a", 2)
    assert shares(step(scheduler)[0]) == {"a": 5}
    assert shares(step(scheduler)[0]) == {"a": 1, "b": 1, "c": 1}
    assert store.asked == ["a"]


def test_only_the_leading_chunks_of_a_load_that_fails_are_used():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", LONG)
    step(scheduler)
    store.arrive("a", 1)
    plan, outputs = step(scheduler)
    assert plan.scheduled[0].start == 8
    assert first_output(outputs, "a").loaded_tokens == {"disk": 8}


def test_a_load_that_is_late_is_given_up_and_what_came_is_used():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", LONG)
    assert not step(scheduler, now=0.0)[0].scheduled
    store.arrive("a", 1, is_over=False)
    assert not step(scheduler, now=9.9)[0].scheduled
    assert scheduler.seconds_to_wait(9.9) == 10.0 - 9.9
    plan, _ = step(scheduler, now=10.0)
    assert (plan.scheduled[0].start, store.cancelled) == (8, ["a"])


def test_a_load_is_given_up_while_computing_still_meets_the_deadline():
    store = Store(LONG)
    scheduler = make_with(store)
    scheduler.speed.prefill_tokens_per_second = 10.0
    add(scheduler, "a", LONG, ttft_s=5.0)
    step(scheduler, now=0.0)
    assert not step(scheduler, now=2.9)[0].scheduled
    assert "a" in shares(step(scheduler, now=3.0)[0])  # 20 tokens take 2 s.


def test_a_deadline_that_only_stored_kv_can_meet_is_no_reason_to_refuse():
    store = Store(LONG)
    scheduler = make_with(store)
    scheduler.speed.prefill_tokens_per_second = 10.0
    assert add(scheduler, "a", LONG, ttft_s=1.0) is None
    assert add(scheduler, "stranger", [1, *LONG], ttft_s=1.0) is None
    refused = step(scheduler)[1]
    assert [(output.request_id, output.finish_reason, output.error_kind) for output in refused] == [
        ("stranger", "error", "deadline")
    ]
    assert "21 prompt tokens at 10 tokens/s" in (refused[0].error or "")
    store.arrive("a", 2)
    plan, outputs = step(scheduler, now=0.4)
    assert (plan.scheduled[0].start, outputs[0].finish_reason) == (16, None)
    assert (scheduler.num_scheduled_tokens, scheduler.arrivals.num_deadline_refusals) == (4, 1)


def test_who_waits_for_a_lookup_is_passed_by_and_not_for_ever():
    store = Store(LONG, is_slow=True)
    scheduler = make_with(store)
    add(scheduler, "a", LONG, 2)
    assert not step(scheduler)[0].scheduled
    add(scheduler, "b", 5, 2)
    assert shares(step(scheduler, now=1.0)[0]) == {"b": 5}
    assert shares(step(scheduler, now=10.0)[0]) == {"a": 16, "b": 1}
    assert store.cancelled == ["a"]


def test_an_ended_request_ends_its_load_and_its_blocks_come_back():
    store = Store(LONG, LONG[::-1])
    scheduler = make_with(store)
    add(scheduler, "a", LONG)
    add(scheduler, "b", LONG[::-1], ttft_s=2.0)
    step(scheduler)
    assert scheduler.kv.pool.num_free_blocks == 56
    scheduler.abort("a")
    scheduler.check_integrity()
    outputs = step(scheduler, now=3.0)[1]
    assert [output.finish_reason for output in outputs] == ["deadline"]
    assert (store.loads, scheduler.kv.pool.num_free_blocks) == ({}, 64)
    assert not scheduler.has_work


def test_a_running_request_takes_the_blocks_of_a_load():
    store = Store(LONG)
    scheduler = make_with(store, num_blocks=8)
    add(scheduler, "runs", 4, 20)
    step(scheduler)
    add(scheduler, "a", LONG[:17])
    step(scheduler)
    assert list(store.loads) == ["a"]
    for _ in range(9):
        assert shares(step(scheduler)[0]) == {"runs": 1}
    store.arrive("a", 1, is_over=False)
    plans = [step(scheduler)[0] for _ in range(8)]
    assert (store.loads, scheduler.num_preemptions) == ({}, 0)
    assert all("runs" in shares(plan) for plan in plans)
    assert finish_all(scheduler).keys() == {"runs", "a"}


def test_loads_beside_the_first_take_half_of_the_pool_at_most():
    prompts = [[number, *LONG] for number in range(4)]
    store = Store(*prompts)
    scheduler = make_with(store, num_blocks=24)
    for number, prompt in enumerate(prompts):
        add(scheduler, str(number), prompt)
    assert shares(step(scheduler)[0]) == {"3": 16}
    assert [len(load.block_ids) for load in store.loads.values()] == [4, 4, 4]


def test_a_load_keeps_a_place_among_those_who_run():
    store = Store(LONG)
    scheduler = make_with(store, seqs=1)
    add(scheduler, "a", LONG)
    add(scheduler, "b", 4)
    assert not step(scheduler)[0].scheduled
    store.arrive("a", 2)
    assert shares(step(scheduler)[0]) == {"a": 4}


def test_prompt_logprobs_need_the_prompt_computed():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", LONG, prompt_logprobs=0)
    assert shares(step(scheduler)[0]) == {"a": 16}
    assert store.asked == []


def test_after_a_reset_nothing_comes_back():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", LONG)
    step(scheduler)
    store.arrive("a", 1, is_over=False)
    step(scheduler)
    scheduler.reset_prefix_cache()
    scheduler.check_integrity()
    assert (store.keys, store.loads) == (set(), {})
    assert shares(step(scheduler)[0]) == {"a": 16}


def test_what_is_stored_outlives_sleep():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", LONG)
    step(scheduler)
    scheduler.sleep()
    assert (store.loads, scheduler.kv.pool.num_free_blocks) == ({}, 64)
    scheduler.wake()
    step(scheduler)
    add(scheduler, "b", LONG)
    step(scheduler)
    assert list(store.loads) == ["b"]


def test_the_store_begins_when_no_step_in_flight_can_write_to_the_blocks():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "runs", 4, 20)
    first = scheduler.schedule()
    add(scheduler, "a", LONG)
    second = scheduler.schedule(after=first)
    assert (store.asked, store.loads) == (["a"], {})
    scheduler.check_integrity()
    scheduler.update(first, [], later=second)
    assert list(store.loads) == ["a"]


def test_chunks_are_offered_in_order_and_few_in_a_step_and_again_when_they_are_used():
    store = Store()
    scheduler = make_with(store, chunk=64, budget=64, max_len=100)
    prompt = [*range(60)]
    add(scheduler, "a", prompt, 3, tenant="acme")
    step(scheduler)
    assert store.offered == []
    step(scheduler)
    assert store.offered == chunk_keys(prompt)[:OFFERS_PER_STEP]
    finish_all(scheduler)
    keys = chunk_keys([*prompt, 1, 2, 3, 4, 5])
    assert (store.offered, store.parents) == (keys[:7], [None, *keys[:6]])
    add(scheduler, "b", [*prompt, 1, 2, 3, 4, 5], 3, tenant="other")
    finish_all(scheduler)
    assert (store.offered[7:], store.parents[7:]) == (keys, [None, *keys[:-1]])
    assert store.tenants == ["acme"] * 7 + ["other"] * len(keys)


def test_what_was_loaded_for_a_request_is_not_offered_again_but_what_the_device_had_is():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", LONG[:9], 1)
    step(scheduler)
    store.arrive("a", 1)
    finish_all(scheduler)
    assert store.offered == []
    add(scheduler, "b", LONG, 1)
    step(scheduler)
    store.arrive("b", 1)
    finish_all(scheduler)
    assert store.offered == chunk_keys(LONG)[:1]


def test_a_full_store_is_offered_a_chunk_again_and_nobody_waits_for_it():
    store = Store()
    store.is_full = True
    scheduler = make_with(store)
    stored = scheduler.kv.stored
    assert stored is not None
    add(scheduler, "a", LONG, 1)
    for _ in range(5):
        step(scheduler)
    assert (store.offered, stored.num_offers) == ([], 2)
    assert scheduler.has_work
    assert scheduler.seconds_to_wait(0.0) == math.inf
    store.is_full = False
    step(scheduler)
    assert store.offered == chunk_keys(LONG)
    assert not scheduler.has_work


def test_what_loading_and_computing_would_come_to_is_said_with_the_question():
    store = Store(LONG)
    scheduler = make_with(store, max_len=100)
    scheduler.speed.restore((1.0, 1.0, 1.0, 1.0, 1.0, 10.0))
    add(scheduler, "runs", [*range(200, 260)], 1, priority=-1)
    step(scheduler)
    add(scheduler, "a", LONG, ttft_s=9.0, tenant="acme", now=1.0)
    step(scheduler, now=1.0)
    asked = store.wanted
    assert asked is not None
    assert (asked.chain, asked.first, asked.num_tokens, asked.tenant) == (chunk_keys(LONG), 0, 20, "acme")
    # 44 tokens of the other are computed first. 20 tokens take 2 s, so 7 are left for loading.
    assert (asked.tokens_per_s, asked.queue_s, asked.deadline_s) == (10.0, 4.4, 7.0)


def test_nobody_waits_longer_for_an_answer_than_computing_would_take():
    store = Store(LONG, is_slow=True)
    scheduler = make_with(store)
    scheduler.speed.restore((1.0, 1.0, 1.0, 1.0, 1.0, 10.0))
    add(scheduler, "a", LONG)
    step(scheduler, now=1.0)
    assert shares(step(scheduler, now=2.9)[0]) == {}
    assert scheduler.seconds_to_wait(2.9) == pytest.approx(0.1)
    store.keys.clear()
    assert shares(step(scheduler, now=3.0)[0]) == {"a": 16}


def test_who_leaves_what_was_found_says_so():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", [*LONG[:15], 1, 2], 1)
    step(scheduler)
    store.arrive("a", 1)
    finish_all(scheduler)
    store.keys |= set(chunk_keys([*LONG[:15], 1, 2]))
    add(scheduler, "b", [*LONG[:15], 1, 2], 1)
    step(scheduler)
    assert store.cancelled == []
    scheduler.kv.stored._most_blocks = lambda: 0
    add(scheduler, "c", LONG, 1)
    step(scheduler)
    assert store.cancelled == ["c"]


def test_the_output_is_offered_too_and_a_chunk_whose_blocks_were_reused_is_not():
    store = Store()
    scheduler = make_with(store, num_blocks=16, chunk=64, budget=64)
    add(scheduler, "a", 6, 11)
    finish_all(scheduler)
    assert store.offered == chunk_keys([7] * 6 + [1] * 10)
    add(scheduler, "b", [*range(63)], 1)
    step(scheduler)
    add(scheduler, "c", [*range(200, 263)], 1)
    finish_all(scheduler)
    assert store.offered[2:] == chunk_keys([*range(63)])[:OFFERS_PER_STEP] + chunk_keys([*range(200, 263)])


def test_chunks_that_wait_to_be_offered_are_bounded_and_all_are_when_the_engine_ends():
    store = Store()
    scheduler = make_with(store, num_blocks=2 * MAX_OFFERS + 64, chunk=9000, budget=9000, max_len=9000)
    prompt = [*range(MAX_OFFERS * CHUNK + 40)]
    add(scheduler, "a", prompt, 1)
    step(scheduler)
    stored = scheduler.kv.stored
    assert stored is not None
    assert stored.num_offers == MAX_OFFERS
    stored.offer_all()
    assert store.offered == chunk_keys(prompt)[5:]
    assert stored.num_dropped_offers == 5


def test_what_a_failed_request_held_is_neither_offered_nor_brought_back():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", LONG)
    step(scheduler)
    store.arrive("a", 2)
    plan = scheduler.schedule()
    scheduler.update(plan, [StepResult("a", error="not finite")])
    assert store.forgotten == chunk_keys(LONG)
    finish_all(scheduler)
    assert store.offered == []


def test_a_restored_scheduler_goes_on_with_the_loads():
    store = Store(LONG)
    scheduler = make_with(store)
    add(scheduler, "a", LONG)
    step(scheduler)
    store.arrive("a", 1, is_over=False)
    step(scheduler)
    twin_store = Store()
    twin = Scheduler.from_state(scheduler.state(), stored=twin_store)
    twin.check_integrity()
    for each in (store, twin_store):
        each.news = [Arrived(request_id="a", tiers=("disk", "disk"), is_over=True)]
    assert step(twin)[0] == step(scheduler)[0]


def test_a_lookup_that_is_not_needed_any_more_is_ended():
    store = Store(LONG, is_slow=True)
    scheduler = make_with(store)
    add(scheduler, "a", LONG)
    step(scheduler)
    add(scheduler, "quick", LONG, 1, priority=-1, prompt_logprobs=0)
    step(scheduler)
    share = next(item for item in step(scheduler)[0].scheduled if item.request_id == "a")
    assert (share.start, store.cancelled) == (16, ["a"])
