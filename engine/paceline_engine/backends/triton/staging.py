"""Between host and device without waiting: a step's arrays in one copy, its results in the background.

Pinned memory is torch's, whose allocator hands a block out again only when the copies that use it are done. So any
number of steps may be under way, and none overwrites what another's copy still reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Kernels are compiled anew for pointers that aren't multiples of it.
ALIGNMENT = 16

_TYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}

Array = npt.NDArray[Any]


def upload(arrays: Mapping[str, Array], device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors on the device with the arrays' names, shapes and types (int64, int32, float32), in one copy.

    Queued on the current stream; the arrays may change as soon as this returns. The tensors are parts of one block of
    memory that nobody else has. Raises TypeError for another type.
    """
    begins: dict[str, int] = {}
    size = 0
    for name, array in arrays.items():
        if array.dtype not in _TYPES:
            raise TypeError(f"{name} is {array.dtype}; only {', '.join(map(str, _TYPES))} go to the device")
        begins[name] = size
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = staged.numpy()
    for name, array in arrays.items():
        place = host[begins[name] : begins[name] + array.nbytes]
        np.copyto(place.view(array.dtype).reshape(array.shape), array)
    block = staged.to(device, non_blocking=True)
    return {name: _part(block, begins[name], array) for name, array in arrays.items()}


def _part(block: torch.Tensor, begin: int, array: Array) -> torch.Tensor:
    return block[begin : begin + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)


class Download:
    """Tensors on their way to the host, as they are when the current stream comes to it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # From a GPU this is pinned memory, without which the copy would be waited for.
        self._host = {name: tensor.to("cpu", non_blocking=True, copy=True) for name, tensor in tensors.items()}
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> dict[str, Array]:
        """The arrays, when all of them have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return {name: tensor.numpy() for name, tensor in self._host.items()}
