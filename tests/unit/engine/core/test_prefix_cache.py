"""Sharing KV of equal prefixes: what is found, what must not be, what is evicted first, and what others are told."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from driver import EOS, Script, add, finish_all, make, shares, step

from paceline_api.identity import chain_hashes
from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.prefix_cache import MAX_EVENTS, PrefixCache
from paceline_engine.core.request import Request
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.messages import KVEvent, SamplingParams

LONG = list(range(100, 120))


@pytest.fixture(params=["hash", "radix"])
def index(request) -> str:
    return request.param


def run(scheduler: Scheduler, request_id: str, prompt: Sequence[int], max_tokens: int = 1, **options) -> int:
    """Serve a request to its end; its cached tokens as the client hears of them."""
    assert add(scheduler, request_id, prompt, max_tokens, **options) is None
    cached: set[int] = set()
    while scheduler.has_work:
        cached |= {output.num_cached_tokens for output in step(scheduler)[1]}
    assert len(cached) == 1
    return cached.pop()


def test_an_equal_prefix_is_computed_once(index):
    scheduler = make(cache=index)
    assert run(scheduler, "a", LONG) == 0
    assert run(scheduler, "b", [*LONG[:13], 1, 2, 3]) == 12
    add(scheduler, "c", [*LONG, 5])
    plan, _ = step(scheduler)
    assert (plan.scheduled[0].start, plan.scheduled[0].token_ids) == (20, [5])
    assert len(plan.scheduled[0].new_block_ids) == 6
    cache = scheduler.kv.cache
    assert cache is not None
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (20 + 16 + 21, 12 + 20)


def test_a_hit_leaves_a_token_to_compute(index):
    scheduler = make(cache=index)
    run(scheduler, "a", LONG)
    assert run(scheduler, "b", LONG) == 16
    assert run(scheduler, "c", LONG[:4]) == 0


def test_output_is_found_too_by_whoever_continues_it(index):
    scheduler = make(cache=index)
    run(scheduler, "a", LONG, max_tokens=9)
    assert run(scheduler, "b", [*LONG, *[1] * 9, 3, 3]) == 28  # The last token's KV was never computed.


def test_a_running_request_shares_what_it_has_computed(index):
    scheduler = make(cache=index)
    add(scheduler, "a", LONG, 30)
    step(scheduler)
    step(scheduler)
    add(scheduler, "b", [*LONG, 4], 2)
    plan, _ = step(scheduler)
    assert shares(plan) == {"a": 1, "b": 1}
    tables = [scheduler._requests[name].block_ids[:5] for name in "ab"]
    assert tables[0] == tables[1]
    assert finish_all(scheduler) == {"a": "length", "b": "length"}


def test_equal_prompts_that_arrive_together_are_computed_once(index):
    scheduler = make(cache=index, chunk=8, budget=32)
    for name in "abcd":
        add(scheduler, name, [*LONG, ord(name)], 6)
    add(scheduler, "other", [1, 2, 3], 6)
    computed = [shares(step(scheduler)[0]) for _ in range(4)]
    assert computed == [
        {"a": 8, "other": 3},
        {"a": 8, "other": 1},
        {"a": 5, "other": 1},
        {"a": 1, "b": 1, "c": 1, "d": 1, "other": 1},
    ]
    assert finish_all(scheduler) == dict.fromkeys(["a", "b", "c", "d", "other"], "length")


def test_a_short_common_start_holds_nobody_back(index):
    scheduler = make(cache=index)
    for name in "ab":
        add(scheduler, name, [*LONG[:4], *[ord(name)] * 8], 6)
    assert set(shares(step(scheduler)[0])) == {"a", "b"}


def test_nobody_waits_for_a_prefix_that_a_worse_ranked_request_computes(index):
    scheduler = make(cache=index, chunk=8)
    add(scheduler, "patient", LONG, 6, priority=9)
    step(scheduler)
    add(scheduler, "urgent", LONG, 6)
    assert "urgent" in shares(step(scheduler)[0])


def test_who_waits_for_a_prefix_goes_on_when_its_maker_is_gone(index):
    scheduler = make(cache=index, chunk=8)
    for name in "ab":
        add(scheduler, name, LONG, 6)
    step(scheduler)
    assert [(entry.reason, entry.missing) for entry in scheduler.why_waiting()] == [("prefix", 16)]
    scheduler.abort("a")
    assert shares(step(scheduler)[0]) == {"b": 8}


@pytest.mark.parametrize("options", [{"salt": "other"}, {"adapter": "style"}, {"salt": "style"}])
def test_other_tenants_and_adapters_find_nothing(index, options):
    scheduler = make(cache=index)
    scheduler.arrivals.set_adapter("style", "style")
    run(scheduler, "a", LONG)
    assert run(scheduler, "b", LONG, **options) == 0
    assert run(scheduler, "c", LONG, **options) == 16
    assert run(scheduler, "d", LONG, salt="style", adapter="style") == 0


def test_an_adapter_with_other_weights_under_the_same_name_finds_nothing(index):
    scheduler = make(cache=index)
    scheduler.arrivals.set_adapter("style", "digest-1")
    run(scheduler, "a", LONG, adapter="style")
    scheduler.arrivals.set_adapter("style", "digest-2")
    assert run(scheduler, "b", LONG, adapter="style") == 0
    scheduler.arrivals.set_adapter("style", "digest-1")
    assert run(scheduler, "c", LONG, adapter="style") == 16


def test_rejected_guesses_are_never_found(index):
    """The block they stood in is published only with the tokens that were accepted."""
    text = LONG + [3] * 40
    scheduler = make(cache=index, speculation=SpeculationConfig(method="draft", num_tokens=6))
    device = Script(text, 6, wrong_from=1)
    add(scheduler, "a", LONG, 20)
    while scheduler.has_work:
        step(scheduler, device)
    guessed = [*LONG, 3, 3, 1003, 1003, 1003, 1003, 1003, 9]
    assert run(scheduler, "b", guessed) == 20
    assert run(scheduler, "c", text[:36]) == 32


def test_prompt_logprobs_are_computed_not_found(index):
    scheduler = make(cache=index, chunk=64, budget=64)
    run(scheduler, "a", LONG)
    add(scheduler, "b", LONG, prompt_logprobs=0)
    assert scheduler.schedule().scheduled[0].start == 0


def test_blocks_are_evicted_by_age_and_from_the_tail(index):
    scheduler = make(cache=index, num_blocks=7)
    old, one, other = [1] * 8, [*LONG[:12], 5, 5, 5, 5], [*LONG[:12], 6, 6, 6, 6]
    for name, prompt in (("old", old), ("one", one), ("other", other)):
        run(scheduler, name, prompt)
    cache, pool = scheduler.kv.cache, scheduler.kv.pool
    assert cache is not None
    found = [tuple(len(probe(cache, prompt)) for prompt in (old, one, other))]
    for _ in range(7):
        pool.allocate(1)
        found.append(tuple(len(probe(cache, prompt)) for prompt in (old, one, other)))
    assert found == [(2, 4, 4), (1, 4, 4), (0, 4, 4), (0, 3, 4), (0, 3, 3), (0, 2, 2), (0, 1, 1), (0, 0, 0)]


def probe(cache: PrefixCache, token_ids: Sequence[int]) -> list[int]:
    """Blocks found for these tokens, were one more to follow."""
    sampling = SamplingParams(max_tokens=1)
    tokens = [*token_ids, 0]
    number = len(tokens)
    return cache.match(
        Request(request_id="?", token_ids=tokens, num_prompt_tokens=number, sampling=sampling, max_total_tokens=999)
    )


def test_reset_forgets_what_is_cached_and_what_running_requests_go_on_with(index):
    scheduler = make(cache=index)
    run(scheduler, "a", LONG)
    add(scheduler, "running", [*LONG, 8], 20)
    step(scheduler)
    scheduler.reset_prefix_cache()
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_cached_blocks == 0
    add(scheduler, "b", LONG, 1)
    assert shares(step(scheduler)[0]) == {"running": 1, "b": 16}
    assert finish_all(scheduler) == {"running": "length", "b": "length"}
    # Its later blocks stand on KV from before the reset.
    assert run(scheduler, "c", [*LONG, 8, *[1] * 19, 2]) == 20


def test_a_preempted_request_finds_its_own_blocks_again(index):
    scheduler = make(cache=index, num_blocks=8, seqs=2)
    for name in "ab":
        add(scheduler, name, [*LONG[:7], ord(name)], 16)
    restarts: list[int] = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        if scheduler.num_preemptions:
            admitted = {item.request_id for item in plan.admitted}
            restarts += [item.start for item in plan.scheduled if item.request_id in admitted]
    assert restarts
    assert max(restarts) > 0


class Mirror:
    """A reader of events: what it thinks can be found."""

    def __init__(self) -> None:
        self.sequence = 0
        self.hashes: set[bytes] = set()
        self.parents: dict[bytes, bytes | None] = {}

    def read(self, events: Sequence[KVEvent]) -> None:
        for event in events:
            assert event.sequence == self.sequence
            self.sequence += 1
            if event.kind == "cleared":
                self.hashes.clear()
            elif event.kind == "removed":
                assert set(event.block_hashes) <= self.hashes
                self.hashes -= set(event.block_hashes)
            else:
                assert not set(event.block_hashes) & self.hashes
                assert event.parent_hash is None or event.parent_hash in self.hashes
                self.hashes |= set(event.block_hashes)
                parents = (event.parent_hash, *event.block_hashes[:-1])
                self.parents.update(zip(event.block_hashes, parents, strict=True))

    def check_that_trunks_outlive_leaves(self) -> None:
        for block_hash in self.hashes:
            parent = self.parents[block_hash]
            assert parent is None or parent in self.hashes


@pytest.mark.parametrize("seed", range(10))
def test_a_reader_of_events_knows_exactly_what_can_be_found(index, seed):
    rng = random.Random(seed)
    scheduler = make(cache=index, num_blocks=14, seqs=4)
    mirror = Mirror()
    cache = scheduler.kv.cache
    assert cache is not None
    for number in range(120):
        prompt = [*LONG[: rng.randint(1, 16)], *[rng.randint(1, 2) for _ in range(rng.randint(0, 12))]]
        add(scheduler, str(number), prompt, rng.randint(1, 8), salt=rng.choice(("", "s")))
        if rng.random() < 0.02:
            scheduler.reset_prefix_cache()
        step(scheduler, rng.choice((1, 2, EOS)))
        mirror.read(cache.take_events())
        assert mirror.hashes == set(cache._blocks_of)
        mirror.check_that_trunks_outlive_leaves()


def test_stored_events_carry_the_chain_that_the_router_computes():
    scheduler = make(cache="hash")
    run(scheduler, "a", LONG, salt="tenant")
    cache = scheduler.kv.cache
    assert cache is not None
    events = cache.take_events()
    assert [event.kind for event in events] == ["stored", "stored"]  # A chunk each.
    assert [h for event in events for h in event.block_hashes] == chain_hashes(LONG, 4, "tenant")
    assert [t for event in events for t in event.token_ids] == LONG
    assert events[1].parent_hash == events[0].block_hashes[-1]
    assert cache.take_events() == ()


def test_unread_events_are_bounded_and_replaced_by_a_safe_one():
    pool = BlockPool(4)
    cache = PrefixCache(pool, 1)
    for number in range(MAX_EVENTS):
        ids = pool.allocate(2)
        sampling = SamplingParams(max_tokens=1)
        request = Request(
            request_id="r", token_ids=[number, 1, 2], num_prompt_tokens=3, sampling=sampling, max_total_tokens=4
        )
        request.block_ids, request.num_computed_tokens = ids, 2
        cache.publish(request)
        pool.release(reversed(ids))
    events = cache.take_events()
    assert len(events) <= MAX_EVENTS
    assert events[0].kind == "cleared"
    assert [event.sequence for event in events] == list(range(len(events)))
