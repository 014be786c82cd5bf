"""Stored prefixes on the device before the first request: found by it, bounded in blocks and time, known by hashes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count

from driver import add, finish_all, make, step

from paceline_api.identity import chain_hashes
from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.hot_prefixes import HotPrefixes, decoded
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.prefix_cache import PrefixCache
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.stored_kv import Arrived, ChunkLoad, Wanted
from paceline_engine.core.stored_prefixes import StoredPrefixes
from paceline_engine.prefix_warm_up import bring_back

BLOCK, CHUNK_BLOCKS = 4, 2
LONG = list(range(100, 120))


class Store:
    """Has every chunk but those it is told to lack; each load takes some polls, or never ends."""

    def __init__(self, lacks: Sequence[bytes] = (), *, polls: int = 2, is_stuck: bool = False) -> None:
        self.lacks = set(lacks)
        self.polls = polls
        self.is_stuck = is_stuck
        self.asked = 0
        self.loads: dict[str, tuple[ChunkLoad, Iterator[int]]] = {}

    def find(self, wanted: Wanted) -> int | None:
        self.asked += 1
        if self.asked == 1:
            return None  # As a tier that must be asked.
        return [*(key not in self.lacks for key in wanted.chain), False].index(False)

    def begin(self, load: ChunkLoad) -> None:
        self.loads[load.request_id] = load, count()

    def poll(self) -> list[Arrived]:
        news: list[Arrived] = []
        for name, (load, polls) in list(self.loads.items()):
            num_chunks = len(load.chain) - load.first
            if self.is_stuck:
                news.append(Arrived(request_id=name, tiers=("disk",), is_over=False))
            elif next(polls) >= self.polls:
                news.append(Arrived(request_id=name, tiers=("disk",) * num_chunks, is_over=True))
                del self.loads[name]
        return news

    def cancel(self, request_id: str) -> None:
        self.loads.pop(request_id, None)

    def offer(self, key: bytes, parent: bytes | None, block_ids: Sequence[int], tenant: str) -> bool:
        return True

    def forget(self, keys: Sequence[bytes]) -> None:
        pass

    def clear(self) -> None:
        pass


def make_with(store: Store, num_blocks: int = 64) -> tuple[Scheduler, StoredPrefixes]:
    pool = BlockPool(num_blocks)
    cache = PrefixCache(pool, BLOCK)
    stored = StoredPrefixes(pool, cache, BLOCK, store, CHUNK_BLOCKS)
    stored.hot = HotPrefixes()
    kv = KVManager(pool, BLOCK, None, cache, stored)
    return Scheduler(make(num_blocks=num_blocks, block_size=BLOCK).config, kv, (99,)), stored


def warm(scheduler: Scheduler, stored: StoredPrefixes, *prompts: Sequence[int], seconds: float = 1e9) -> int:
    """In a time that passes by a second with each look at it."""
    chains = [tuple(chain_hashes(prompt, BLOCK)[: len(prompt) // 8 * CHUNK_BLOCKS]) for prompt in prompts]
    news, seen = threading.Event(), count()
    news.set()
    num_tokens = bring_back(scheduler.kv, stored, chains, seconds, news, lambda: float(next(seen)))
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks
    return num_tokens


def test_a_prompt_is_found_on_the_device_and_not_asked_for_again():
    store = Store()
    scheduler, stored = make_with(store)
    assert warm(scheduler, stored, LONG) == 16
    asked = store.asked
    add(scheduler, "a", LONG)
    plan, outputs = step(scheduler)
    assert (plan.scheduled[0].start, outputs[0].num_cached_tokens, outputs[0].loaded_tokens) == (16, 16, {})
    assert store.asked == asked
    assert scheduler.kv.cache is not None
    events = scheduler.kv.cache.take_events()
    told = [(event.kind, key, event.token_ids) for event in events for key in event.block_hashes]
    assert told[:4] == [("stored", key, ()) for key in chain_hashes(LONG, BLOCK)[:4]]


def test_what_prompts_share_is_loaded_once_and_what_is_gone_is_left_out():
    other = [*LONG[:8], *range(8)]
    scheduler, stored = make_with(Store())
    assert warm(scheduler, stored, LONG, other) == 24
    scheduler, stored = make_with(Store(chain_hashes(LONG, BLOCK)[3:4]))
    assert warm(scheduler, stored, LONG) == 8


def test_half_of_the_pool_is_left_alone():
    scheduler, stored = make_with(Store(), num_blocks=12)
    prompts = [[seed] * 16 for seed in range(4)]
    assert warm(scheduler, stored, *prompts) == 24
    assert scheduler.kv.pool.num_cached_blocks == 6


def test_its_time_is_bounded_and_what_came_in_it_stays():
    scheduler, stored = make_with(Store(is_stuck=True))
    assert warm(scheduler, stored, LONG, seconds=50.0) == 8
    assert stored.num_loads == 0


def test_what_was_used_is_listed_for_the_next_start_and_a_reset_empties_the_list():
    scheduler, stored = make_with(Store(chain_hashes(LONG, BLOCK)))
    assert stored.hot is not None
    add(scheduler, "a", LONG, 2)
    add(scheduler, "short", LONG[:7], 1)
    finish_all(scheduler)
    assert decoded(stored.hot.encoded(), CHUNK_BLOCKS) == [tuple(chain_hashes(LONG, BLOCK)[:4])]
    scheduler.reset_prefix_cache()
    assert decoded(stored.hot.encoded(), CHUNK_BLOCKS) == []
