"""The tiered store as an engine sees it: what goes in comes out, from wherever it is, and nothing ever waits."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from store_steps import SECONDS, Keys, Make, Payloads, chain, finish, levels, load, offer, settled, settled_first, wait

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.reuse import Prefill, ReuseMode
from paceline_kvstore.tiered.level import STUCK_S, Level, LevelOptions
from paceline_kvstore.tiered.store import ChunkEvent, TieredStore


def test_an_offered_chunk_is_found_at_once_though_no_level_has_it_yet(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    held.writes.shut()
    store = make_store(other=(held, {"name": "first"}))
    store.levels = (store.levels[1],)
    keys = chain(key, 3)
    assert offer(store, keys, payload) == [True] * 3
    lookup = store.lookup(keys)
    assert not lookup.is_pending and len(lookup.plan) == 3
    assert load(store, lookup.plan, payload) == 3
    held.writes.set()


def test_only_a_second_offer_reaches_the_disk(make_store: Make, key: Keys, payload: Payloads) -> None:
    store = make_store(disk={})
    keys = chain(key, 4)
    offer(store, keys, payload)
    settled(store)
    assert [level.tier.contains(keys) for level in store.levels] == [4, 0]
    offer(store, keys[:2], payload)
    settled(store)
    assert [level.tier.contains(keys) for level in store.levels] == [4, 2]


def test_a_use_counts_as_an_offer_below_and_what_memory_forgets_comes_from_disk(
    make_store: Make, key: Keys, payload: Payloads
) -> None:
    store = make_store(memory_chunks=8, disk={})
    keys = chain(key, 6)
    offer(store, keys, payload)
    settled(store)
    assert load(store, store.lookup(keys).plan, payload) == 6
    settled(store)
    assert store.levels[1].counts.demoted == 6
    store.levels[0].tier.clear()
    plan = store.lookup(keys).plan
    assert levels(plan) == ["disk"] * 6
    assert load(store, plan, payload) == 6


def test_a_chunk_read_from_disk_comes_from_memory_the_next_time(make_store: Make, key: Keys, payload: Payloads) -> None:
    store = make_store(disk={})
    keys = chain(key, 3)
    for name in keys:
        assert store.levels[1].tier.put(name, payload(name))
    assert levels(store.lookup(keys).plan) == ["disk"] * 3
    assert load(store, store.lookup(keys).plan, payload) == 3
    settled(store)
    assert levels(store.lookup(keys).plan) == ["memory"] * 3
    assert store.levels[0].counts.promoted == 3


def test_a_lookup_does_not_wait_for_a_level_that_must_be_asked(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    held.lookups.shut()
    store = make_store(other=(held, {"is_indexed": False}))
    keys = chain(key, 5)
    offer(store, keys[:2], payload)
    for name in keys[1:4]:
        super(type(held), held).put(name, payload(name))
    lookup = store.lookup(keys)
    assert lookup.is_pending and levels(lookup.plan) == ["memory"] * 2
    held.lookups.set()
    assert lookup.wait(SECONDS)
    assert levels(lookup.plan) == ["memory", "memory", "other", "other"]
    assert load(store, lookup.plan, payload) == 4


def test_a_prompt_that_nobody_has_is_a_miss_at_once_where_all_levels_have_an_index(make_store: Make, key: Keys) -> None:
    lookup = make_store(disk={}).lookup(chain(key, 5))
    assert not lookup.is_pending and len(lookup.plan) == 0


def test_the_late_tail_is_dropped_at_the_deadline(make_store: Make, held: Any, key: Keys, payload: Payloads) -> None:
    now = [100.0]
    store = make_store(other=(held, {"readers": 1}), clock=lambda: now[0])
    keys = chain(key, 4)
    offer(store, keys[:2], payload)
    for name in keys[2:]:
        super(type(held), held).put(name, payload(name))
    plan = store.lookup(keys).plan
    held.reads.shut()
    fetch = store.fetch(plan, deadline_s=5.0)
    held.reads.wait_entered()
    assert not fetch.is_done and fetch.num_leading == 2
    now[0] = 105.0
    assert not fetch.is_done
    now[0] = 105.001
    assert fetch.is_done and fetch.num_leading == 2
    assert finish(fetch, payload) == 2
    held.reads.set()
    wait(lambda: store.levels[1].reads.num_jobs == 0)
    assert store.levels[1].counts.late == 1
    assert store.leases.num == store.leases.num_bytes == 0


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_level_whose_reads_hang_is_passed_by_until_one_returns(
    make_store: Make, held: Any, key: Keys, payload: Payloads, is_indexed: bool
) -> None:
    now = [100.0]
    store = make_store(other=(held, {"readers": 1, "is_indexed": is_indexed}), clock=lambda: now[0])
    keys = chain(key, 2)
    for name in keys:
        held.put(name, payload(name))

    def found() -> int:
        lookup = store.lookup(keys)
        assert lookup.wait(SECONDS)
        return len(lookup.plan)

    lookup = store.lookup(keys)
    assert lookup.wait(SECONDS)
    held.reads.shut()
    fetch = store.fetch(lookup.plan, deadline_s=5.0)
    held.reads.wait_entered()
    if is_indexed:  # Else the question would wait for the one reader.
        assert found() == 2
    now[0] += STUCK_S + 0.001
    assert fetch.is_done and fetch.num_leading == 0
    assert [found() for _ in range(3)] == [0, 0, 0], "nobody else waits for it"
    held.reads.set()
    settled(store)
    assert found() == 2, "it is back by itself"
    assert store.leases.num == 0


def test_chunks_after_a_missing_one_are_not_handed_over(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    store = make_store(other=(held, {}))
    keys = chain(key, 5)
    for name in keys:
        held.put(name, payload(name))
    plan = store.lookup(keys).plan
    held.delete(keys[2])
    assert load(store, plan, payload) == 2
    wait(lambda: store.leases.num == 0)
    assert len(store.lookup(keys).plan) == 2


def test_reads_do_not_wait_behind_writes(make_store: Make, held: Any, key: Keys, payload: Payloads) -> None:
    store = make_store(other=(held, {"writers": 1, "readers": 1}))
    keys = chain(key, 2)
    for name in keys:
        held.put(name, payload(name))
    held.writes.shut()
    offer(store, chain(key, 20, start=50), payload)
    assert load(store, store.lookup(keys).plan, payload) == 2
    assert store.levels[1].writes.num_jobs == 20


def test_a_full_queue_drops_the_newest_and_counts_it(make_store: Make, held: Any, key: Keys, payload: Payloads) -> None:
    keys = chain(key, 10)
    size = len(payload(keys[0]))
    store = make_store(memory_chunks=0, other=(held, {"write_bytes": 3 * size, "writers": 1}))
    held.writes.shut()
    offer(store, keys, payload)
    assert store.levels[1].counts.dropped == 7
    assert store.levels[1].writes.num_bytes == 3 * size
    held.writes.set()
    settled(store)
    assert set(held.keys()) == set(keys[:3])
    assert len(store.writes) == 0


def test_an_offer_in_two_halves_is_copied_only_for_who_wants_it(make_store: Make, key: Keys, payload: Payloads) -> None:
    store = make_store(disk={})
    name, content = key(1), payload(key(1))
    takers = store.takers(name, len(content))
    assert [level.name for level in takers or ()] == ["memory"]
    assert store.take(takers or (), name, content)
    settled(store)
    takers = store.takers(name, len(content))
    assert [level.name for level in takers or ()] == ["disk"]
    assert store.take(takers or (), name, content)
    settled(store)
    assert store.takers(name, len(content)) == ()
    assert not store.take((), name, content)


def test_a_chunk_written_into_memory_is_kept_there_and_written_to_the_others(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    store = make_store(other=(held, {}))
    name, content = key(1), payload(key(1))
    takers = store.takers(name, len(content)) or ()
    filling = store.fill(takers, name, len(content), None, "acme")
    assert filling is not None
    filling.buffer[:] = content
    assert store.take(takers, name, filling.buffer, tenant="acme", filling=filling)
    settled(store)
    assert [level.tier.origin(name) for level in store.levels] == [(None, "acme")] * 2
    assert [level.tier.get(name) for level in store.levels] == [content] * 2
    assert [level.counts.writes for level in store.levels] == [1, 1]
    # Where another level is the first there is no memory to write into.
    assert store.fill(store.levels[1:], key(2), len(content), None, "") is None
    assert store.fill((), key(2), len(content), None, "") is None


def test_an_offer_that_only_a_full_queue_keeps_out_can_be_made_again(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    size = len(payload(key(1)))
    store = make_store(memory_chunks=8, other=(held, {"write_bytes": size, "writers": 1, "needs_second_offer": True}))
    offer(store, [key(1)], payload)
    settled(store)
    held.writes.shut()
    offer(store, [key(2)] * 2, payload)
    settled_first(store)
    offer(store, [key(1)] * 3, payload)
    assert store.levels[1].counts.dropped == 3
    held.writes.set()
    settled(store)
    offer(store, [key(1)], payload)
    settled(store)
    assert set(held.keys()) == {key(1), key(2)}


def test_a_first_level_without_room_says_so(make_store: Make, held: Any, key: Keys, payload: Payloads) -> None:
    size = len(payload(key(1)))
    only = TieredStore([Level(held, LevelOptions(name="only", write_bytes=2 * size, writers=1))])
    held.writes.shut()
    assert only.takers(key(1), size, promised=2 * size) is None
    assert offer(only, chain(key, 2), payload) == [True, True]
    assert only.takers(key(5), size) is None
    assert only.takers(key(1), size) == ()
    assert not only.levels[0].writes.wait_room(size, time.monotonic())
    held.writes.set()
    assert only.levels[0].writes.wait_room(size, time.monotonic() + SECONDS)
    assert only.takers(key(5), size) == only.levels
    only.close()


def test_who_waits_hears_of_answers_and_of_chunks_and_where_they_came_from(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    store = make_store(other=(held, {"is_indexed": False}))
    keys, news = chain(key, 3), threading.Semaphore(0)
    offer(store, keys[:1], payload)
    settled(store)
    for name in keys[1:]:
        held.put(name, payload(name))
    held.lookups.shut()
    lookup = store.lookup(keys, on_news=news.release)
    assert not news.acquire(blocking=False)
    held.lookups.set()
    assert news.acquire(timeout=SECONDS)
    assert not lookup.is_pending
    fetch = store.fetch(lookup.plan, 10 * SECONDS, on_news=news.release)
    for _ in keys:
        assert news.acquire(timeout=SECONDS)
    assert fetch.sources == ("memory", "other", "other")
    assert finish(fetch, payload) == 3


def test_a_broken_level_is_a_miss_and_the_others_go_on(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    store = make_store(other=(held, {"is_indexed": False, "is_durable": True}))
    keys = chain(key, 4)
    offer(store, keys, payload)
    settled(store)
    store.levels[0].tier.delete(keys[3])
    held.is_broken = True
    lookup = store.lookup(keys)
    assert lookup.wait(SECONDS)
    assert len(lookup.plan) == 3
    assert load(store, lookup.plan, payload) == 3
    assert store.levels[1].counts.errors > 0
    assert not store.drain(SECONDS)
    store.check_integrity()


def test_a_read_that_fails_after_the_lookup_is_a_miss(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    store = make_store(other=(held, {}))
    held.put(key(1), payload(key(1)))
    plan = store.lookup([key(1)]).plan
    held.is_broken = True
    assert load(store, plan, payload) == 0


def test_a_chunk_that_left_a_level_since_the_lookup_comes_from_the_next(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    store = make_store(disk={}, other=(held, {}))
    keys = chain(key, 2)
    for level in store.levels[1:]:
        for name in keys:
            assert level.tier.put(name, payload(name))
    store.levels[0].tier.put(keys[0], payload(keys[0]))
    plan = store.lookup(keys).plan
    assert levels(plan) == ["memory", "disk"]
    store.levels[0].tier.clear()
    store.levels[1].tier.delete(keys[1])
    assert load(store, plan, payload) == 2
    assert [level.counts.hits for level in store.levels] == [0, 1, 1]


def test_a_chunk_that_is_there_needs_no_queue(make_store: Make, key: Keys, payload: Payloads) -> None:
    store = make_store()
    assert store.offer(key(1), payload(key(1)))
    settled(store)
    assert store.offer(key(1), payload(key(1)))
    assert store.levels[0].counts.writes == 1


def test_a_level_without_an_index_gets_a_chunk_once_and_again_when_it_lost_it(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    store = make_store(memory_chunks=0, other=(held, {"is_indexed": False}))
    for _ in range(3):
        store.offer(key(1), payload(key(1)))
        settled(store)
    assert store.levels[1].counts.writes == 1
    lookup = store.lookup([key(1)])
    assert lookup.wait(SECONDS)
    held.delete(key(1))
    assert load(store, lookup.plan, payload) == 0
    store.offer(key(1), payload(key(1)))
    settled(store)
    assert store.levels[1].counts.writes == 2


def test_cancelled_loads_give_all_leases_back(make_store: Make, held: Any, key: Keys, payload: Payloads) -> None:
    store = make_store(other=(held, {"readers": 2}))
    keys = chain(key, 6)
    offer(store, keys[:3], payload)
    for name in keys[3:]:
        super(type(held), held).put(name, payload(name))
    held.reads.shut()
    fetches = [store.fetch(store.lookup(keys).plan, SECONDS) for _ in range(50)]
    assert store.leases.num == 150
    handed = [lease for fetch in fetches[:10] for _, lease in fetch.poll()]
    for fetch in fetches:
        fetch.cancel()
        assert fetch.is_done and list(fetch.poll()) == []
    assert store.leases.num == len(handed) == 30
    for lease in handed:
        lease.release()
        lease.release()
    held.reads.set()
    wait(lambda: store.levels[1].reads.num_jobs == 0)
    assert store.leases.num == store.leases.num_bytes == 0
    settled(store)
    assert store.levels[0].tier.num_leased == 0  # type: ignore[attr-defined]


def test_a_lease_that_is_dropped_without_release_comes_back(make_store: Make, key: Keys, payload: Payloads) -> None:
    store = make_store()
    offer(store, [key(1)], payload)
    leases = [lease for _, lease in store.fetch(store.lookup([key(1)]).plan).poll()]
    assert store.leases.num == 1
    leases.clear()
    assert store.leases.num == 0


def test_a_drained_store_has_all_of_it_on_disk_after_a_restart(make_store: Make, key: Keys, payload: Payloads) -> None:
    store = make_store(disk={})
    keys = chain(key, 12)
    offer(store, keys, payload)
    assert store.drain(SECONDS)
    assert not store.offer(key(99), payload(key(99)))
    assert store.close(SECONDS)
    again = make_store(disk={})
    plan = again.lookup(keys).plan
    assert levels(plan) == ["disk"] * 12
    assert load(again, plan, payload) == 12


def test_flush_says_whether_all_became_durable_in_time(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    store = make_store(other=(held, {}), disk={"needs_second_offer": False})
    offer(store, chain(key, 3), payload)
    assert store.flush(SECONDS)
    held.writes.shut()
    offer(store, chain(key, 3, start=10), payload)
    assert not store.flush(0.05)
    held.writes.set()
    assert store.flush(SECONDS)


def test_an_end_is_in_time_though_the_place_hangs(make_store: Make, held: Any, key: Keys, payload: Payloads) -> None:
    store = make_store(other=(held, {"is_durable": True, "needs_second_offer": True}))
    offer(store, [key(1)], payload)
    settled(store)
    held.writes.shut()
    assert not store.drain(0.05), "memory alone has the chunk"
    held.writes.wait_entered()
    assert store.levels[1].writes.num_jobs == 1, "a thread of the level's still waits for the place"
    held.writes.set()
    settled(store)
    assert store.drain(SECONDS) is False and held.get(key(1)) == payload(key(1)), "memory promises nothing by itself"
    held.lookups.shut()
    held.close = held.lookups.enter
    assert not store.close(0.05)
    held.lookups.wait_entered()


def test_events_add_up_to_what_each_level_holds(make_store: Make, key: Keys, payload: Payloads) -> None:
    held: dict[str, set[ChunkKey]] = {"memory": set(), "disk": set()}

    def note(event: ChunkEvent) -> None:
        assert event.is_held is (event.key not in held[event.level])
        (held[event.level].add if event.is_held else held[event.level].remove)(event.key)

    store = make_store(memory_chunks=6, disk={"capacity": 256 << 10}, on_event=note)
    for start in range(0, 120, 30):
        keys = chain(key, 30, start=start)
        offer(store, keys, payload)
        offer(store, keys, payload)
        settled(store)
    assert store.delete(key(119))
    assert store.levels[1].tier.stats.evictions and store.levels[0].tier.stats.evictions
    assert held == {level.name: set(level.tier.keys()) for level in store.levels}
    store.clear()
    assert held == {"memory": set(), "disk": set()}


def test_a_closed_store_answers_misses_and_says_when_a_thread_hangs(
    make_store: Make, held: Any, key: Keys, payload: Payloads
) -> None:
    store = make_store(other=(held, {}))
    held.writes.shut()
    offer(store, [key(1), key(2)], payload)
    plan = store.lookup([key(1)]).plan
    held.writes.wait_entered()
    assert not store.close(0.05)
    held.writes.set()
    assert not store.offer(key(3), payload(key(3)))
    assert len(store.lookup([key(1)]).plan) == 0
    fetch = store.fetch(plan)
    assert fetch.is_done


@pytest.mark.parametrize("mode", list(ReuseMode))
def test_the_mode_decides(make_store: Make, key: Keys, payload: Payloads, mode: ReuseMode) -> None:
    store = make_store(mode=mode)
    keys = chain(key, 4)
    offer(store, keys, payload)
    settled(store)
    plan = store.lookup(keys, bytes_per_token=1 << 20).plan
    # 16 MiB a chunk: 3 ms each by the prior, 1.6 us of computing.
    decision = store.decide(plan, Prefill(1e7), 100)
    assert decision.num_chunks == {ReuseMode.MEASURED: 0, ReuseMode.ALWAYS: 4, ReuseMode.NEVER: 0}[mode]
    slow = store.decide(plan, Prefill(100.0), 100)
    assert slow.num_chunks == (0 if mode is ReuseMode.NEVER else 4)
    store.record(slow, 0.01, slow.num_tokens_loaded, Prefill(100.0))
    assert (store.regret.loaded, store.regret.computed) == ((0, 1) if mode is ReuseMode.NEVER else (1, 0))


def test_two_levels_of_one_name_are_refused(make_store: Make, held: Any) -> None:
    with pytest.raises(ValueError, match="different names"):
        make_store(other=(held, {"name": "memory"}))
