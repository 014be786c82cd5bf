"""No request of an engine fails, hangs or says anything else because of its KV store, whatever a tier does."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline_engine.core.stored_prefixes import StoredPrefixes
from paceline_engine.kv_chunks import ChunkCopier
from paceline_engine.prefix_store import PrefixStore
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.level import Level, LevelOptions
from paceline_kvstore.tiered.store import TieredStore
from paceline_kvstore.tiers.base import Lease, Tier
from paceline_kvstore.tiers.disk import DiskOptions, DiskTier
from paceline_kvstore.tiers.memory import MemoryTier

NAMESPACE = b"\xab" * 32
BLOCK, CHUNK = 4, 8
MIB = 1 << 20
SECONDS = 30.0
MAX_WAIT_S = 10.0
NUM_TOKENS = 8
ERRORS = (OSError("the device is gone"), RuntimeError("a bug"), MemoryError(), KeyError("a race"), ValueError("odd"))


class Bad(MemoryTier):
    """A place that does with each call what the test says: it raises, lies, hangs, or has payloads of wrong sizes."""

    def __init__(self, seed: int) -> None:
        super().__init__(16 * MIB)
        self.ways: Sequence[str] = ()
        self.go_on = threading.Event()
        self._dice = random.Random(seed)

    def put(self, key: ChunkKey, payload: Any, **more: Any) -> bool:
        return self._way() != "lie" and super().put(key, payload, **more)

    def lease(self, key: ChunkKey, **more: Any) -> Lease | None:
        lease = super().lease(key, **more)
        match self._way():
            case "lie":
                return None
            case "size" if lease is not None:
                size = self._dice.choice((0, 1, len(lease.payload) - 4, len(lease.payload) + 4))
                return Lease(memoryview(bytes(lease.payload) + b"more")[:size])
        return lease

    def contains(self, keys: Sequence[ChunkKey], **more: Any) -> int:
        return len(keys) if self._way(may_hang=False) == "lie" else super().contains(keys, **more)

    def delete(self, key: ChunkKey) -> bool:
        self._way()
        return super().delete(key)

    def close(self) -> None:
        """The test looks at it afterwards."""

    def _way(self, *, may_hang: bool = True) -> str:
        way = self._dice.choice(self.ways) if self.ways else ""
        if way == "raise":
            raise self._dice.choice(ERRORS)
        if way == "hang" and may_hang:
            assert self.go_on.wait(SECONDS)
        return way


class Engine:
    """The real scheduler, runner and decoder over a store, on a clock that the test moves."""

    def __init__(self, loop: Any, tier: Tier) -> None:
        self.loop = loop
        self.now = 0.0
        level = Level(tier, LevelOptions(name="disk", is_durable=True))
        self.store = PrefixStore(TieredStore([level]), ChunkCopier(loop.runner.kv), NAMESPACE, CHUNK)
        kv = loop.scheduler.kv
        self.stored = kv.stored = StoredPrefixes(kv.pool, kv.cache, BLOCK, self.store, CHUNK // BLOCK, MAX_WAIT_S)
        self._news = threading.Semaphore(0)
        self.store.on_news(self._news.release)

    def step(self) -> None:
        """One step. Where all wait for the store, its news come first, or else the time at which that ends."""
        scheduler = self.loop.scheduler
        patience = scheduler.seconds_to_wait(self.now)
        if patience > 0.0 and not self._news.acquire(timeout=0.05):
            self.now += patience
        plan = scheduler.schedule(self.now)
        for output in scheduler.update(plan, self.loop.runner.execute(plan), self.now):
            self.loop._record(output)
        scheduler.check_integrity()
        self.now += 0.001

    def run(self, between: Callable[[], None] = lambda: None) -> None:
        for _ in range(3000):
            if not self.loop.scheduler.has_work:
                return
            between()
            self.step()
        raise AssertionError("requests hang")

    def texts(self, prompts: Sequence[Sequence[int]], between: Callable[[], None] = lambda: None) -> list[list[int]]:
        for number, prompt in enumerate(prompts):
            self.loop.add(str(number), prompt, NUM_TOKENS)
        self.run(between)
        assert {output.finish_reason for output in self.loop.finished.values()} == {"length"}
        return [self.loop.tokens[str(number)] for number in range(len(prompts))]

    def end(self) -> None:
        """As an engine ends; afterwards nothing is held anywhere."""
        self.store.drain(SECONDS)
        self.stored.offer_all()
        self.store.close()
        pool = self.loop.scheduler.kv.pool
        assert pool.num_free_blocks == pool.num_blocks
        assert self.stored.num_loads == 0 and self.stored.held_block_ids() == []
        store = self.store.store
        store.check_integrity()
        assert store.leases.num == store.leases.num_bytes == len(store.writes) == 0
        assert all(level.reads.num_jobs == level.writes.num_jobs == 0 for level in store.levels)
        assert all(level.reads.failed == level.writes.failed == 0 for level in store.levels)


@pytest.fixture
def make(tiny: Any, new_loop: Any) -> Callable[..., Engine]:
    return lambda tier, num_blocks=96: Engine(new_loop(tiny, cached=True, num_blocks=num_blocks), tier)


@contextmanager
def engine(make: Callable[..., Engine], tier: Tier) -> Iterator[Engine]:
    running = make(tier)
    yield running
    if isinstance(tier, Bad):
        tier.ways = ()
        tier.go_on.set()
    running.end()


@pytest.fixture(scope="module")
def prompts(tiny: Any, prompts_for: Any) -> list[list[int]]:
    long = prompts_for(10, tiny.config.vocab_size, seed=5, longest=60)
    return [prompt for prompt in long if len(prompt) > 20]


@pytest.mark.parametrize("ways", [["raise"], ["lie"], ["size"], ["hang"], ["raise", "lie", "size", "", ""]])
def test_a_bad_tier_costs_no_request_its_answer(ways: list[str], make, prompts):
    tier = Bad(seed=len(ways))
    with engine(make, tier) as first:
        expected = first.texts(prompts)
    assert len(list(tier.keys())) > 4
    for _ in range(2):
        with engine(make, tier) as other:
            tier.go_on.clear()
            tier.ways = ways
            assert other.texts(prompts) == expected


def test_a_disk_that_rots_while_the_engine_runs_changes_no_text(make, prompts, tmp_path: Path):
    folder, dice = tmp_path / "kv", random.Random(2)
    options = DiskOptions(segment_bytes=128 << 10)

    def rot() -> None:
        segments = sorted(folder.glob("segment-*"))
        for path in segments if dice.random() < 0.3 else ():
            content = bytearray(path.read_bytes())
            for _ in range(8):
                content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
            if path.exists():
                with path.open("r+b") as file:
                    file.write(content)
        if segments and dice.random() < 0.02:
            dice.choice(segments).unlink(missing_ok=True)

    with engine(make, DiskTier(folder, 2 * MIB, options)) as first:
        expected = first.texts(prompts)
    corrupt = 0
    for _ in range(4):
        tier = DiskTier(folder, 2 * MIB, options)
        with engine(make, tier) as other:
            assert other.texts(prompts, rot) == expected
        corrupt += tier.stats.corrupt
    assert corrupt > 0


def test_an_abort_storm_leaves_no_block_no_lease_and_no_job(make, prompts, tmp_path: Path):
    """Requests come and are aborted in every state, in the midst of loads too; the others get their own text."""
    with engine(make, DiskTier(tmp_path / "kv", 8 * MIB)) as first:
        expected = first.texts(prompts)
    dice = random.Random(4)
    with engine(partial(make, num_blocks=40), DiskTier(tmp_path / "kv", 8 * MIB)) as other:
        loop, num_cut, live = other.loop, 0, dict[str, int]()
        for number in range(200):
            live[f"r{number}"] = dice.randrange(len(prompts))
            loop.add(f"r{number}", prompts[live[f"r{number}"]], NUM_TOKENS)
            for _ in range(dice.randrange(4)):
                other.step()
            loading = [load.request.request_id for load in other.stored.loads]
            if dice.random() < 0.6:
                name = dice.choice(loading or list(live))
                num_cut += name in loading
                aborted = loop.scheduler.abort(name)
                if aborted is not None:
                    loop._record(aborted)
            for name in [name for name in live if name in loop.finished]:
                if loop.finished[name].finish_reason == "length":
                    assert loop.tokens[name] == expected[live[name]]
                del live[name]
        other.run()
        assert num_cut > 20
        reasons = [output.finish_reason for output in loop.finished.values()]
        assert len(reasons) == 200 and set(reasons) == {"length", "abort"}
