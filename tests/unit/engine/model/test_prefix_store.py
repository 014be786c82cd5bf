"""KV of prefixes through a real store: the same text, bit for bit, whichever engine computed it and whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline_api.identity import chain_hashes
from paceline_engine.core.stored_kv import ChunkLoad, Wanted
from paceline_engine.core.stored_prefixes import StoredPrefixes
from paceline_engine.kv_chunks import ChunkCopier
from paceline_engine.paged_kv import PagedKV
from paceline_engine.prefix_store import MAX_COPIES, PrefixStore
from paceline_kvstore.codec import Buffer
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.estimate import Prior
from paceline_kvstore.tiered.level import Level, LevelOptions
from paceline_kvstore.tiered.store import TieredStore
from paceline_kvstore.tiers.base import Lease, Tier
from paceline_kvstore.tiers.disk import DiskTier
from paceline_kvstore.tiers.memory import MemoryTier

NAMESPACE = b"\xab" * 32
BLOCK, CHUNK = 4, 8
MIB = 1 << 20
DEADLINE = 30.0


class Slow(MemoryTier):
    """A memory tier that outlives engines, waits until the test lets it go on, and loses what it is told to."""

    def __init__(self, *, is_remote: bool = False) -> None:
        super().__init__(16 * MIB)
        self.is_remote = is_remote
        self.go_on = threading.Event()
        self.go_on.set()
        self.is_entered = threading.Event()
        self.lost: set[bytes] = set()

    def put(self, key: ChunkKey, payload: Buffer, **more) -> bool:
        self.is_entered.set()
        assert self.go_on.wait(DEADLINE)
        return super().put(key, payload, **more)

    def lease(self, key: ChunkKey, **more) -> Lease | None:
        self.is_entered.set()
        assert self.go_on.wait(DEADLINE)
        return None if key.chain in self.lost else super().lease(key, **more)

    def contains(self, keys: Sequence[ChunkKey], **more) -> int:
        if self.is_remote:
            self.is_entered.set()
            assert self.go_on.wait(DEADLINE)
        return super().contains(keys, **more)

    def close(self) -> None:
        """The test looks at it afterwards."""


def store_of(*tiers: Tier, device: Any, name: str = "disk", **options: Any) -> PrefixStore:
    """A store of levels named `name`, `name`1, ..., on the device of a loop."""
    levels: list[Level] = []
    for index, tier in enumerate(tiers):
        is_indexed = not (isinstance(tier, Slow) and tier.is_remote)
        levels.append(Level(tier, LevelOptions(name=f"{name}{index or ''}", is_indexed=is_indexed, **options)))
    return PrefixStore(TieredStore(levels), ChunkCopier(device.runner.kv), NAMESPACE, CHUNK)


@contextmanager
def engine(loop: Any, store: PrefixStore) -> Iterator[Any]:
    """The real scheduler, runner and decoder, whose prefixes go to a store and come back. Ends as an engine does."""
    kv = loop.scheduler.kv
    assert kv.cache is not None
    kv.stored = StoredPrefixes(kv.pool, kv.cache, BLOCK, store, CHUNK // BLOCK, max_wait_s=DEADLINE)
    news = threading.Semaphore(0)
    store.on_news(news.release)
    loop.before_step = lambda: wait_for_news(loop, news)
    try:
        yield loop
    finally:
        store.drain(DEADLINE)
        kv.stored.offer_all()
        assert store.close()
        assert store.store.leases.num == 0


def key_of(link: bytes) -> ChunkKey:
    return ChunkKey(NAMESPACE, link, CHUNK)


def chunks_of(prompt: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(chain_hashes(prompt, BLOCK)[CHUNK // BLOCK - 1 :: CHUNK // BLOCK])


def wanted(request_id: str, chain: Sequence[bytes], first: int = 0, **more: Any) -> Wanted:
    asked = {"tokens_per_s": 0.0, "queue_s": 0.0, "deadline_s": DEADLINE, "may_wait": True, "tenant": ""}
    num_tokens = (len(chain) - first) * CHUNK + 1
    return Wanted(request_id=request_id, chain=chain, first=first, num_tokens=num_tokens, **asked | more)


def wait_for_news(loop: Any, news: threading.Semaphore) -> None:
    """As the core's loop does where nothing else is to be done."""
    if loop.scheduler.seconds_to_wait(0.0) > 0.0:
        assert news.acquire(timeout=DEADLINE)


