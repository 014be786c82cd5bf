"""Decode steps as CUDA graphs: one launch instead of hundreds, for a ladder of batch sizes.

A batch takes the next larger graph. Rows that are too many belong to no sequence: they write no KV, attend to
nothing, and nobody reads what comes out. Every graph reads the same input buffers and writes the same
logits, so memory doesn't grow with the ladder. On the CPU the same steps are run without a graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from paceline_engine.backends.triton.batch import DeviceBatch

Forward = Callable[[DeviceBatch], torch.Tensor]
_SMALL_SIZES, _STEP = (1, 2, 4), 8


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes of the graphs, smallest first: small ones apart, then every eighth, then max_num_seqs."""
    sizes = {*_SMALL_SIZES, *range(_STEP, max_num_seqs, _STEP), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeGraphs:
    """Graphs of `forward` [rows, vocab] float32 over batches of one token a sequence.

    choose_segments: parts that attention splits the keys into, for a batch size; a graph can't look at the contexts.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        max_num_seqs: int,
        max_blocks: int,
        vocab_size: int,
        device: torch.device,
        choose_segments: Callable[[int], int],
    ) -> None:
        self._forward = forward
        self._sizes = ladder(max_num_seqs)
        self._choose_segments = choose_segments
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        integers = {"dtype": torch.int32, "device": device}
        longs = {"dtype": torch.int64, "device": device}
        self._token_ids = torch.zeros(max_num_seqs, **longs)
        self._positions = torch.zeros(max_num_seqs, **longs)
        self._slots = torch.full((max_num_seqs,), -1, **longs)
        self._rows = torch.arange(max_num_seqs, **longs)
        self._begins = torch.arange(max_num_seqs + 1, **integers)
        self._context_lens = torch.zeros(max_num_seqs, **integers)
        self._block_tables = torch.zeros((max_num_seqs, max_blocks), **integers)
        self._logits = torch.zeros((max_num_seqs, vocab_size), dtype=torch.float32, device=device)

    def capture(self) -> None:
        """Record the graphs, the largest first, whose memory the others then share. On the CPU there is none."""
        if not self._logits.is_cuda:
            return
        pool = None
        for size in reversed(self._sizes):
            # The first run compiles kernels, which can't be recorded.
            self._step(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step(size)
            pool = pool or graph.pool()
            self._graphs[size] = graph

    def drop(self) -> None:
        """Forget the graphs: they know addresses that are about to change."""
        self._graphs.clear()

    def run(self, batch: DeviceBatch) -> torch.Tensor:
        """Logits [sequences, vocab] of a batch of one token a sequence; good until the next run."""
        count = batch.token_ids.shape[0]
        size = self._sizes[bisect_left(self._sizes, count)]
        self._token_ids[:count].copy_(batch.token_ids)
        self._positions[:count].copy_(batch.positions)
        self._slots[:count].copy_(batch.slots)
        self._context_lens[:count].copy_(batch.context_lens)
        self._block_tables[:count, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        if count < size:
            self._slots[count:size].fill_(-1)
            self._context_lens[count:size].fill_(0)
        graph = self._graphs.get(size)
        if graph is None:
            self._step(size)
        else:
            graph.replay()
        return self._logits[:count]

    @torch.inference_mode()
    def _step(self, size: int) -> None:
        batch = DeviceBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            begins=self._begins[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._block_tables[:size],
            logits_rows=self._rows[:size],
            max_query_len=1,
            num_segments=self._choose_segments(size),
        )
        self._logits[:size].copy_(self._forward(batch))
