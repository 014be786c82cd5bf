"""From settings to a running store."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline_kvstore.arena import Allocator, map_memory
from paceline_kvstore.config import StoreSettings
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.estimate import Prior
from paceline_kvstore.policy.holds import Holds
from paceline_kvstore.tiered.level import Level, LevelOptions
from paceline_kvstore.tiered.store import PINS_MAX, ChunkEvent, TieredStore
from paceline_kvstore.tiers import DiskOptions, DiskTier, MemoryTier

MEMORY, DISK, S3 = "memory", "disk", "s3"

DISK_PRIOR = Prior(latency_s=2e-4, bandwidth=1e9)
S3_PRIOR = Prior(latency_s=0.05, bandwidth=1e8)
"""What a read is taken to cost before there were any: a flash drive; a busy object store near by."""


def open_store(
    settings: StoreSettings,
    *,
    on_event: Callable[[ChunkEvent], None] | None = None,
    allocate: Allocator = map_memory,
) -> TieredStore:
    """The store, with its threads and tiers; whoever opens it closes it.

    allocate: makes the memory tier's memory. Raises KVStoreError: FolderUnusable for the disk's folder, else for what
    S3 needs and this machine has not.
    """
    pins: Holds[ChunkKey] = Holds(PINS_MAX)
    levels: list[Level] = []
    try:
        if settings.memory is not None:
            levels.append(_memory(settings, settings.memory, allocate))
        if settings.disk is not None:
            levels.append(_disk(settings, is_first=not levels, pins=pins))
        if settings.s3 is not None:
            levels.append(_s3(settings, is_first=not levels))
        return TieredStore(levels, mode=settings.reuse, pins=pins, on_event=on_event)
    except BaseException:
        for level in levels:
            level.close(time.monotonic())
        raise


def _memory(settings: StoreSettings, capacity: int, allocate: Allocator) -> Level:
    options = LevelOptions(
        name=MEMORY,
        is_immediate=True,
        ttl_s=settings.ttl,
        quotas=settings.tenant_quotas,
        default_quota=settings.default_quota,
    )
    return Level(MemoryTier(capacity, allocate), options)


def _disk(settings: StoreSettings, *, is_first: bool, pins: Holds[ChunkKey]) -> Level:
    assert settings.disk is not None
    options = LevelOptions(
        name=DISK,
        is_durable=True,
        needs_second_offer=not is_first,
        readers=8,
        prior=DISK_PRIOR,
        quotas=settings.tenant_quotas,
        default_quota=settings.default_quota,
    )
    disk_options = DiskOptions(ttl_s=settings.ttl, spared=lambda key: pins.is_held(key, time.monotonic()))
    return Level(DiskTier(settings.disk.path, settings.disk.capacity, disk_options), options)


def _s3(settings: StoreSettings, *, is_first: bool) -> Level:
    assert settings.s3 is not None
    # boto3 is imported only where S3 is used.
    from paceline_kvstore.tiers.s3 import open_s3

    options = LevelOptions(
        name=S3,
        is_indexed=False,
        is_durable=True,
        needs_second_offer=not is_first,
        takes_deadline=True,
        readers=settings.s3.read_workers,
        prior=S3_PRIOR,
    )
    return Level(open_s3(settings.s3), options)
