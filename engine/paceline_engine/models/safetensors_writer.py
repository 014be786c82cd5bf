"""Writes a safetensors file tensor by tensor, so that a conversion holds one tensor in memory, not the model.

Format: 8-byte little-endian header length, JSON header, tensor bytes (github.com/huggingface/safetensors). The header
is padded so that data starts on a 64-byte boundary: readers map tensors in place. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

ALIGNMENT = 64


class TensorHeader(Protocol):
    """What the header says of one tensor."""

    @property
    def name(self) -> str:
        """Name in the file."""
        ...

    @property
    def dtype(self) -> str:
        """Type as safetensors writes it, such as F32."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, outermost first."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        ...


T = TypeVar("T", bound=TensorHeader)


def write_safetensors(
    path: Path,
    tensors: Sequence[T],
    values: Callable[[T], np.ndarray[Any, Any]],
    progress: Callable[[int, int], None],
) -> str:
    """Write `tensors` and return the hex digest of names, shapes, types and content.

    `values` gives one tensor's array; `progress` gets (bytes done, bytes in all). Raises OSError (disk full).
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    header: dict[str, Any] = {}
    total = 0
    for tensor in ordered:
        end = total + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [total, end]}
        total = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    digest = blake2b(text, digest_size=32, person=b"paceline-weights")
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            data = np.ascontiguousarray(values(tensor)).data.cast("B")
            if data.nbytes != tensor.num_bytes:
                raise ValueError(f"tensor {tensor.name} has {data.nbytes} bytes, its header says {tensor.num_bytes}")
            digest.update(data)
            file.write(data)
            done += data.nbytes
            progress(done, total)
    return digest.hexdigest()
