"""KV of prefixes through real tiers: the same text, bit for bit, whichever engine computed it and whatever fails."""

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
from paceline_engine.core.stored_kv import ChunkLoad
from paceline_engine.core.stored_prefixes import StoredPrefixes
from paceline_engine.kv_chunks import ChunkCopier
from paceline_engine.paged_kv import PagedKV
from paceline_engine.tier_store import MAX_WRITES, TierStore
from paceline_kvstore.codec import Buffer
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiers.base import Tier
from paceline_kvstore.tiers.disk import DiskTier
from paceline_kvstore.tiers.memory import MemoryTier

NAMESPACE = "ab" * 32
BLOCK, CHUNK = 4, 8
MIB = 1 << 20
DEADLINE = 30.0


class Slow(MemoryTier):
    """A memory tier that outlives engines, waits until the test lets it go on, and loses what it is told to."""

    def __init__(self) -> None:
        super().__init__(16 * MIB)
        self.go_on = threading.Event()
        self.go_on.set()
        self.is_entered = threading.Event()
        self.lost: set[bytes] = set()

    def put(self, key: ChunkKey, payload: Buffer, **more) -> bool:
        self.is_entered.set()
        assert self.go_on.wait(DEADLINE)
        return super().put(key, payload, **more)

    def read_into(self, key: ChunkKey, target: bytearray | memoryview, *, deadline: float | None = None) -> int | None:
        self.is_entered.set()
        assert self.go_on.wait(DEADLINE)
        return None if key.chain in self.lost else super().read_into(key, target)

    def close(self) -> None:
        """The test looks at it afterwards."""


@contextmanager
def engine(loop: Any, tier: Tier) -> Iterator[tuple[Any, TierStore]]:
    """The real scheduler, runner and decoder, whose prefixes go to a tier and come back. Ends as an engine does."""
    kv = loop.scheduler.kv
    store = TierStore(tier, "disk", ChunkCopier(loop.runner.kv), NAMESPACE, CHUNK)
    assert kv.cache is not None
    kv.stored = StoredPrefixes(kv.pool, kv.cache, BLOCK, store, CHUNK // BLOCK, max_wait_s=DEADLINE)
    news = threading.Semaphore(0)
    store.on_news(news.release)
    loop.before_step = lambda: wait_for_news(loop, news)
    try:
        yield loop, store
    finally:
        store.drain(DEADLINE)
        kv.stored.offer_all()
        store.close()


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
    with engine(make(), DiskTier(tmp_path, 64 * MIB)) as (loop, _):
        expected = texts(loop, prompts)
        assert all(output.loaded_tokens == {} for output in loop.finished.values())
    with engine(make(), DiskTier(tmp_path, 64 * MIB)) as (loop, _):
        assert texts(loop, prompts) == expected
        loaded = [loop.finished[str(number)].loaded_tokens for number in range(len(prompts))]
    assert loaded == [{"disk": (len(prompt) - 1) // CHUNK * CHUNK} for prompt in prompts]


def test_a_reset_forgets_the_tier_too(make, prompts):
    tier = Slow()
    with engine(make(), tier) as (loop, store):
        texts(loop, prompts)
        store.drain(DEADLINE)
        assert loop.scheduler.kv.stored is not None
        loop.scheduler.kv.stored.offer_all()
        assert len(list(tier.keys())) > 4
        loop.scheduler.reset_prefix_cache()
        assert store.find("a", chain_hashes(prompts[0], BLOCK)[1::2], 0) == 0
        store.close()
        assert list(tier.keys()) == []


def test_what_is_lost_or_corrupt_is_computed_and_the_text_is_the_same(make, prompts):
    tier = Slow()
    with engine(make(), tier) as (loop, _):
        expected = texts(loop, prompts)
    for prompt in prompts:
        tier.lost.add(chain_hashes(prompt, BLOCK)[3])  # The second chunk.
    with engine(make(), tier) as (loop, _):
        assert texts(loop, prompts) == expected
        assert all(output.loaded_tokens == {"disk": CHUNK} for output in loop.finished.values())


def test_a_cancelled_load_writes_nothing_any_more(tiny, new_loop, make, prompts):
    tier = Slow()
    with engine(make(), tier) as (loop, _):
        texts(loop, prompts[:1])
    tier.is_entered.clear()
    tier.go_on.clear()
    chain = tuple(chain_hashes(prompts[0], BLOCK)[1::2])
    loop = new_loop(tiny, num_blocks=16)
    store = TierStore(tier, "disk", ChunkCopier(loop.runner.kv), NAMESPACE, CHUNK)
    store.begin(ChunkLoad(request_id="a", chain=chain, first=0, block_ids=tuple(range(2 * len(chain))), num_present=0))
    assert tier.is_entered.wait(DEADLINE)
    store.cancel("a")
    tier.go_on.set()
    store.close()
    assert store.poll() == []
    assert not loop.runner.kv.tensor.any()


def test_offers_never_wait_and_their_bytes_are_those_of_the_moment(tiny, new_loop):
    tier = Slow()
    tier.go_on.clear()
    kv = new_loop(tiny, num_blocks=8).runner.kv
    store = TierStore(tier, "disk", ChunkCopier(kv), NAMESPACE, CHUNK)
    keys = [bytes([number]) * 32 for number in range(MAX_WRITES + 3)]
    for number, key in enumerate(keys):
        kv.tensor.fill_(float(number))
        store.offer(key, None, (2, 5))
    store.offer(keys[0], None, (2, 5))
    assert (store.num_offered, store.num_dropped) == (MAX_WRITES + 3, 3)
    tier.go_on.set()
    store.drain(DEADLINE)
    assert store.close()
    contents = [tier.get(ChunkKey(bytes.fromhex(NAMESPACE), key, CHUNK)) for key in keys[:MAX_WRITES]]
    values = [None if content is None else set(np.frombuffer(content, np.float32)) for content in contents]
    assert values == [{float(number)} for number in range(MAX_WRITES)]


def test_a_drain_writes_all_that_is_offered(tiny, new_loop):
    tier = Slow()
    kv = new_loop(tiny, num_blocks=8).runner.kv
    store = TierStore(tier, "disk", ChunkCopier(kv), NAMESPACE, CHUNK)
    store.drain(DEADLINE)
    for number in range(3 * MAX_WRITES):
        store.offer(bytes([number]) * 32, None, (0, 1))
    assert store.close()
    assert len(list(tier.keys())) == 3 * MAX_WRITES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("num_tokens", "skipped"), [(8, 0), (8, 4), (7, 0), (8, 3), (5, 5)])
def test_a_chunk_comes_back_into_other_blocks_and_nowhere_else(tiny, dtype, num_tokens, skipped):
    generator = torch.Generator().manual_seed(1)
    kv, other = (PagedKV(tiny.config, 6, BLOCK, dtype) for _ in range(2))
    for tensor in kv._memory():
        tensor.copy_(torch.randint(-100, 100, tensor.shape, generator=generator))
    chunk = ChunkCopier(kv).read((4, 1), num_tokens)
    copier = ChunkCopier(other)
    buffer = copier.new_buffer(num_tokens)
    buffer[:] = chunk.data
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
