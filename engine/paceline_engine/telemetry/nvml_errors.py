"""NVML's error codes, by what they mean here: this can't be told, or the whole card is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

# NVML_ERROR_UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, LIB_RM_VERSION_MISMATCH, GPU_NOT_FOUND
_LOST = frozenset((1, 9, 15, 16, 18, 28))

T = TypeVar("T")


class DeviceLost(Exception):
    """The card doesn't answer any more, in the driver's words."""


class Supported:
    """Asks NVML: the answer, or None where there is none to be had. Raises DeviceLost."""

    def __init__(self, nvml: Any) -> None:
        self._error: type[Exception] = nvml.NVMLError

    def __call__(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except self._error as error:
            if getattr(error, "value", None) in _LOST:
                raise DeviceLost(str(error)) from error
            return None
