"""What tests of a tiered store do again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.fetch import Fetch
from paceline_kvstore.tiered.lookup import Plan
from paceline_kvstore.tiered.store import TieredStore

SECONDS = 10.0
Make = Callable[..., TieredStore]
Keys = Callable[..., ChunkKey]
Payloads = Callable[..., bytes]


def chain(key: Keys, count: int, start: int = 0) -> list[ChunkKey]:
    return [key(number) for number in range(start, start + count)]


def offer(store: TieredStore, keys: list[ChunkKey], payload: Payloads, tenant: str = "") -> list[bool]:
    return [
        store.offer(key, payload(key), parent=keys[index - 1] if index else None, tenant=tenant)
        for index, key in enumerate(keys)
    ]


def load(store: TieredStore, plan: Plan, payload: Payloads) -> int:
    """Fetch, check every byte, release; how many chunks came."""
    # A deadline that no wait here reaches: a load ends because all came, or cannot come.
    return finish(store.fetch(plan, 10 * SECONDS), payload)


def finish(fetch: Fetch, payload: Payloads) -> int:
    assert fetch.wait(SECONDS)
    count = 0
    for key, lease in fetch.poll():
        with lease as view:
            assert view == payload(key)
        assert key == fetch.keys[count]
        count += 1
    return count


def settled(store: TieredStore) -> None:
    for level in store.levels:
        assert level.reads.wait_idle(time.monotonic() + SECONDS)
    for level in store.levels:
        assert level.writes.wait_idle(time.monotonic() + SECONDS)


def settled_first(store: TieredStore) -> None:
    assert store.levels[0].writes.wait_idle(time.monotonic() + SECONDS)


def levels(plan: Plan) -> list[str]:
    return [chunk.level.name for chunk in plan.chunks]


def wait(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if is_so():
            return
        pause.wait(0.01)
    raise AssertionError("it never came about")
