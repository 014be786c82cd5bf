"""What the core loop asks of a device, and how one is chosen.

Imports no torch, so that a process with the simulated device never loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from paceline_engine.backends.threads import prepare_environment
from paceline_engine.config import EngineConfig
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.models.config import ModelConfig
from paceline_engine.records import replace

if TYPE_CHECKING:
    from paceline_engine.core.kv_manager import SequenceStore
    from paceline_engine.tier_store import CopiesChunks


class Backend(Protocol):
    """A device with the model loaded and `num_blocks` KV blocks allocated. Calls come from one thread, in order."""

    def execute(self, plan: StepPlan) -> Sequence[StepResult]:
        """Run one step; one StepResult for each scheduled request with `sample`.

        Trouble with one request is that request's `error`; an exception means that the device can't go on.
        """
        ...

    @property
    def kv_store(self) -> SequenceStore | None:
        """Where preempted sequences' KV goes; None if it is recomputed."""
        ...

    @property
    def kv_store_bytes(self) -> int:
        """Bytes the store holds now."""
        ...

    @property
    def stats(self) -> dict[str, float]:
        """The device's own counters, by name; they only grow. Empty if it has none."""
        ...


class Launched(Protocol):
    """A step under way on a device."""

    def results(self) -> Sequence[StepResult]:
        """Wait for them. Steps must be waited for in the order of their launches."""
        ...


@runtime_checkable
class LaunchesAhead(Protocol):
    """A device that takes a step on top of one whose results nobody has seen yet."""

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step; returns before the device is done."""
        ...


@runtime_checkable
class UsesGpus(Protocol):
    """A device that is one GPU or more. Its `stats` may have the counters of `telemetry.step_counters`."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """CUDA's numbers of them."""
        ...


@runtime_checkable
class Closes(Protocol):
    """A device that has something to end before this process does."""

    def close(self) -> None:
        """No call follows."""
        ...


@runtime_checkable
class HoldsKV(Protocol):
    """A device whose KV may go to the key-value store and come back."""

    @property
    def chunk_copier(self) -> CopiesChunks | None:
        """What copies it; None if it is spread over several processes."""
        ...


@runtime_checkable
class CanDraft(Protocol):
    """A device that may make the guesses that `num_wanted_drafts` asks for."""

    @property
    def draft_cost(self) -> float | None:
        """Time of one guess over a step's; None if nothing here drafts."""
        ...


# (number of KV blocks, maximum length) for so many bytes of KV, where the configuration leaves them open.
SizeBlocks = Callable[[int | None], tuple[int, int]]


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
