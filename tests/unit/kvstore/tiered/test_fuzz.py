"""Random schedules of many threads over real tiers and a place that fails at random: nothing wrong comes out, nothing
leaks, every bound holds."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.fetch import Fetch
from paceline_kvstore.tiered.store import TieredStore
from paceline_kvstore.tiers import DiskTier

SECONDS = 20.0
STEPS = 120
THREADS = 4
Payloads = Callable[..., bytes]


class _Client:
    """One engine: offers, loads, gives up, pins, purges; checks every byte that it gets."""

    def __init__(self, store: TieredStore, seed: int, key: Callable[..., ChunkKey], payload: Payloads) -> None:
        self.store = store
        self.name = str(seed)
        self.dice = random.Random(seed)
        self.payload = payload
        self.key = key
        self.num_loaded = 0
        self.fetches: list[Fetch] = []

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
        for fetch in self.fetches:
            fetch.cancel()
        self.store.unpin(self.name)

    def step(self) -> None:
        # Prompts are one of 12 chains; their tenant follows from the number.
        number = self.dice.randrange(12)
        keys = [self.key(100 * number + index) for index in range(self.dice.randint(1, 8))]
        tenant = "acme" if number % 3 == 0 else ""
        match self.dice.randrange(10):
            case 0 | 1 | 2:
                for index, key in enumerate(keys):
                    self.store.offer(key, self.payload(key), parent=keys[index - 1] if index else None, tenant=tenant)
            case 3 | 4 | 5 | 6:
                plan = self.store.lookup(keys, bytes_per_token=256).plan
                self.fetches.append(self.store.fetch(plan, self.dice.choice((0.0, 0.001, 5.0)), tenant=tenant))
            case 7:
                self.store.pin(self.name, keys, self.dice.choice((0.001, 10.0)))
                if self.dice.random() < 0.8:
                    self.store.unpin(self.name)
            case 8 if self.dice.random() < 0.2:
                self.store.clear(tenant="acme")
            case _ if self.fetches:
                self.read(self.fetches.pop(self.dice.randrange(len(self.fetches))))
            case _:
                self.store.delete(keys[0])

    def read(self, fetch: Fetch) -> None:
        if self.dice.random() < 0.5:
            fetch.wait(self.dice.choice((0.0, 0.01)))
        for index, (key, lease) in enumerate(fetch.poll()):
            assert key == fetch.keys[index]
            assert lease.payload == self.payload(key)
            self.num_loaded += 1
            if self.dice.random() < 0.95:
                lease.release()
        fetch.cancel()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_schedule_conserves_bytes_leases_and_queues(
    make_store: Callable[..., TieredStore], held: Any, key: Any, payload: Payloads, seed: int
) -> None:
    size = len(payload(key(0)))
    limits = {"acme": 6 * size}
    store = make_store(
        memory_chunks=24,
        memory={"quotas": limits},
        disk={"capacity": 1 << 20, "quotas": limits, "write_bytes": 8 * size, "read_bytes": 2 * size},
        other=(held, {"is_indexed": False, "write_bytes": 4 * size, "read_jobs": 8, "needs_second_offer": True}),
    )
    clients = [_Client(store, 100 * seed + number, key, payload) for number in range(THREADS)]
    errors: list[BaseException] = []

    def run(client: _Client) -> None:
        try:
            client.run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    dice = random.Random(seed)
    while any(thread.is_alive() for thread in threads):
        held.is_broken = dice.random() < 0.3
        store.check_integrity()
        threads[dice.randrange(THREADS)].join(0.002)
    held.is_broken = False
    assert not errors, errors[0]
    assert sum(client.num_loaded for client in clients) > 0
    assert store.flush(SECONDS) is True
    _check_all_is_over(store)
    assert store.close(SECONDS)


def _damage(folder: Path, dice: random.Random) -> None:
    """What happens to files: bits turn, ends and whole files go."""
    segments = sorted(folder.glob("segment-*"))
    if not segments:
        return
    path = dice.choice(segments)
    with suppress(FileNotFoundError), path.open("r+b") as file:
        size = path.stat().st_size
        match dice.randrange(8):
            case 0:
                path.unlink()
            case 1:
                file.truncate(dice.randrange(size + 1))
            case _:
                at = dice.randrange(max(1, size))
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << dice.randrange(8)]) if byte else b"x")


def test_a_disk_that_rots_under_load_serves_nothing_wrong(
    make_store: Callable[..., TieredStore], key: Any, payload: Payloads, tmp_path: Path
) -> None:
    """Memory holds next to nothing, so that all reads are of files that are damaged at every moment."""
    store = make_store(memory_chunks=2, disk={"capacity": 1 << 20, "needs_second_offer": False})
    chains = [[key(100 * number + index) for index in range(8)] for number in range(12)]
    dice = random.Random(5)

    def load(chain: list[ChunkKey]) -> int:
        """Load a chain, check what comes, and offer the rest again, as an engine does that had to compute it."""
        fetch = store.fetch(store.lookup(chain, bytes_per_token=256).plan, SECONDS)
        fetch.wait(SECONDS)
        loaded = [(chunk, bytes(lease.payload)) for chunk, lease in fetch.poll()]
        assert loaded == [(chunk, payload(chunk)) for chunk in chain[: len(loaded)]]
        for index in range(len(loaded), len(chain)):
            store.offer(chain[index], payload(chain[index]), parent=chain[index - 1] if index else None)
        return len(loaded)

    num_loaded = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(12):
            running = [pool.submit(load, dice.choice(chains)) for _ in range(40)]
            for _ in range(20):
                _damage(tmp_path / "kv", dice)
                wait(running, timeout=0.0005)
            num_loaded += sum(future.result() for future in running)
            store.flush(SECONDS)  # False where a file is gone.
    assert num_loaded > 100
    disk = store.levels[1].tier
    assert disk.stats.corrupt > 0
    assert 0 < len(disk.quarantine.latest()) <= 64  # type: ignore[attr-defined]
    until = threading.Event()
    while any(level.reads.num_jobs or level.writes.num_jobs for level in store.levels):
        until.wait(0.002)
    assert store.leases.num == 0
    assert all(level.reads.failed == level.writes.failed == level.counts.errors == 0 for level in store.levels)
    disk.check_integrity()  # type: ignore[attr-defined]
    assert store.close(SECONDS)
    reopened = DiskTier(tmp_path / "kv", 1 << 20)
    assert all(reopened.get(chunk) in (None, payload(chunk)) for chunk in list(reopened.keys()))
    reopened.close()


def _check_all_is_over(store: TieredStore) -> None:
    until = threading.Event()
    while any(level.reads.num_jobs for level in store.levels):
        until.wait(0.002)
    assert len(store.writes) == 0
    assert store.leases.num == store.leases.num_bytes == 0
    now = store.clock()
    assert store.pins.num_holders(now) == store.pins.num_keys(now) == store.pins.num_bytes(now) == 0
    memory, disk, _ = store.levels
    memory.tier.check_integrity()  # type: ignore[attr-defined]
    disk.tier.check_integrity()  # type: ignore[attr-defined]
    assert memory.tier.num_leased == 0  # type: ignore[attr-defined]
    for level in store.levels:
        assert level.writes.num_bytes == level.reads.num_bytes == 0
        assert level.reads.failed == level.writes.failed == 0
    for level in (memory, disk):
        owners = level.tenants.used("acme")
        assert owners <= level.options.quotas["acme"]
        level.tier.clear()
        assert level.tenants.used("acme") == 0
    store.check_integrity()
