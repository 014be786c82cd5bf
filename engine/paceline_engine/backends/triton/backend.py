"""The GPU backend: a resident model, its sampler and runner, and the other ranks where the model is spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline_engine.backends.base import SizeBlocks
from paceline_engine.backends.triton.device import is_interpreted
from paceline_engine.backends.triton.ranks import Kind
from paceline_engine.backends.triton.resident import Resident
from paceline_engine.backends.triton.sampler import TritonSampler
from paceline_engine.backends.triton.sampler_warm_up import warm_up_sampler
from paceline_engine.backends.triton.sharding import check_size
from paceline_engine.backends.triton.timing import step_timer
from paceline_engine.backends.warm_up import compile_kernels, measure_draft_cost, warm_up
from paceline_engine.config import EngineConfig
from paceline_engine.core.kv_manager import SequenceStore
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.grammar import Grammars
from paceline_engine.kv_chunks import ChunkCopier
from paceline_engine.kv_transfer import KVTransfer
from paceline_engine.models.config import ModelConfig
from paceline_engine.runner import Launched, ModelRunner
from paceline_kvstore.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from paceline_engine.backends.triton.workers import Workers


class TritonBackend:
    """Model, KV pool and sampler on a GPU; under Triton's interpreter on the CPU, which is slow and for tests.

    Raises ValueError where the model and its KV don't fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        weight_files: Sequence[Path],
        *,
        size: SizeBlocks,
        namespace_digest: str,
    ) -> None:
        self._config = config
        self._workers = _start_workers(config, model) if config.tensor_parallel_size > 1 else None
        device = torch.device("cpu" if is_interpreted() else "cuda")
        spread: dict[str, Any] = {}
        if self._workers is not None:
            device = self._workers.device
            spread = {"parallel": self._workers.parallel, "ranks": self._workers.ranks}
        self.gpus = () if device.type != "cuda" else tuple(range(config.tensor_parallel_size))
        self._timer = step_timer(device, groups=("tp",) if self._workers is not None else ())
        if self._workers is not None:
            self._workers.parallel.span = partial(self._timer.span, "tp")
        sampler = TritonSampler(model.vocab_size, config.max_num_seqs, device, config.speculative_lenience)
        self._resident = Resident(config, model, weight_files, device=device, size=size, latest=sampler, **spread)
        self.num_blocks, self.max_model_len = self._resident.num_blocks, self._resident.max_model_len
        self._grammars = Grammars(model.vocab_size, model.eos_token_ids)
        kv, drafts = self._resident.kv, self._resident.drafts
        self._runner = ModelRunner(
            self._resident.model,
            kv,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            grammars=self._grammars,
            lenience=config.speculative_lenience,
            draft_model=None if drafts is None else drafts.over(kv),
            num_blocks=self.num_blocks,
            sampler=sampler,
            around_launch=lambda plan: self._timer.step(had_work=len(plan.scheduled) > len(plan.admitted)),
        )
        self._tier = MemoryTier(config.kv_store_bytes)
        has_store = config.kv_store_bytes > 0 and self._workers is None
        self._store = KVTransfer(kv, self._tier, namespace_digest) if has_store else None
        warm_up(self._runner)
        if self.gpus:
            warm_up_sampler(sampler, model.vocab_size, device)
            compile_kernels(self._runner, most_tokens=self._longest_share())
        self._draft_cost = None if drafts is None else measure_draft_cost(self._runner)

    @property
    def kv_store(self) -> SequenceStore | None:
        """The memory tier behind a transfer, or None if its size is 0 or the model is spread: KV is recomputed then."""
        return self._store

    @property
    def kv_store_bytes(self) -> int:
        """Bytes of offloaded KV, chunk headers included."""
        return self._tier.bytes_used

    @property
    def chunk_copier(self) -> ChunkCopier | None:
        """Copies KV between the pool and chunks; None if the model is spread, and the pool with it."""
        return ChunkCopier(self._resident.kv) if self._workers is None else None

    @property
    def draft_cost(self) -> float | None:
        """Time of one guess of one sequence over a step's, as measured at start; None if nothing drafts."""
        return self._draft_cost

    @property
    def stats(self) -> dict[str, float]:
        """Counters of constrained decoding, and of sampled steps' time on the GPU."""
        return {f"grammar_{name}": value for name, value in asdict(self._grammars.stats).items()} | self._timer.stats

    @property
    def grammars(self) -> Grammars:
        """What loads the grammars that requests name."""
        return self._grammars

    def execute(self, plan: StepPlan) -> Sequence[StepResult]:
        """Run one step and wait for it."""
        return self._runner.execute(plan)

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step, on top of the last one if that isn't done. A plan of several steps is waited for."""
        if any(item.num_steps > 1 for item in plan.scheduled):
            results = self._runner.execute(plan)
            return Launched(lambda: results)
        return self._runner.launch(plan)

    def release_kv(self) -> None:
        """Give the KV pool's memory back."""
        self._tell(Kind.SLEEP)
        self._resident.release_kv()

    def allocate_kv(self) -> None:
        """Have the KV pool again."""
        self._tell(Kind.WAKE)
        self._resident.allocate_kv()

    def close(self) -> None:
        """End the other ranks, where there are some."""
        if self._workers is not None:
            self._resident.drop_graphs()
            self._workers.close()

    def _longest_share(self) -> int:
        """Tokens of one request in one step."""
        config = self._config
        room = min(self.max_model_len, self.num_blocks * config.block_size)
        return min(config.prefill_chunk_tokens, config.max_num_batched_tokens, room)

    def _tell(self, kind: Kind) -> None:
        if self._workers is not None:
            self._workers.ranks.send(kind)

    def load_adapter(self, name: str, path: str) -> str:
        """Load or replace a LoRA adapter from a PEFT folder; the digest of its content. Raises ValueError."""
        if self._config.quantization != "none":
            raise ValueError(
                f"LoRA adapters need unquantized weights, not {self._config.quantization}: start without it"
            )
        return self._resident.model.adapters.load(name, Path(path))

    def unload_adapter(self, name: str) -> None:
        """Drop an adapter. Raises ValueError if it isn't loaded."""
        self._resident.model.adapters.unload(name)


def _start_workers(config: EngineConfig, model: ModelConfig) -> Workers:
    """The other ranks of a spread model. Raises ValueError that names what doesn't work on several GPUs.

    All that can be known is said before there are processes, which would fail as well and end this one.
    """
    check_size(model, config.tensor_parallel_size, config.quantization)
    if config.speculative_method in ("draft", "selfDraft"):
        raise ValueError(
            f"--speculative-method {config.speculative_method} doesn't work with --tensor-parallel-size "
            f"{config.tensor_parallel_size} yet; use ngram or none"
        )
    # What the ranks' configuration is sent with isn't there on every machine with one GPU.
    from paceline_engine.backends.triton.workers import Workers

    return Workers(config)
