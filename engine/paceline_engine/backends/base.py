"""What the core loop asks of a device, and how one is chosen.

Imports no torch, so that a process with the simulated device never loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from paceline_engine.backends.threads import prepare_environment
from paceline_engine.config import EngineConfig
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.models.config import ModelConfig

if TYPE_CHECKING:
    from paceline_engine.core.kv_manager import SequenceStore


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
class CanDraft(Protocol):
    """A device that may make the guesses that `num_wanted_drafts` asks for."""

    @property
    def draft_cost(self) -> float | None:
        """Time of one guess over a step's; None if nothing here drafts."""
        ...


def create_backend(
    config: EngineConfig,
    model: ModelConfig,
    weight_files: Sequence[Path],
    *,
    num_blocks: int,
    max_model_len: int,
    namespace_digest: str,
) -> Backend:
    """The backend that `config.device` names, loaded; "auto" is the CPU."""
    if config.device == "simulated":
        from paceline_engine.backends.simulated import SimulatedBackend

        return SimulatedBackend(
            vocab_size=model.vocab_size,
            seed=config.seed,
            eos_token_ids=model.eos_token_ids,
            alpha_ms=config.simulated_alpha_ms,
            beta_ms=config.simulated_beta_ms,
            hidden_size=model.hidden_size,
        )
    prepare_environment()
    from paceline_engine.backends.cpu import CpuBackend

    return CpuBackend(
        config,
        model,
        weight_files,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        namespace_digest=namespace_digest,
    )
