"""What the core loop asks of a device. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from paceline_engine.core.outputs import StepPlan, StepResult

if TYPE_CHECKING:
    from paceline_engine.core.kv_manager import SequenceStore
    from paceline_engine.prefix_store import CopiesChunks


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
