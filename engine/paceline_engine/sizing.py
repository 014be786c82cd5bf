"""How many KV blocks fit, and how long a sequence may be. Pure."""

from __future__ import annotations

from paceline_engine.config import BYTES_PER_ELEMENT, KV_CACHE_BYTES, MIB, EngineConfig
from paceline_engine.models.config import ModelConfig


class SetupError(ValueError):
    """The configuration can't work for this model; the message says what to change."""


def size_blocks(config: EngineConfig, model: ModelConfig, kv_cache_bytes: int | None = None) -> tuple[int, int]:
    """(number of KV blocks, maximum length in tokens). Raises SetupError if the cache is too small for the length.

    Without a configured maximum it is the model's, or as much of it as fits in the cache. kv_cache_bytes: what there is
    where the configuration doesn't say.
    """
    kv_cache_bytes = config.kv_cache_bytes or kv_cache_bytes or KV_CACHE_BYTES
    token_bytes = model.kv_bytes_per_token(BYTES_PER_ELEMENT[config.kv_dtype], config.tensor_parallel_size)
    block_bytes = token_bytes * config.block_size
    num_blocks = kv_cache_bytes // block_bytes
    capacity = num_blocks * config.block_size
    wanted = config.max_model_len
    if wanted is not None and wanted > model.max_position_embeddings:
        raise SetupError(
            f"max-model-len {wanted} is beyond the model's {model.max_position_embeddings} positions; lower it"
        )
    # The last token's KV is never needed, so `capacity` + 1 would fit too; a round figure is easier to reason about.
    smallest = wanted if wanted is not None else 2
    if capacity < smallest:
        needed = -(-smallest // config.block_size) * block_bytes
        raise SetupError(
            f"the KV cache of {kv_cache_bytes} bytes holds {capacity} tokens, fewer than {smallest}; set "
            f"kv-cache-memory to at least {-(-needed // MIB)}Mi or lower max-model-len"
        )
    return num_blocks, wanted if wanted is not None else min(model.max_position_embeddings, capacity)
