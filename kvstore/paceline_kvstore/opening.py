"""From settings to a running store."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec

from paceline_kvstore.arena import Allocator, map_memory
from paceline_kvstore.config import BadSettings, NodeSettings, StoreSettings
from paceline_kvstore.crypto import read_key_file
from paceline_kvstore.encoding import Element, Encoding
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.estimate import Prior
from paceline_kvstore.policy.holds import NO_BOUND, Holds
from paceline_kvstore.s3.settings import S3Settings
from paceline_kvstore.tiered.level import Level, LevelOptions
from paceline_kvstore.tiered.store import PINS_MAX, ChunkEvent, TieredStore
from paceline_kvstore.tiers import DiskOptions, DiskTier, MemoryTier, Tier
from paceline_kvstore.tiers.encoded import EncodedTier
from paceline_kvstore.tiers.remote import RemoteOptions, RemoteTier
from paceline_kvstore.tiers.sealed import SealedTier, SealOptions
from paceline_kvstore.wire.tls import ClientTls

MEMORY, DISK, NODE, S3 = "memory", "disk", "node", "s3"

DISK_PRIOR = Prior(latency_s=2e-4, bandwidth=1e9)
NODE_PRIOR = Prior(latency_s=5e-4, bandwidth=2e9)
S3_PRIOR = Prior(latency_s=0.05, bandwidth=1e8)
"""What a read is taken to cost before there were any: a flash drive; this machine's memory over a socket; a busy object
store near by."""


def open_store(
    settings: StoreSettings,
    *,
    on_event: Callable[[ChunkEvent], None] | None = None,
    allocate: Allocator = map_memory,
    element: Element = Element.BYTES,
    pinned_bytes: int | None = None,
) -> TieredStore:
    """The store, with its threads and tiers; whoever opens it closes it.

    allocate: makes the memory tier's memory. element: what payloads are made of; the keys' namespace is
    `settings.namespace` of the model's. pinned_bytes: bound on what pins hold (None: `pinned_bytes_default`). Raises
    KVStoreError: FolderUnusable for the disk's folder, BadSettings for key and token files, else for what S3 needs and
    this machine has not.
    """
    encode, sealed = _encoder(settings, element), _sealer(settings)

    def seal(tier: Tier) -> Tier:
        return encode(sealed(tier))

    pins: Holds[ChunkKey] = Holds(PINS_MAX, pinned_bytes_default(settings) if pinned_bytes is None else pinned_bytes)
    levels: list[Level] = []

    def is_pinned(key: ChunkKey) -> bool:
        return pins.is_held(key, time.monotonic())

    try:
        if settings.memory is not None:
            levels.append(_memory(settings, settings.memory, allocate, is_pinned))
        if settings.disk is not None:
            levels.append(_disk(settings, seal, is_first=not levels, is_pinned=is_pinned))
        if settings.node is not None:
            levels.append(_node(settings.node, is_first=not levels))
        if settings.s3 is not None:
            levels.append(_s3(settings.s3, seal, is_first=not levels))
        return TieredStore(levels, mode=settings.reuse, pins=pins, on_event=on_event)
    except BaseException:
        for level in levels:
            level.close(time.monotonic())
        raise


def pinned_bytes_default(settings: StoreSettings) -> int:
    """Half of the smaller of memory and disk, so that pins leave room in both."""
    local = [settings.memory, None if settings.disk is None else settings.disk.capacity]
    return min((capacity // 2 for capacity in local if capacity is not None), default=NO_BOUND)


def _memory(
    settings: StoreSettings, capacity: int, allocate: Allocator, is_pinned: Callable[[ChunkKey], bool]
) -> Level:
    options = LevelOptions(
        name=MEMORY,
        is_immediate=True,
        ttl_s=settings.ttl,
        quotas=settings.tenant_quotas,
        default_quota=settings.default_quota,
    )
    return Level(MemoryTier(capacity, allocate, spared=is_pinned), options, spared=is_pinned)


def _sealer(settings: StoreSettings) -> Callable[[Tier], Tier]:
    """What makes a tier one whose payloads are sealed, if they are to be."""
    if settings.encryption_key_file is None:
        return lambda tier: tier
    if find_spec("cryptography") is None:
        raise BadSettings("encryptionKeyFile: it needs the package cryptography: pip install 'paceline[encryption]'")
    try:
        ring = read_key_file(settings.encryption_key_file)
    except ValueError as error:
        raise BadSettings(f"encryptionKeyFile: {error}") from None
    return lambda tier: SealedTier(tier, ring, SealOptions(ttl_s=settings.ttl))


def _encoder(settings: StoreSettings, element: Element) -> Callable[[Tier], Tier]:
    """What makes a tier one whose payloads are encoded, if they are to be."""
    form = settings.encoding
    if form is Encoding.NONE:
        return lambda tier: tier
    if form is Encoding.ZSTD and find_spec("zstandard") is None:
        raise BadSettings("encoding: zstd needs the package zstandard: pip install 'paceline[compression]'")
    if form.is_lossy and element is Element.BYTES:
        raise BadSettings(f"encoding: {form} is for KV in 16 or 32 bits, which this isn't: write zstd or none")
    return lambda tier: EncodedTier(tier, form, element)


def _disk(
    settings: StoreSettings, seal: Callable[[Tier], Tier], *, is_first: bool, is_pinned: Callable[[ChunkKey], bool]
) -> Level:
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
    tier = DiskTier(settings.disk.path, settings.disk.capacity, DiskOptions(ttl_s=settings.ttl, spared=is_pinned))
    return Level(seal(tier), options, spared=is_pinned)


def _node(settings: NodeSettings, *, is_first: bool) -> Level:
    token = ""
    if settings.token_file is not None:
        try:
            token = settings.token_file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadSettings(f"node.tokenFile: can't read {settings.token_file}: {error}: check the path") from None
    tls = None
    if settings.ca_file is not None:
        tls = ClientTls(settings.ca_file)
        try:
            tls.context()
        except OSError as error:
            raise BadSettings(f"node.caFile: can't use {settings.ca_file}: {error}: write a PEM file's path") from None
    options = LevelOptions(
        name=NODE,
        is_indexed=False,
        is_durable=True,
        is_shared=True,
        needs_second_offer=not is_first,
        prior=NODE_PRIOR,
    )
    remote = RemoteOptions(token=token, tls=tls, read_connections=options.readers, write_connections=options.writers)
    return Level(RemoteTier(settings.address, remote), options)


def _s3(settings: S3Settings, seal: Callable[[Tier], Tier], *, is_first: bool) -> Level:
    # boto3 is imported only where S3 is used.
    from paceline_kvstore.tiers.s3 import open_s3

    tier = seal(open_s3(settings))

    options = LevelOptions(
        name=S3,
        is_indexed=False,
        is_durable=True,
        is_shared=True,
        needs_second_offer=not is_first,
        readers=settings.read_workers,
        prior=S3_PRIOR,
    )
    return Level(tier, options)
