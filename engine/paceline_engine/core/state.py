"""Everything that a scheduler's decisions depend on, as plain data between two steps.

A log of decisions is bounded, so it can't begin where the engine began; it begins with this. Restoring gives a
scheduler that decides as the first one will, whatever device it is driven with. Imports neither tensors nor I/O.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, get_type_hints

from paceline_engine.core.admission import SchedulerConfig
from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.kv_manager import KVManager, SequenceStore
from paceline_engine.core.prefix_cache import PrefixCache
from paceline_engine.core.request import Request
from paceline_engine.core.spec import ClassRecord, SpeculationConfig
from paceline_engine.core.stored_kv import StoredKV
from paceline_engine.core.stored_prefixes import LoadState, StoredPrefixes
from paceline_engine.records import Struct, require_msgspec

# Derived from the tokens, and made again when it is asked for.
_DERIVED = {"ngrams"}
_HINTS = get_type_hints(Request)
_STORED = [field.name for field in dataclasses.fields(Request) if field.name not in _DERIVED]


class SchedulerState(Struct, frozen=True, kw_only=True):
    """A scheduler between two steps.

    requests are in the order of arrival here; free_block_ids and cached_block_ids in the order in which they will be
    handed out. blocks_of: block ids by hash, the copy that a hit takes first. speed: the sums of the fit, prefill last.
    chunk_blocks: of the store that KV comes back from, 0 without one; max_load_wait_s and loads: its waits and loads.
    """

    config: SchedulerConfig
    speculation: SpeculationConfig
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    has_cache: bool
    has_store: bool
    asleep: bool
    adapters: dict[str, str]
    num_arrivals: int
    released: tuple[str, ...]
    requests: tuple[dict[str, Any], ...]
    free_block_ids: tuple[int, ...]
    cached_block_ids: tuple[int, ...]
    blocks_of: tuple[tuple[bytes, tuple[int, ...]], ...]
    speed: tuple[float, ...]
    guess_cost: float
    classes: tuple[ClassRecord, ...]
    batch_newest_arrival: int
    batch_num_places: int
    chunk_blocks: int
    max_load_wait_s: float
    loads: tuple[LoadState, ...]


@cache
def _request_state() -> Any:
    """A struct of a request's stored fields, for msgspec to check plain data against."""
    fields = [(name, _HINTS[name]) for name in _STORED]
    return require_msgspec("a scheduler's state").defstruct("RequestState", fields, frozen=True, kw_only=True)


def request_to_state(request: Request) -> dict[str, Any]:
    """A request's fields as plain data that MessagePack can carry. Raises RuntimeError without msgspec."""
    fields = {name: getattr(request, name) for name in _STORED}
    return require_msgspec("a scheduler's state").to_builtins(fields, builtin_types=(bytes,))


def request_from_state(state: dict[str, Any]) -> Request:
    """The request again. Raises RuntimeError without msgspec."""
    fields = require_msgspec("a scheduler's state").convert(state, _request_state(), builtin_types=(bytes,))
    return Request(**{name: getattr(fields, name) for name in _STORED})


def kv_from_state(state: SchedulerState, store: SequenceStore | None, stored: StoredKV | None) -> KVManager:
    """Block pool and prefix cache as they were, without loads. The stores are used if there were such."""
    held = [block_id for request in state.requests for block_id in request["block_ids"]]
    held += [block_id for load in state.loads for block_id in load.block_ids]
    marked = [block_id for _, copies in state.blocks_of for block_id in copies]
    pool = BlockPool.restored(state.num_blocks, state.free_block_ids, state.cached_block_ids, held, marked)
    cache = PrefixCache(pool, state.block_size) if state.has_cache else None
    if cache is not None:
        cache.restore(state.blocks_of)
    prefixes: StoredPrefixes | None = None
    if cache is not None and stored is not None and state.chunk_blocks:
        prefixes = StoredPrefixes(pool, cache, state.block_size, stored, state.chunk_blocks, state.max_load_wait_s)
    return KVManager(pool, state.block_size, store if state.has_store else None, cache, prefixes)
