"""An outage of S3 as a store in production meets it: default breakers and pauses, the real clock, nobody's help."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fault_proxy import Fault, FaultProxy

from paceline_kvstore import ChunkKey
from paceline_kvstore.breaker import BreakerLimits
from paceline_kvstore.config import StoreSettings
from paceline_kvstore.opening import open_store
from paceline_kvstore.s3.settings import S3Settings
from paceline_kvstore.tiered.store import TieredStore

Key = Callable[..., ChunkKey]
BACK_WITHIN_S = 60.0
STATE = bytes(range(256)) * 64
OUTAGES = {
    "the server is gone": Fault(refuse=True),
    "credentials are refused": Fault(403, "AccessDenied"),
    "it answers 500": Fault(500),
    "it says slow down": Fault(503, "SlowDown"),
    "answers are cut short": Fault(cut=100, reset=True),
}


@pytest.fixture
def store(faulty: Any) -> Iterator[TieredStore]:
    """A store over the bucket alone, with what is set when nobody sets anything."""
    given = {**faulty.settings, "breaker": BreakerLimits()}
    for name in ("linger", "retry_seconds", "retry_seconds_max"):
        del given[name]
    store = open_store(StoreSettings(s3=S3Settings(**given)))
    yield store
    store.close()


def loaded(store: TieredStore, keys: Sequence[ChunkKey]) -> int:
    """How many leading chunks come, as a request of an engine asks for them; each of them right."""
    lookup = store.lookup(keys, bytes_per_token=len(STATE) // 16)
    lookup.wait(30.0)
    fetch = store.fetch(lookup.plan, 30.0)
    fetch.wait(30.0)
    count = 0
    for _, lease in fetch.poll():
        with lease as payload:
            assert payload == STATE
        count += 1
    fetch.cancel()
    return count


@pytest.mark.parametrize("what", OUTAGES)
def test_the_tier_is_back_by_itself(what: str, store: TieredStore, faulty: Any, proxy: FaultProxy, make_key: Key):
    old, new = [make_key(n) for n in range(3)], [make_key(n) for n in range(3, 6)]
    for key in old:
        assert store.offer(key, STATE)
    assert store.flush()
    proxy.plan = lambda request: OUTAGES[what]
    for _ in range(8):
        assert loaded(store, old) == 0
    asked = len(proxy.requests)
    for _ in range(50):
        assert loaded(store, old) == 0
    if what != "it says slow down":  # That is answered by fewer calls.
        assert len(proxy.requests) < asked + 20, "an open breaker asks for nothing but its probes"
    for key in new:
        assert store.offer(key, STATE)
    proxy.heal()
    until = time.monotonic() + BACK_WITHIN_S
    while loaded(store, old) < len(old):
        assert time.monotonic() < until
        time.sleep(0.01)  # Between two requests of the engine; a refused lookup costs nothing.
    while not store.flush(BACK_WITHIN_S):
        assert time.monotonic() < until
    assert faulty.tier().contains(new) == len(new), "what was taken meanwhile is written"
