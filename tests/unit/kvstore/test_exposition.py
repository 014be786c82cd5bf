"""A scrape of a store: every metric of the catalogue, with the numbers of its snapshot."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paceline_api.metrics import BY_NAME, KV_STORE
from paceline_kvstore.exposition import StoreCollector
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.metrics import snapshot
from paceline_kvstore.policy.reuse import Decision, Prefill
from paceline_kvstore.tiered.level import READ_SECONDS_BUCKETS, Level, LevelOptions
from paceline_kvstore.tiered.store import TieredStore
from paceline_kvstore.tiers import GuardedTier, MemoryTier

SECONDS = 10.0
KEY = ChunkKey(b"n" * 32, b"c" * 32, 16)


def test_every_metric_of_the_catalogue_is_in_a_scrape_and_has_the_stores_numbers() -> None:
    memory = Level(MemoryTier(1 << 20), LevelOptions(name="memory", is_immediate=True))
    remote = Level(GuardedTier(MemoryTier(1 << 20)), LevelOptions(name="s3", is_indexed=False))
    store = TieredStore([memory, remote])
    store.offer(KEY, bytes(1000))
    assert store.flush(SECONDS)
    memory.tier.clear()
    lookup = store.lookup([KEY], 100)
    assert lookup.wait(SECONDS)
    fetch = store.fetch(lookup.plan, SECONDS)
    assert fetch.wait(SECONDS)
    leases = [lease for _, lease in fetch.poll()]
    store.record(Decision(1, 100, 100, 0.0, 0.5, 1.0), 0.25, 100, Prefill(100.0))

    registry = CollectorRegistry()
    registry.register(StoreCollector(lambda: snapshot(store)))
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert set(families) == {metric.name for metric in KV_STORE}
    for name, family in families.items():
        assert family.type == BY_NAME[name].type
    value = registry.get_sample_value
    assert value("paceline_kvstore_hits_total", {"tier": "s3"}) == 1
    assert value("paceline_kvstore_read_bytes_total", {"tier": "s3"}) == 1000
    assert value("paceline_kvstore_read_seconds_count", {"tier": "s3"}) == 1
    assert value("paceline_kvstore_read_seconds_bucket", {"tier": "s3", "le": "30.0"}) == 1
    assert value("paceline_kvstore_lookups_total", {"tier": "s3"}) == 1
    assert value("paceline_kvstore_breaker_open", {"tier": "s3", "direction": "write"}) == 0
    assert value("paceline_kvstore_breaker_open", {"tier": "memory", "direction": "write"}) is None
    assert value("paceline_kvstore_leased_bytes") == 1000
    assert value("paceline_kvstore_saved_seconds_total", {"choice": "load"}) == 0.75
    for lease in leases:
        lease.release()
    store.close(SECONDS)


def test_the_buckets_of_a_scrape_are_those_of_the_catalogue() -> None:
    assert BY_NAME["paceline_kvstore_read_seconds"].buckets == READ_SECONDS_BUCKETS
