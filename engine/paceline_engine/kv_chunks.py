"""KV of tokens on its way between the pool's blocks and chunks of bytes, on any device.

A chunk is all layers of consecutive tokens, [layers, 2, tokens, kv_heads, head_dim], of 8-bit KV with the scales
[layers, 2, tokens, kv_heads, 1] behind it. Who has chunks copied keeps the blocks from being written meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from paceline_engine.paged_kv import PagedKV
from paceline_kvstore.arena import map_memory
from paceline_kvstore.codec import Buffer

logger = logging.getLogger(__name__)


class ChunkCopier:
    """Copies between the blocks of one pool and chunks. Safe to call from several threads, on blocks of their own."""

    def __init__(self, kv: PagedKV) -> None:
        self.block_size = kv.block_size
        self.device = kv.tensor.device
        # Torch moves bytes where it doesn't move numbers of 8 bits.
        tensor = kv.tensor if kv.scales is None else kv.tensor.view(torch.uint8)
        planes = [tensor.flatten(4), *(() if kv.scales is None else (kv.scales,))]
        self._slots = [plane.flatten(2, 3) for plane in planes]
        self._blocks = [plane.flatten(3) for plane in planes]
        self._local = threading.local()

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a chunk of that many tokens."""
        return sum(plane[:, :, :1].nbytes * num_tokens for plane in self._slots)

    def read(self, block_ids: Sequence[int], num_tokens: int) -> np.ndarray:
        """The chunk of the first `num_tokens` tokens in these blocks, as new bytes."""
        return self.read_later(block_ids, num_tokens)()

    def read_later(
        self, block_ids: Sequence[int], num_tokens: int, target: memoryview | None = None
    ) -> Callable[[], np.ndarray]:
        """Like `read`, but the blocks may change once this returns; the answer, for any thread, has the bytes.

        target: where they are written, of the chunk's size. On a GPU they leave it on a stream of their own, so that
        neither the steps nor this call wait for them.
        """
        planes, rows = self._rows(block_ids, 0, num_tokens)
        is_cuda = self.device.type == "cuda"
        if target is None:
            content = torch.empty(self.num_bytes(num_tokens), dtype=torch.uint8, pin_memory=is_cuda)
        else:
            content = torch.frombuffer(target, dtype=torch.uint8)
        parts = self._parts(planes, num_tokens, content)
        if not is_cuda:
            for plane, part in zip(planes, parts, strict=True):
                torch.index_select(plane, 2, rows, out=part)
            return content.numpy
        chosen = [plane.index_select(2, rows) for plane in planes]
        gathered = torch.cuda.Event()
        gathered.record()

        def fetch() -> np.ndarray:
            with torch.cuda.stream(self._stream()) as _:
                torch.cuda.current_stream().wait_event(gathered)
                for source, part in zip(chosen, parts, strict=True):
                    source.record_stream(torch.cuda.current_stream())
                    part.copy_(source, non_blocking=True)
                torch.cuda.current_stream().synchronize()
            return content.numpy()

        return fetch

    def allocate(self, num_bytes: int) -> Buffer:
        """Memory from which chunks are copied quickest: pinned for a GPU, where the system lets so much be."""
        memory = map_memory(num_bytes)
        if self.device.type == "cuda":
            address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
            problem = int(cast(Any, torch.cuda.cudart()).cudaHostRegister(address, num_bytes, 0))
            if problem:
                logger.warning("%d bytes can't be pinned (CUDA error %d): loads are slower", num_bytes, problem)
        return memory

    def write(self, block_ids: Sequence[int], num_tokens: int, payload: memoryview, skipped: int = 0) -> None:
        """Copy a chunk into the first `num_tokens` slots of these blocks, but the first `skipped`; done on return.

        ValueError if the payload isn't a chunk of that many tokens.
        """
        size = self.num_bytes(num_tokens)
        if payload.nbytes != size:
            raise ValueError(f"a chunk of {num_tokens} tokens has {size} bytes, not {payload.nbytes}")
        planes, rows = self._rows(block_ids, skipped, num_tokens)
        if self.device.type != "cuda":
            self._scatter(planes, rows, num_tokens, payload)
            return
        with torch.cuda.stream(self._stream()):
            self._scatter(planes, rows, num_tokens, payload)
            torch.cuda.current_stream().synchronize()

    def _scatter(self, planes: list[torch.Tensor], rows: torch.Tensor, num_tokens: int, payload: memoryview) -> None:
        # Torch has no read-only tensors; this one is only read.
        address = np.frombuffer(payload, dtype=np.uint8).ctypes.data
        content = torch.frombuffer((ctypes.c_uint8 * payload.nbytes).from_address(address), dtype=torch.uint8)
        for plane, part in zip(planes, self._parts(planes, num_tokens, content), strict=True):
            num_rows = part.shape[2]
            plane.index_copy_(2, rows, part[:, :, num_rows - len(rows) :].to(self.device, non_blocking=True))

    def _parts(self, planes: list[torch.Tensor], num_tokens: int, content: torch.Tensor) -> list[torch.Tensor]:
        """A chunk's bytes as what it has of each plane."""
        parts: list[torch.Tensor] = []
        begin = 0
        for plane in planes:
            num_rows = num_tokens * plane.shape[2] // self._slots[0].shape[2]
            shape = (*plane.shape[:2], num_rows, *plane.shape[3:])
            num_bytes = math.prod(shape) * plane.itemsize
            parts.append(content[begin : begin + num_bytes].view(plane.dtype).view(shape))
            begin += num_bytes
        return parts

    def _rows(self, block_ids: Sequence[int], begin: int, end: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Planes and the rows of them that hold tokens `begin` to `end`: blocks where these are whole, else slots."""
        size = self.block_size
        blocks = torch.tensor(block_ids, dtype=torch.int64)
        if begin % size == 0 and end % size == 0:
            return self._blocks, blocks[begin // size : end // size].to(self.device)
        positions = torch.arange(begin, end)
        return self._slots, (blocks[positions // size] * size + positions % size).to(self.device)

    def _stream(self) -> torch.cuda.Stream:
        """This thread's."""
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self.device)
        return self._local.stream
