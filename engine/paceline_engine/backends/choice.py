"""Which device an engine runs on, and its backend.

Imports no torch, so that a process with the simulated device never loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline_engine.backends.base import Backend, SizeBlocks
from paceline_engine.backends.threads import prepare_environment
from paceline_engine.config import EngineConfig
from paceline_engine.models.config import ModelConfig
from paceline_engine.records import replace


def settle_device(config: EngineConfig) -> EngineConfig:
    """The configuration with the device that "auto" comes to here. Raises ValueError where "cuda" can't be had.

    What only a GPU can do is refused for any other device.
    """
    device = config.device
    if device in ("auto", "cuda"):
        prepare_environment()
        from paceline_engine.backends.triton.device import fp8_problem, gpu_problem, is_interpreted

        problem = None if device == "cuda" and is_interpreted() else gpu_problem()
        if device == "cuda" and problem is not None:
            raise ValueError(f"--device cuda: {problem}")
        device = "cuda" if problem is None else "cpu"
        if device == "cuda" and config.kv_cache_dtype == "fp8" and (problem := fp8_problem()) is not None:
            raise ValueError(f"--kv-cache-dtype fp8: {problem}")
    if device != "cuda":
        for flag, is_asked in {
            f"--kv-cache-dtype {config.kv_cache_dtype}": config.kv_cache_dtype != "auto",
            f"--tensor-parallel-size {config.tensor_parallel_size}": config.tensor_parallel_size > 1,
        }.items():
            if is_asked:
                raise ValueError(f"{flag} needs GPUs, and this engine runs on {device}; leave it out")
    return replace(config, device=device)


def create_backend(
    config: EngineConfig, model: ModelConfig, weight_files: Sequence[Path], *, size: SizeBlocks, namespace_digest: str
) -> tuple[Backend, int, int]:
    """The backend that `config.device`, settled, names, loaded, with its number of blocks and its maximum length."""
    if config.device == "cuda":
        from paceline_engine.backends.triton.backend import TritonBackend

        backend = TritonBackend(config, model, weight_files, size=size, namespace_digest=namespace_digest)
        return backend, backend.num_blocks, backend.max_model_len
    num_blocks, max_model_len = size(None)
    if config.device == "simulated":
        from paceline_engine.backends.simulated import SimulatedBackend

        simulated = SimulatedBackend(
            vocab_size=model.vocab_size,
            seed=config.seed,
            eos_token_ids=model.eos_token_ids,
            alpha_ms=config.simulated_alpha_ms,
            beta_ms=config.simulated_beta_ms,
            hidden_size=model.hidden_size,
        )
        return simulated, num_blocks, max_model_len
    from paceline_engine.backends.cpu import CpuBackend

    cpu = CpuBackend(
        config,
        model,
        weight_files,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        namespace_digest=namespace_digest,
    )
    return cpu, num_blocks, max_model_len
