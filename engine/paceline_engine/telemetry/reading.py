"""What one GPU said at one moment, by the names of the metric catalogue. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Sample:
    """One value. name: of the catalogue. label: value of the metric's last label, where it has one beside the GPU's."""

    name: str
    value: float
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A GPU and its values. gpu: index as in nvidia-smi, INDEX:PART of a MIG device. up: whether the GPU answered.

    values: none unless it is up. counts: what this process has counted, which holds either way.
    """

    gpu: str
    uuid: str
    name: str
    up: bool
    values: tuple[Sample, ...] = ()
    counts: tuple[Sample, ...] = ()

    def down(self) -> Reading:
        """The same GPU, not answering."""
        return replace(self, up=False, values=())


class GpuReader(Protocol):
    """The GPUs of this engine."""

    def read(self) -> Sequence[Reading]:
        """One reading of each GPU; called by one thread at a time, and may take long."""
        ...


class NoTelemetry(Exception):
    """GPUs can't be read here, and won't be later: one line that says why."""
