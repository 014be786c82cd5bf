"""From a configuration to a loaded core: sizes, identity, backend, scheduler.

Imports no torch itself; the chosen backend may.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial

from paceline_api.identity import NamespaceFields, namespace_digest
from paceline_engine.backends.base import Backend, CanDraft, HoldsKV
from paceline_engine.backends.choice import create_backend, settle_device
from paceline_engine.config import MIB, EngineConfig
from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.prefix_cache import PrefixCache
from paceline_engine.core.scheduler import Scheduler, SchedulerConfig
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.core.step_log import RecordingPrefixes, RecordingStore
from paceline_engine.core.stored_kv import num_chunk_blocks
from paceline_engine.core.stored_prefixes import StoredPrefixes
from paceline_engine.handoffs import Handoffs, open_handoffs
from paceline_engine.kv_borrower import BorrowedPrefixes
from paceline_engine.models.loader import LoadedModel, load_model_dir
from paceline_engine.prefix_store import PrefixStore
from paceline_engine.prefix_warm_up import WarmUp
from paceline_engine.sizing import SetupError, size_blocks
from paceline_kvstore.config import BadSettings, parse_settings
from paceline_kvstore.encoding import Element
from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.opening import open_store

# The disk refuses what is larger than a part of it, and evicts several chunks at once.
LEAST_CHUNKS = {"memory": 4, "disk": 32}
ELEMENTS = {"float32": Element.FLOAT32, "bfloat16": Element.BFLOAT16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A backend and the scheduler that feeds it. overlapped: plan the next step while the device makes the last.

    prefixes: where KV of prefixes is stored, to be closed in the end; handoffs as well, before it. warm_up: what is
    brought back first, if anything.
    """

    scheduler: Scheduler
    backend: Backend
    max_model_len: int
    namespace_digest: str
    overlapped: bool = False
    prefixes: PrefixStore | None = None
    handoffs: Handoffs = field(default_factory=open_handoffs)
    warm_up: WarmUp | None = None


def identity(config: EngineConfig, loaded: LoadedModel) -> str:
    """Hex namespace digest: everything but tokens and tenant that KV of this engine depends on."""
    model = loaded.config
    return namespace_digest(
        NamespaceFields(
            model=model.architecture,
            weights_digest=loaded.weights_digest,
            tokenizer_digest=loaded.tokenizer_digest,
            dtype=config.weights_dtype,
            kv_dtype=config.kv_dtype,
            block_size=config.block_size,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rope=model.numerics(),
            tensor_parallel_size=config.tensor_parallel_size,
        )
    )


def speculation(config: EngineConfig, backend: Backend) -> SpeculationConfig:
    """How to guess. Raises SetupError if the device is to draft and can't."""
    drafts = config.speculative_method in ("draft", "selfDraft")
    draft_cost = backend.draft_cost if isinstance(backend, CanDraft) else None
    if drafts and draft_cost is None:
        raise SetupError(
            f"this device doesn't draft (speculative-method {config.speculative_method}); use ngram or none"
        )
    return SpeculationConfig(
        method=config.speculative_method,
        num_tokens=config.speculative_num_tokens,
        draft_cost=draft_cost or 0.0 if drafts else 0.0,
        traffic_classes=config.speculative_traffic_classes,
    )


def open_prefixes(config: EngineConfig, backend: Backend, digest: str) -> PrefixStore | None:
    """The store of prefixes, if there is to be one. Raises SetupError with one line if it can't be had."""
    if not config.kv_store:
        return None
    try:
        settings = parse_settings(json.loads(config.kv_store))
    except (BadSettings, json.JSONDecodeError) as error:
        raise SetupError(f"KV store: {error}") from error
    copier = backend.chunk_copier if isinstance(backend, HoldsKV) else None
    if copier is None:
        raise SetupError(
            f"KV store: KV of {config.tensor_parallel_size} {config.device} devices can't be stored; leave it out"
        )
    chunk_tokens = num_chunk_blocks(config.block_size) * config.block_size
    capacities = {"memory": settings.memory, "disk": settings.disk.capacity if settings.disk is not None else None}
    for tier, capacity in capacities.items():
        least = LEAST_CHUNKS[tier] * copier.num_bytes(chunk_tokens)
        if capacity is not None and capacity < least:
            raise SetupError(
                f"KV store: {tier}.capacity: {capacity} bytes are too few for chunks of {chunk_tokens} tokens; give it "
                f"at least {-(-least // MIB)}Mi"
            )
    try:
        store = open_store(settings, allocate=copier.allocate, element=ELEMENTS.get(config.kv_dtype, Element.BYTES))
    except (KVStoreError, OSError) as error:
        raise SetupError(f"KV store: {error}") from error
    return PrefixStore(store, copier, settings.namespace(bytes.fromhex(digest)), chunk_tokens)


def build_core(config: EngineConfig) -> Core:
    """Load the model on the configured device. Raises ValueError with one line on anything that can't work."""
    loaded = load_model_dir(config.model_dir)
    config = settle_device(config)
    digest = identity(config, loaded)
    backend, num_blocks, max_model_len = create_backend(
        config,
        loaded.config,
        loaded.files,
        size=partial(size_blocks, config, loaded.config),
        namespace_digest=digest,
    )
    store = RecordingStore(backend.kv_store) if backend.kv_store is not None else None
    pool = BlockPool(num_blocks)
    cache = PrefixCache(pool, config.block_size, config.prefix_index) if config.enable_prefix_caching else None
    prefixes = open_prefixes(config, backend, digest)
    handoffs = open_handoffs()
    stored: StoredPrefixes | None = None
    warm_up: WarmUp | None = None
    if prefixes is not None and cache is not None:
        handoffs = open_handoffs(
            prefixes.store, prefixes.copier, prefixes.namespace, prefixes.chunk_tokens, config.kv_handoff_lease_s
        )
        chunk_blocks = num_chunk_blocks(config.block_size)
        found = RecordingPrefixes(BorrowedPrefixes(prefixes, handoffs.borrower))
        stored = StoredPrefixes(pool, cache, config.block_size, found, chunk_blocks)
        stored.lender = handoffs.lender
        if config.kv_warm_up_s:
            if prefixes.namespace.hex() != digest:
                raise SetupError("kv-store-warm-up: int8 and fp8 change what they keep: use encoding none or zstd")
            warm_up = WarmUp(prefixes, stored, config.kv_warm_up_s)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            max_model_len=max_model_len,
            max_num_waiting=config.max_num_waiting,
            max_preemptions=config.max_preemptions,
            scheduling_policy=config.scheduling_policy,
            batching=config.batching,
            batch_wait_s=config.batch_wait_ms / 1000.0,
            num_scheduler_steps=config.num_scheduler_steps,
        ),
        KVManager(pool, config.block_size, store, cache, stored),
        loaded.config.eos_token_ids,
        speculation(config, backend),
    )
    return Core(
        scheduler=scheduler,
        backend=backend,
        max_model_len=max_model_len,
        namespace_digest=digest,
        overlapped=config.device == "cuda" if config.async_scheduling is None else config.async_scheduling,
        prefixes=prefixes,
        handoffs=handoffs,
        warm_up=warm_up,
    )
