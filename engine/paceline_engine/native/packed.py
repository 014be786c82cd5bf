"""Weights in the kernels' layout: packed once, then mapped from a file that all engines of a machine share.

A matrix W [columns, inner] becomes panels of PANEL columns, each the columns' values for k = 0, 1, ...; under a gate
the panel is half gates, half their ups. Norms and biases stand beside them in float32. The file appears by rename,
complete or not at all. Knows nothing of batches.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from paceline_engine.models.config import ModelConfig
from paceline_engine.models.layers import LayerWeights, load_layer
from paceline_engine.models.weights import WeightFiles
from paceline_engine.native.library import FORMATS, PANEL

# Of the layout; a file of another version is not found, since the version is in its name.
VERSION = 2
ALIGNMENT = 64
MATRICES = ("qkv", "output", "gate_up", "down")
Bytes = npt.NDArray[np.uint8]

logger = logging.getLogger(__name__)


class PackedWeights:
    """Addresses of packed matrices and plain vectors by name, "LAYER.FIELD", "norm" and "head", in one buffer."""

    def __init__(self, index: dict[str, int], buffer: Bytes) -> None:
        self._index = index
        self._buffer = buffer

    def address(self, name: str) -> int | None:
        """None where the model has no such tensor."""
        offset = self._index.get(name)
        return None if offset is None else self._buffer.ctypes.data + offset


class Packer:
    """Packs a checkpoint into one format with the library's threads."""

    def __init__(
        self, library: ctypes.CDLL, config: ModelConfig, weights: WeightFiles, formats: tuple[str, str], threads: int
    ) -> None:
        self._library = library
        self._config = config
        self._weights = weights
        self._format, self._head_format = formats
        self._threads = threads

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor, in the order of `fill`."""
        return {name: size for name, size, _ in self._tensors()}

    def fill(self, index: dict[str, int], buffer: Bytes) -> None:
        """Write all tensors at their offsets."""
        for name, size, write in self._tensors():
            write(buffer[index[name] : index[name] + size])

    def _tensors(self) -> Iterator[tuple[str, int, Callable[[Bytes], None]]]:
        config = self._config
        for layer in range(config.num_layers):
            weights = load_layer(self._weights, config, layer)
            for field in fields(LayerWeights):
                tensor = getattr(weights, field.name)
                if tensor is not None:
                    yield self._tensor(f"{layer}.{field.name}", tensor, self._format, field.name == "gate_up")
        yield self._tensor(
            "norm", self._weights.take_norm("model.norm.weight", config.hidden_size, config.norm_offset), "", False
        )
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        shape = (config.vocab_size, config.hidden_size)
        yield self._tensor("head", self._weights.take(head, *shape), self._head_format, False)

    def _tensor(
        self, name: str, tensor: torch.Tensor, form: str, gated: bool
    ) -> tuple[str, int, Callable[[Bytes], None]]:
        if tensor.dim() == 1:
            values = tensor.float().numpy()
            return name, values.nbytes, lambda target: target.__setitem__(slice(None), values.view(np.uint8))
        columns, inner = tensor.shape
        size = self._library.paceline_packed_bytes(FORMATS[form], columns, inner)

        def write(target: Bytes) -> None:
            source = np.ascontiguousarray(tensor.float().numpy())
            order = panel_order(columns, gated)
            self._library.paceline_pack(
                FORMATS[form],
                source.ctypes.data,
                order.ctypes.data,
                columns,
                inner,
                target.ctypes.data,
                self._threads,
            )

        return name, size, write


def panel_order(columns: int, gated: bool) -> npt.NDArray[np.int64]:
    """[panels * PANEL]: which row of W stands in each column of each panel, -1 for padding.

    Gated: W is all gates, then all ups; a panel holds PANEL / 2 gates, then the ups that belong to them.
    """
    width = PANEL // 2 if gated else PANEL
    count = columns // 2 if gated else columns
    order = np.full((-(-count // width), width), -1, dtype=np.int64)
    order.reshape(-1)[:count] = np.arange(count)
    if gated:
        order = np.concatenate((order, np.where(order < 0, -1, order + count)), axis=1)
    return np.ascontiguousarray(order.reshape(-1))


def offsets(sizes: dict[str, int], begin: int) -> tuple[dict[str, int], int]:
    """Aligned offsets from `begin` on, and the end."""
    index: dict[str, int] = {}
    for name, size in sizes.items():
        begin = -(-begin // ALIGNMENT) * ALIGNMENT
        index[name] = begin
        begin += size
    return index, begin


def pack_in_memory(packer: Packer) -> PackedWeights:
    """Packed weights of this process alone."""
    index, size = offsets(packer.sizes(), 0)
    # Anonymous pages are zero and start on a page boundary.
    buffer = np.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=np.uint8)
    packer.fill(index, buffer)
    return PackedWeights(index, buffer)


def open_or_pack(path: Path, make_packer: Callable[[], Packer]) -> PackedWeights:
    """Map `path`, after writing it if it isn't there. Raises OSError where it can't be written."""
    if not path.is_file():
        packer = make_packer()
        sizes = packer.sizes()
        logger.info("packing the weights for this CPU's kernels: %s (%d MiB)", path, sum(sizes.values()) >> 20)
        _write(path, sizes, packer)
    buffer = np.memmap(path, dtype=np.uint8, mode="r")
    length = int.from_bytes(buffer[:8].tobytes(), "little")
    return PackedWeights(json.loads(buffer[8 : 8 + length].tobytes()), buffer)


def _write(path: Path, sizes: dict[str, int], packer: Packer) -> None:
    # The header's own length depends on the offsets, so its place is reserved generously.
    reserved = 4096 + sum(len(name) + 32 for name in sizes)
    index, size = offsets(sizes, reserved)
    header = json.dumps(index).encode()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            # A full disk is an error here; later it would be a signal.
            os.posix_fallocate(file.fileno(), 0, size)
        buffer = np.memmap(temporary, dtype=np.uint8, mode="r+")
        buffer[:8] = np.frombuffer(len(header).to_bytes(8, "little"), dtype=np.uint8)
        buffer[8 : 8 + len(header)] = np.frombuffer(header, dtype=np.uint8)
        packer.fill(index, buffer)
        buffer.flush()
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def packed_name(config: ModelConfig, files: Sequence[Path], formats: tuple[str, str]) -> str:
    """File name for packed weights: a digest over what tells one packing from another."""
    digest = blake2b(digest_size=12, person=b"paceline-packed")
    digest.update(repr((VERSION, PANEL, formats, sorted(asdict(config).items()))).encode())
    for file in files:
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return f"packed-{formats[0]}-{digest.hexdigest()}.bin"
