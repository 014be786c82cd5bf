"""From a step plan to the index tensors that a paged model needs.

Block tables persist between steps and only grow by a step's new blocks, so the Python work of a step depends on the
number of sequences, never on the length of their contexts. Host side only; knows nothing of weights or KV contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline_engine.core.outputs import ScheduledRequest, StepPlan

IntArray = npt.NDArray[np.int64]


class BlockTables:
    """One row of physical block ids for each running request."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self.block_size = block_size
        self._table: IntArray = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int64)
        self._num_blocks = [0] * max_num_seqs
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, plan: StepPlan) -> None:
        """Drop released rows, then add new rows and new blocks."""
        for request_id in plan.released:
            row = self._row_of.pop(request_id, None)
            if row is not None:
                self._free_rows.append(row)
        for admitted in plan.admitted:
            row = self._free_rows.pop()
            self._row_of[admitted.request_id] = row
            self._num_blocks[row] = 0
        for item in plan.scheduled:
            if item.new_block_ids:
                row = self._row_of[item.request_id]
                begin = self._num_blocks[row]
                self._num_blocks[row] = begin + len(item.new_block_ids)
                self._table[row, begin : self._num_blocks[row]] = item.new_block_ids

    def rows(self, items: Sequence[ScheduledRequest]) -> IntArray:
        """Row numbers of scheduled requests."""
        return np.array([self._row_of[item.request_id] for item in items], dtype=np.int64)

    def block_ids(self, rows: IntArray, num_blocks: int) -> IntArray:
        """[rows, num_blocks] ids; entries past a sequence's own blocks are stale and must be masked."""
        return self._table[rows, :num_blocks]

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Flat KV slot of each (row, position) pair: block id * block size + offset."""
        blocks = self._table[rows, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Neighbouring one-token rows [begin, end) of the batch with contexts of similar length.

    block_ids [rows, blocks] is padded. padding: flat indices into rows x (blocks * block_size) of positions outside a
    row's context; mask [rows, 1, 1, positions] adds 0 inside and -inf outside.
    """

    begin: int
    end: int
    block_ids: torch.Tensor
    padding: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSequence:
    """Rows [begin, end) of the batch: one sequence's chunk, whose first token stands at position `start`."""

    begin: int
    end: int
    start: int
    block_ids: torch.Tensor

    @property
    def context_len(self) -> int:
        """Tokens attended to by the chunk's last token."""
        return self.start + self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A flat token batch: decodes first, by length of context, then prefill chunks.

    samplers: the requests that sample, in the order of logits_rows.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logits_rows: torch.Tensor
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSequence, ...]
    samplers: tuple[ScheduledRequest, ...]


def build_batch(plan: StepPlan, tables: BlockTables, dtype: torch.dtype) -> Batch:
    """Index tensors of a step; `tables` must have been brought up to date with `plan`."""
    decodes = sorted((item for item in plan.scheduled if item.num_tokens == 1), key=lambda item: item.end)
    prefills = [item for item in plan.scheduled if item.num_tokens > 1]
    items = decodes + prefills
    rows = tables.rows(items)
    counts = np.array([item.num_tokens for item in items], dtype=np.int64)
    ends = np.cumsum(counts)
    positions = np.concatenate([np.arange(item.start, item.end, dtype=np.int64) for item in items])
    token_ids = np.concatenate([np.array(item.token_ids, dtype=np.int64) for item in items])
    samples = [index for index, item in enumerate(items) if item.sample]
    num_decodes = len(decodes)
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(tables.slots(np.repeat(rows, counts), positions)),
        logits_rows=torch.from_numpy(ends[samples] - 1),
        decodes=tuple(_decode_groups(decodes, rows[:num_decodes], tables, dtype)),
        prefills=tuple(
            _prefill(item, int(end), rows[index : index + 1], tables)
            for index, (item, end) in enumerate(zip(items, ends, strict=True))
            if index >= num_decodes
        ),
        samplers=tuple(items[index] for index in samples),
    )


def _prefill(item: ScheduledRequest, end: int, row: IntArray, tables: BlockTables) -> PrefillSequence:
    num_blocks = -(-item.end // tables.block_size)
    return PrefillSequence(
        begin=end - item.num_tokens,
        end=end,
        start=item.start,
        block_ids=torch.from_numpy(tables.block_ids(row, num_blocks)[0]),
    )


def _decode_groups(
    decodes: Sequence[ScheduledRequest], rows: IntArray, tables: BlockTables, dtype: torch.dtype
) -> list[DecodeGroup]:
    """Cut rows sorted by context length where the longest would be over twice the shortest: padding stays bounded."""
    groups: list[DecodeGroup] = []
    begin = 0
    for index in range(1, len(decodes) + 1):
        if index < len(decodes) and decodes[index].end <= 2 * decodes[begin].end + tables.block_size:
            continue
        lengths = np.array([item.end for item in decodes[begin:index]], dtype=np.int64)
        num_blocks = -(-int(lengths[-1]) // tables.block_size)
        outside = np.arange(num_blocks * tables.block_size)[None, :] >= lengths[:, None]
        mask = torch.zeros(outside.shape, dtype=dtype).masked_fill_(torch.from_numpy(outside), -torch.inf)
        groups.append(
            DecodeGroup(
                begin=begin,
                end=index,
                block_ids=torch.from_numpy(tables.block_ids(rows[begin:index], num_blocks)),
                padding=torch.from_numpy(np.flatnonzero(outside)),
                mask=mask[:, None, None, :],
            )
        )
        begin = index
    return groups
