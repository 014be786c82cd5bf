"""The CPU as a device: compiled or torch's kernels, weights mapped from a file, KV in host memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from paceline_engine.backends.cpu_decoder import TORCH_DTYPES, create_decoder
from paceline_engine.backends.cpu_drafting import make_draft_model
from paceline_engine.backends.pages import release_pages
from paceline_engine.backends.threads import num_threads
from paceline_engine.backends.warm_up import measure_draft_cost, warm_up
from paceline_engine.config import EngineConfig
from paceline_engine.core.kv_manager import SequenceStore
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.drafting import num_scratch_blocks
from paceline_engine.grammar import Grammars
from paceline_engine.kv_chunks import ChunkCopier
from paceline_engine.kv_transfer import KVTransfer
from paceline_engine.models.config import ModelConfig
from paceline_engine.paged_kv import PagedKV
from paceline_engine.runner import ModelRunner
from paceline_kvstore.tiers.memory import MemoryTier


class CpuBackend:
    """Model, KV pool and the store of preempted sequences on the CPU."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        weight_files: Sequence[Path],
        *,
        num_blocks: int,
        max_model_len: int,
        namespace_digest: str,
    ) -> None:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(num_threads())
        self._quantization = config.quantization
        sizes = {"max_model_len": max_model_len, "threads": torch.get_num_threads()}
        self._decoder = create_decoder(config, model, weight_files, **sizes)
        drafts = config.speculative_method in ("draft", "selfDraft")
        scratch = num_scratch_blocks(config.max_num_seqs, config.block_size) if drafts else 0
        kv = PagedKV(model, num_blocks + scratch, config.block_size, TORCH_DTYPES[config.compute_dtype])
        self._grammars = Grammars(model.vocab_size, model.eos_token_ids)
        self._runner = ModelRunner(
            self._decoder,
            kv,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            grammars=self._grammars,
            lenience=config.speculative_lenience,
            draft_model=make_draft_model(config, self._decoder, kv, weight_files, **sizes),
            num_blocks=num_blocks,
        )
        self._tier = MemoryTier(config.kv_store_bytes)
        self._store = KVTransfer(kv, self._tier, namespace_digest) if config.kv_store_bytes else None
        warm_up(self._runner)
        self._draft_cost = measure_draft_cost(self._runner) if drafts else None

    @property
    def kv_store(self) -> SequenceStore | None:
        """The memory tier behind a transfer, or None if its size is 0."""
        return self._store

    @property
    def kv_store_bytes(self) -> int:
        """Bytes of offloaded KV, chunk headers included."""
        return self._tier.bytes_used

    @property
    def chunk_copier(self) -> ChunkCopier:
        """Copies KV between the pool and chunks."""
        return ChunkCopier(self._runner.kv)

    @property
    def draft_cost(self) -> float | None:
        """Time of one guess of one sequence over a step's, as measured at start; None if nothing drafts."""
        return self._draft_cost

    @property
    def stats(self) -> dict[str, float]:
        """Counters of constrained decoding."""
        return {f"grammar_{name}": value for name, value in asdict(self._grammars.stats).items()}

    def execute(self, plan: StepPlan) -> Sequence[StepResult]:
        """Run one step."""
        return self._runner.execute(plan)

    def release_kv(self) -> None:
        """Give the KV pool's memory back to the system; its address stays."""
        release_pages(self._runner.kv.tensor)

    def allocate_kv(self) -> None:
        """Nothing to do: pages come back when they are written."""

    @property
    def grammars(self) -> Grammars:
        """What loads the grammars that requests name."""
        return self._grammars

    def load_adapter(self, name: str, path: str) -> str:
        """Load or replace a LoRA adapter from a PEFT folder; the digest of its content. Raises ValueError."""
        if self._quantization != "none":
            raise ValueError(f"LoRA adapters need unquantized weights, not {self._quantization}: start without it")
        return self._decoder.adapters.load(name, Path(path))

    def unload_adapter(self, name: str) -> None:
        """Drop an adapter. Raises ValueError if it isn't loaded."""
        self._decoder.adapters.unload(name)