def texts(loop: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        loop.add(str(number), prompt, 8)
    loop.run()
    return [loop.tokens[str(number)] for number in range(len(prompts))]


@pytest.fixture
def make(tiny, new_loop) -> Callable[[], Any]:
    return lambda: new_loop(tiny, cached=True, num_blocks=128)


@pytest.fixture
def prompts(tiny, prompts_for) -> list[list[int]]:
    long = prompts_for(6, tiny.config.vocab_size, seed=5, longest=60)
    return [prompt for prompt in long if len(prompt) > 20]


def test_another_engine_over_the_same_disk_says_the_same_and_computes_less(make, prompts, tmp_path: Path):
    loop = make()
    with engine(loop, store_of(DiskTier(tmp_path, 64 * MIB), device=loop)):
        expected = texts(loop, prompts)
        assert all(output.loaded_tokens == {} for output in loop.finished.values())
    loop = make()
    with engine(loop, store_of(DiskTier(tmp_path, 64 * MIB), device=loop)):
        assert texts(loop, prompts) == expected
        loaded = [loop.finished[str(number)].loaded_tokens for number in range(len(prompts))]
    assert loaded == [{"disk": (len(prompt) - 1) // CHUNK * CHUNK} for prompt in prompts]


def test_each_chunk_counts_for_the_tier_that_it_came_from(make, prompts):
    near, far = Slow(), Slow(is_remote=True)
    loop = make()
    with engine(loop, store_of(far, device=loop)):
        expected = texts(loop, prompts)
    loop = make()
    store = store_of(near, far, device=loop, name="level")
    for prompt in prompts:
        first = key_of(chain_hashes(prompt, BLOCK)[1])
        near.put(first, far.get(first) or b"")
    with engine(loop, store):
        assert texts(loop, prompts) == expected
        loaded = [loop.finished[str(number)].loaded_tokens for number in range(len(prompts))]
    rest = [(len(prompt) - 1) // CHUNK * CHUNK - CHUNK for prompt in prompts]
    assert loaded == [{"level": CHUNK, "level1": tokens} for tokens in rest]


def test_a_tier_that_does_not_answer_is_not_waited_for_in_vain(make, prompts):
    tier = Slow(is_remote=True)
    loop = make()
    store = store_of(tier, device=loop)
    chain = chunks_of(prompts[0])
    tier.go_on.clear()
    assert store.find(wanted("a", chain)) is None
    assert store.find(wanted("a", chain)) is None
    assert store.find(wanted("a", chain, may_wait=False)) == 0
    assert store.find(wanted("b", chain)) is None
    store.cancel("b")
    tier.go_on.set()
    assert store.close()


def test_an_answer_that_comes_later_is_told(make, prompts):
    tier = Slow(is_remote=True)
    loop = make()
    with engine(loop, store_of(tier, device=loop)):
        texts(loop, prompts[:1])
    store, chain = store_of(tier, device=make()), chunks_of(prompts[0])
    told = threading.Semaphore(0)
    store.on_news(told.release)
    tier.go_on.clear()
    assert store.find(wanted("a", chain)) is None
    assert not told.acquire(blocking=False)
    tier.go_on.set()
    assert told.acquire(timeout=DEADLINE)
    assert store.find(wanted("a", chain)) == len(chain)
    # The device has the first chunk by now, or lost it after the question.
    assert store.find(wanted("b", chain, first=1)) is None
    assert told.acquire(timeout=DEADLINE)
    assert store.find(wanted("b", chain, first=0)) == 0
    store.close()


def test_what_is_slower_to_load_than_to_compute_is_computed_and_regretted(make, prompts):
    tier = Slow()
    loop = make()
    with engine(loop, store_of(tier, device=loop)):
        texts(loop, prompts[:1])
    chain = chunks_of(prompts[0])
    store = store_of(tier, device=make(), prior=Prior(latency_s=1.0, bandwidth=1e9))
    assert store.find(wanted("a", chain, tokens_per_s=1e6)) == 0
    assert store.find(wanted("a", chain, first=1, tokens_per_s=1e6)) == 1
    assert (store.store.regret.computed, store.store.regret.loaded) == (2, 0)
    # A queue hides the loading; a deadline ends it; a slow engine needs it.
    assert store.find(wanted("b", chain, tokens_per_s=1e6, queue_s=60.0)) == len(chain)
    assert store.find(wanted("c", chain, tokens_per_s=1e6, queue_s=60.0, deadline_s=0.5)) == 0
    assert store.find(wanted("d", chain, tokens_per_s=1.0)) == len(chain)
    assert store.find(wanted("e", chain, tokens_per_s=0.0)) == len(chain)
    said = store.explain()
    tokens, there = len(chain) * CHUNK + 1, len(chain) * CHUNK
    in_vain = "to compute them takes 60 s, and none could be there in time"
    assert said["c"] == f"of {tokens} tokens {there} in disk; none are loaded: {in_vain}"
    assert f"{there} are loaded: the first token comes in 60 s, else in 60 s" in said["b"]
    assert f"{there} are loaded: the speed of computing isn't known yet" in said["e"]
    assert "to load them" in store.explain().get("a", "")
    store.close()


def test_a_load_is_recorded_for_the_regret(make, prompts):
    tier = Slow()
    loop = make()
    with engine(loop, store_of(tier, device=loop)):
        texts(loop, prompts)
    loop = make()
    loop.scheduler.speed.restore((1.0, 1.0, 1.0, 1.0, 1.0, 2.0))
    store = store_of(tier, device=loop)
    with engine(loop, store):
        texts(loop, prompts)
        regret = store.store.regret
    assert (regret.loaded, regret.computed, regret.loaded_lost_s) == (len(prompts), 0, 0.0)
    # At 2 tokens a second, each token that came was half a second.
    tokens = sum((len(prompt) - 1) // CHUNK * CHUNK for prompt in prompts)
    assert 0.45 * tokens < regret.loaded_won_s <= 0.5 * tokens


def test_a_reset_forgets_the_tier_too(make, prompts):
    tier = Slow()
    loop = make()
    store = store_of(tier, device=loop)
    with engine(loop, store):
        texts(loop, prompts)
        store.drain(DEADLINE)
        assert loop.scheduler.kv.stored is not None
        loop.scheduler.kv.stored.offer_all()
        assert store.store.flush(DEADLINE)
        assert len(list(tier.keys())) > 4
        loop.scheduler.reset_prefix_cache()
        assert store.find(wanted("a", chunks_of(prompts[0]))) == 0
    assert list(tier.keys()) == []


def test_what_is_lost_or_corrupt_is_computed_and_the_text_is_the_same(make, prompts):
    tier = Slow()
    loop = make()
    with engine(loop, store_of(tier, device=loop)):
        expected = texts(loop, prompts)
    for prompt in prompts:
        tier.lost.add(chain_hashes(prompt, BLOCK)[3])  # The second chunk.
    loop = make()
    with engine(loop, store_of(tier, device=loop)):
        assert texts(loop, prompts) == expected
        assert all(output.loaded_tokens == {"disk": CHUNK} for output in loop.finished.values())


def test_a_cancelled_load_writes_nothing_any_more(tiny, new_loop, make, prompts):
    tier = Slow()
    loop = make()
    with engine(loop, store_of(tier, device=loop)):
        texts(loop, prompts[:1])
    chain = chunks_of(prompts[0])
    loop = new_loop(tiny, num_blocks=16)
    store = store_of(tier, device=loop)
    assert store.find(wanted("a", chain)) == len(chain)
    tier.is_entered.clear()
    tier.go_on.clear()
    store.begin(
        ChunkLoad(
            request_id="a",
            chain=chain,
            first=0,
            block_ids=tuple(range(2 * len(chain))),
            num_present=0,
            deadline_s=DEADLINE,
            tenant="",
        )
    )
    assert tier.is_entered.wait(DEADLINE)
    store.cancel("a")
    tier.go_on.set()
    store.close()
    assert store.poll() == []
    assert not loop.runner.kv.tensor.any()
    assert store.store.leases.num == 0


def test_offers_never_wait_and_their_bytes_are_those_of_the_moment(tiny, new_loop):
    tier = Slow()
    tier.go_on.clear()
    loop = new_loop(tiny, num_blocks=8)
    kv = loop.runner.kv
    room = 5 * ChunkCopier(kv).num_bytes(CHUNK)
    store = store_of(tier, device=loop, write_bytes=room)
    keys = [bytes([number]) * 32 for number in range(8)]
    taken: list[bool] = []
    for number, key in enumerate(keys):
        kv.tensor.fill_(float(number))
        taken.append(store.offer(key, None, (2, 5), ""))
    assert taken == [True] * 5 + [False] * 3
    assert store.num_refused == 3
    assert store.offer(keys[0], None, (2, 5), "")  # It is on its way.
    tier.go_on.set()
    store.drain(DEADLINE)
    for number, key in enumerate(keys):
        kv.tensor.fill_(float(number))
        assert store.offer(key, None, (2, 5), "")
    assert store.close()
    contents = [tier.get(key_of(key)) for key in keys]
    values = [None if content is None else set(np.frombuffer(content, np.float32)) for content in contents]
    assert values == [{float(number)} for number in range(8)]


def test_only_who_wants_a_chunk_has_it_copied(tiny, new_loop, monkeypatch: pytest.MonkeyPatch):
    tier = Slow()
    loop = new_loop(tiny, num_blocks=8)
    store = store_of(tier, device=loop, needs_second_offer=True)
    copies: list[Sequence[int]] = []
    read_later = ChunkCopier.read_later
    monkeypatch.setattr(
        ChunkCopier, "read_later", lambda self, ids, *more: copies.append(ids) or read_later(self, ids, *more)
    )
    for _ in range(2):
        assert store.offer(b"a" * 32, None, (2, 5), "")
    assert copies == [(2, 5)]
    store.drain(DEADLINE)
    assert store.close()
    assert list(tier.keys()) == [key_of(b"a" * 32)]


def test_what_goes_to_memory_is_copied_once_and_the_same_as_what_goes_to_disk(make, prompts, tmp_path: Path):
    class Memory(MemoryTier):
        def put(self, *_: Any, **__: Any) -> bool:
            raise AssertionError("a second copy")

    def store_for(loop: Any, memory: MemoryTier) -> PrefixStore:
        levels = [
            Level(memory, LevelOptions(name="memory", is_immediate=True)),
            Level(DiskTier(tmp_path, 64 * MIB), LevelOptions(name="disk", is_durable=True)),
        ]
        return PrefixStore(TieredStore(levels), ChunkCopier(loop.runner.kv), NAMESPACE, CHUNK)

    loop, memory = make(), Memory(16 * MIB)
    with engine(loop, store_for(loop, memory)):
        expected = texts(loop, prompts)
        assert loop.scheduler.kv.stored is not None
        loop.scheduler.kv.stored.offer_all()
        memory.check_integrity()
    loop = make()
    with engine(loop, store_for(loop, MemoryTier(16 * MIB))) as _:
        assert texts(loop, prompts) == expected
        loaded = [loop.finished[str(number)].loaded_tokens for number in range(len(prompts))]
    assert loaded == [{"disk": (len(prompt) - 1) // CHUNK * CHUNK} for prompt in prompts]


def test_a_drain_writes_all_that_is_offered(tiny, new_loop):
    tier = Slow()
    loop = new_loop(tiny, num_blocks=8)
    store = store_of(tier, device=loop, write_bytes=3 * ChunkCopier(loop.runner.kv).num_bytes(CHUNK))
    store.drain(DEADLINE)
    for number in range(3 * MAX_COPIES):
        assert store.offer(bytes([number]) * 32, None, (0, 1), "acme")
    assert store.close()
    assert len(list(tier.keys())) == 3 * MAX_COPIES
    assert set(map(tier.origin, tier.keys())) == {(None, "acme")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("num_tokens", "skipped"), [(8, 0), (8, 4), (7, 0), (8, 3), (5, 5)])
def test_a_chunk_comes_back_into_other_blocks_and_nowhere_else(tiny, dtype, num_tokens, skipped):
    generator = torch.Generator().manual_seed(1)
    kv, other = (PagedKV(tiny.config, 6, BLOCK, dtype) for _ in range(2))
    for tensor in kv._memory():
        tensor.copy_(torch.randint(-100, 100, tensor.shape, generator=generator))
    chunk = ChunkCopier(kv).read((4, 1), num_tokens)
    copier = ChunkCopier(other)
    buffer = memoryview(bytes(chunk))
    copier.write((0, 5), num_tokens, buffer, skipped)
    for before, after in zip(kv._memory(), other._memory(), strict=True):
        before, after = before.flatten(2, 3), after.flatten(2, 3)
        slots = [(0, 5)[i // BLOCK] * BLOCK + i % BLOCK for i in range(skipped, num_tokens)]
        sources = [(4, 1)[i // BLOCK] * BLOCK + i % BLOCK for i in range(skipped, num_tokens)]
        assert torch.equal(after[:, :, slots], before[:, :, sources])
        after[:, :, slots] = 0
        assert not after.any()
    with pytest.raises(ValueError, match="a chunk of 8 tokens has"):
        copier.write((0, 5), 8, buffer[:16])
