"""A model and its KV on one device: all there is of it, or one rank's part.

Ranks make the same calls in the same order, so that each finds the others in every collective.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline_engine.backends.base import SizeBlocks
from paceline_engine.backends.triton.drafting import TORCH_DTYPES, Drafts, load_decoder
from paceline_engine.backends.triton.graphs import DecodeGraphs
from paceline_engine.backends.triton.inputs import LatestTokens
from paceline_engine.backends.triton.memory import GRAPHS_BYTES, MemoryProfile, kv_bytes, sampling_bytes
from paceline_engine.backends.triton.model import TritonModel
from paceline_engine.backends.triton.parallel import TensorParallel
from paceline_engine.backends.triton.ranks import Ranks
from paceline_engine.config import BYTES_PER_ELEMENT, MIB, EngineConfig
from paceline_engine.drafting import num_scratch_blocks
from paceline_engine.models.config import ModelConfig
from paceline_engine.paged_kv import PagedKV

logger = logging.getLogger(__name__)


class Resident:
    """Loaded, with KV allocated and decode steps recorded. latest, ranks: see `TritonModel`.

    Raises ValueError where the model and its KV don't fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        weight_files: Sequence[Path],
        *,
        device: torch.device,
        size: SizeBlocks,
        latest: LatestTokens | None = None,
        parallel: TensorParallel | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._config, self._device, self._parallel = config, device, parallel
        others = _bytes_of_others(device)
        loading = {"device": device, "max_model_len": config.max_model_len or model.max_position_embeddings}
        decoder = load_decoder(config, model, weight_files, parallel=parallel, **loading)
        has_drafter = config.speculative_method in ("draft", "selfDraft")
        self.drafts = Drafts(config, decoder, weight_files, **loading) if has_drafter else None
        self.model = TritonModel(decoder, device, latest, ranks=ranks, parallel=parallel)
        self._kv_heads = None if parallel is None else parallel.kv_heads_per_rank(model)
        self.num_blocks, self.max_model_len = size(self._memory_for_kv(model, others))
        self.kv = self._pool(model, self.num_blocks + self._num_scratch_blocks)
        self._graphs = self._record()

    def release_kv(self) -> None:
        """Give the KV pool's memory back; the recorded steps know its address, so they go too."""
        self.drop_graphs()
        self.kv.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def drop_graphs(self) -> None:
        """Forget the recorded steps. NCCL can't end while there are some with collectives in them."""
        if self._graphs is not None:
            self._graphs.drop()

    def allocate_kv(self) -> None:
        """Have the KV pool again, and record the steps over it."""
        self.kv.allocate()
        if self._graphs is not None:
            self._graphs.capture()

    @property
    def _num_scratch_blocks(self) -> int:
        return 0 if self.drafts is None else num_scratch_blocks(self._config.max_num_seqs, self._config.block_size)

    def _pool(self, model: ModelConfig, num_blocks: int) -> PagedKV:
        config = self._config
        kv_type = TORCH_DTYPES[config.kv_dtype]
        return PagedKV(model, num_blocks, config.block_size, kv_type, device=self._device, num_kv_heads=self._kv_heads)

    def _memory_for_kv(self, model: ModelConfig, others: int) -> int | None:
        """Bytes that the target's KV may have; None where the configuration says, or there is no card to ask."""
        config = self._config
        if config.kv_cache_bytes is not None or self._device.type != "cuda":
            return None
        kv = self._pool(model, -(-config.max_num_batched_tokens // config.block_size))
        # Loading took more than the weights where they were quantized.
        torch.cuda.reset_peak_memory_stats()
        self.model.largest_step(kv, config.max_num_batched_tokens, config.max_num_seqs)
        torch.cuda.synchronize()
        profile = MemoryProfile(
            total=torch.cuda.mem_get_info()[1], others=others, peak=torch.cuda.max_memory_allocated() - kv.tensor.nbytes
        )
        del kv
        torch.cuda.empty_cache()
        graphs = 0 if config.enforce_eager else GRAPHS_BYTES
        reserved = graphs + sampling_bytes(config.max_num_seqs, model.vocab_size)
        left = kv_bytes(profile, config.gpu_memory_utilization, reserved=reserved)
        left = left if self._parallel is None else self._parallel.smallest(left)
        logger.info("GPU memory: %d MiB in weights and activations, %d MiB for KV", profile.peak // MIB, left // MIB)
        element = BYTES_PER_ELEMENT[config.kv_dtype]
        token = model.kv_bytes_per_token(element)
        drafted = 0 if self.drafts is None else self.drafts.kv_bytes_per_token(element)
        left -= self._num_scratch_blocks * config.block_size * (token + drafted)
        return left * token // (token + drafted)

    def _record(self) -> DecodeGraphs | None:
        if self._config.enforce_eager:
            return None
        graphs = self.model.record_decodes(
            self.kv, max_num_seqs=self._config.max_num_seqs, max_model_len=self.max_model_len
        )
        graphs.capture()
        return graphs


def _bytes_of_others(device: torch.device) -> int:
    """Memory of the card that is in use before this process has any."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
