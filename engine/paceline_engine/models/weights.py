"""Checkpoint tensors by name, straight from memory-mapped safetensors files.

A mapped tensor costs no copy and its pages are shared by all engines on a machine; only what must be fused or converted
is copied. Imports no model code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open


class WeightsError(ValueError):
    """A checkpoint can't be used; the message says which file or tensor and why."""


class WeightFiles:
    """All tensors of a checkpoint's safetensors files, converted to `dtype` when taken."""

    def __init__(self, files: Sequence[Path], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._file_of: dict[str, Any] = {}
        if not files:
            raise WeightsError("the model folder has no *.safetensors file")
        for path in files:
            try:
                handle = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"can't read weights from {path}: {error}") from error
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle isn't iterable
                self._file_of[name] = handle

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name`, which must have `shape`; a view of the file unless its dtype differs."""
        return self._read(name, shape).to(self._dtype)

    def take_norm(self, name: str, size: int, offset: float) -> torch.Tensor:
        """A norm's weight [size] plus `offset`, summed in float32."""
        if not offset:
            return self.take(name, size)
        return (self._read(name, (size,)).float() + offset).to(self._dtype)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor: torch.Tensor = self._handle(name).get_tensor(name)
        _check_shape(name, tuple(tensor.shape), shape)
        return tensor

    def _read_part(self, name: str, shape: tuple[int, ...], dimension: int, begin: int, end: int) -> torch.Tensor:
        """Places [begin, end) in dimension 0 or 1 of the tensor `name`, which must have `shape`; reads no other."""
        stored = self._handle(name).get_slice(name)
        _check_shape(name, tuple(stored.get_shape()), shape)
        return stored[begin:end] if dimension == 0 else stored[:, begin:end]

    def _handle(self, name: str) -> Any:
        handle = self._file_of.get(name)
        if handle is None:
            raise WeightsError(f"the checkpoint has no tensor {name!r}")
        return handle


def _check_shape(name: str, shape: tuple[int, ...], implied: tuple[int, ...]) -> None:
    if shape != implied:
        raise WeightsError(f"tensor {name!r} has shape {shape}, the configuration implies {implied}")
