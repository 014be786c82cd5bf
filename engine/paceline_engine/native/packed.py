"""Weights in the kernels' layout: packed once, then mapped from a file that all engines of a machine share.

A matrix W [columns, inner] becomes panels of PANEL columns, each the columns' values for k = 0, 1, ...; under a gate
the panel is half gates, half their ups. Norms and biases stand beside them in float32. A matrix that is to be float32
is packed in the narrowest format that holds each of its values exactly: one that came from a 4-bit or bfloat16
checkpoint is read from memory at its own size, and computes the same bits. The file appears by rename, complete or not
at all. Knows nothing of batches.
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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline_engine.models.config import ModelConfig
from paceline_engine.models.layers import LayerWeights, load_layer
from paceline_engine.models.weights import WeightFiles
from paceline_engine.native.library import FORMATS, PANEL

# Of the layout; a file of another version is not found, since the version is in its name.
VERSION = 3
ALIGNMENT = 64
MATRICES = ("qkv", "output", "gate_up", "down")
# That may hold a float32 matrix, the narrowest first.
EXACT_FORMATS = ("int4", "int8", "bfloat16", "float32")
Bytes = npt.NDArray[np.uint8]

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a tensor stands in the buffer, and its packed format; a vector's says nothing."""

    offset: int
    format: int


class Tensor(NamedTuple):
    """One tensor to pack: its name and format, its bytes and who writes them."""

    name: str
    format: int
    size: int
    write: Callable[[Bytes], None]


class PackedWeights:
    """Addresses of packed matrices and plain vectors by name, "LAYER.FIELD", "norm" and "head", in one buffer."""

    def __init__(self, index: dict[str, Place], buffer: Bytes) -> None:
        self._index = index
        self._buffer = buffer

    def address(self, name: str) -> int | None:
        """None where the model has no such tensor."""
        place = self._index.get(name)
        return None if place is None else self._buffer.ctypes.data + place.offset

    def format(self, name: str) -> int:
        """A matrix's format, a value of FORMATS."""
        return self._index[name].format


class Packer:
    """Packs a checkpoint with the library's threads; formats are the layers' and the head's, keys of FORMATS."""

    def __init__(
        self, library: ctypes.CDLL, config: ModelConfig, weights: WeightFiles, formats: tuple[str, str], threads: int
    ) -> None:
        self._library = library
        self._config = config
        self._weights = weights
        self._format, self._head_format = formats
        self._threads = threads
        self._found: dict[str, str] = {}

    def places(self, begin: int) -> tuple[dict[str, Place], int]:
        """Aligned places from offset `begin` on in the order of `fill`, and the end."""
        index: dict[str, Place] = {}
        for name, form, size, _ in self._tensors():
            begin = _aligned(begin)
            index[name] = Place(begin, form)
            begin += size
        return index, begin

    def fill(self, index: dict[str, Place], buffer: Bytes) -> None:
        """Write all tensors at their offsets."""
        for name, _, size, write in self._tensors():
            write(buffer[index[name].offset : index[name].offset + size])

    def _tensors(self) -> Iterator[Tensor]:
        config = self._config
        for layer in range(config.num_layers):
            weights = load_layer(self._weights, config, layer)
            for field in fields(LayerWeights):
                tensor = getattr(weights, field.name)
                if tensor is None:
                    continue
                if tensor.dim() == 1:
                    yield _vector(f"{layer}.{field.name}", tensor)
                else:
                    yield self._matrix(f"{layer}.{field.name}", tensor, self._format, field.name == "gate_up")
        yield _vector("norm", self._weights.take_norm("model.norm.weight", config.hidden_size, config.norm_offset))
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        shape = (config.vocab_size, config.hidden_size)
        yield self._matrix("head", self._weights.take(head, *shape), self._head_format, False)

    def _matrix(self, name: str, tensor: torch.Tensor, form: str, gated: bool) -> Tensor:
        columns, inner = tensor.shape
        source = np.ascontiguousarray(tensor.float().numpy())
        order = panel_order(columns, gated)
        matrix = (source.ctypes.data, order.ctypes.data, columns, inner)
        if form == "float32":
            if name not in self._found:
                self._found[name] = next(
                    exact
                    for exact in EXACT_FORMATS
                    if self._library.paceline_holds(FORMATS[exact], *matrix, self._threads)
                )
            form = self._found[name]

        def write(target: Bytes, kept: object = (source, order)) -> None:
            self._library.paceline_pack(FORMATS[form], *matrix, target.ctypes.data, self._threads)

        return Tensor(name, FORMATS[form], self._library.paceline_packed_bytes(FORMATS[form], columns, inner), write)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _vector(name: str, tensor: torch.Tensor) -> Tensor:
    values = tensor.float().numpy()
    return Tensor(
        name, FORMATS["float32"], values.nbytes, lambda target: target.__setitem__(slice(None), values.view(np.uint8))
    )


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


def pack_in_memory(packer: Packer) -> PackedWeights:
    """Packed weights of this process alone."""
    index, size = packer.places(0)
    # Anonymous pages are zero and start on a page boundary.
    buffer = np.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=np.uint8)
    packer.fill(index, buffer)
    return PackedWeights(index, buffer)


def open_or_pack(path: Path, make_packer: Callable[[], Packer]) -> PackedWeights:
    """Map `path`, after writing it if it isn't there. Raises OSError where it can't be written."""
    if not path.is_file():
        packer = make_packer()
        _write(path, packer)
    buffer = np.memmap(path, dtype=np.uint8, mode="r")
    length = int.from_bytes(buffer[:8].tobytes(), "little")
    index = json.loads(buffer[8 : 8 + length].tobytes())
    return PackedWeights({name: Place(*place) for name, place in index.items()}, buffer)


def _write(path: Path, packer: Packer) -> None:
    # The header's own length depends on the offsets: the tensors begin behind it only if enough is left free.
    index, end = packer.places(0)
    reserved = _aligned(4096 + sum(len(name) + 48 for name in index))
    index = {name: Place(place.offset + reserved, place.format) for name, place in index.items()}
    size = end + reserved
    logger.info("packing the weights for this CPU's kernels: %s (%d MiB)", path, size >> 20)
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
