"""From a step plan to the index tensors that a paged model needs.

Block tables persist between steps and only grow by a step's new blocks, so the Python work of a step depends on the
number of sequences, never on the length of their contexts. Host side only; knows nothing of weights or KV contents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from paceline_engine.core.outputs import ScheduledRequest, StepPlan
from paceline_engine.core.spec import MAX_DRAFT_TOKENS

# Most tokens of a share that is attended to in a group with others, as decodes and verifications are; longer ones are
# prefill chunks.
MAX_SHORT_SHARE = MAX_DRAFT_TOKENS + 1

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScratchBlocks:
    """Blocks outside the pool that stand behind each row's own, for tokens that are computed before they are known."""

    first_id: int = 0
    num_per_row: int = 0

    def of_row(self, row: int) -> IntArray:
        """Ids of one row's scratch blocks."""
        begin = self.first_id + row * self.num_per_row
        return np.arange(begin, begin + self.num_per_row, dtype=np.int64)


class BlockTables:
    """One row of physical block ids for each running request."""

    def __init__(
        self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int, scratch: ScratchBlocks | None = None
    ) -> None:
        self.block_size = block_size
        self._scratch = scratch or ScratchBlocks()
        width = max_blocks_per_seq + self._scratch.num_per_row
        self._table: IntArray = np.zeros((max_num_seqs, width), dtype=np.int64)
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
                end = self._num_blocks[row]
                self._table[row, begin:end] = item.new_block_ids
                if self._scratch.num_per_row:
                    self._table[row, end : end + self._scratch.num_per_row] = self._scratch.of_row(row)

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
    """Neighbouring rows [begin, end) of the batch: equal short shares of sequences with contexts of similar length.

    A share is num_tokens rows: 1 to decode, more to verify guesses. block_ids [sequences, blocks] is padded. padding:
    flat indices into sequences x (blocks * block_size) of positions outside a sequence's context; mask
    [sequences, 1, num_tokens, positions] adds 0 where a token sees a position and -inf elsewhere.
    """

    begin: int
    end: int
    num_tokens: int
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


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A flat token batch: short shares first, by number of tokens and length of context, then prefill chunks.

    items: the shares in the batch's order. logits_rows: for each of samplers, the requests that sample, its last known
    token and its guesses; then the rows of `scored`, requests whose prompt tokens' logprobs are asked for, every token
    of their shares. embed_rows: the last token of each of embedders. Sequence s is rows [sequence_begins[s],
    sequence_begins[s + 1]); its blocks are block_tables[s], with stale entries past its own. Groups are made when first
    asked for, since not every attention wants them; that must be before the tables change.
    """

    items: tuple[ScheduledRequest, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logits_rows: torch.Tensor
    sequence_begins: torch.Tensor
    block_tables: torch.Tensor
    samplers: tuple[ScheduledRequest, ...]
    scored: tuple[ScheduledRequest, ...]
    embedders: tuple[ScheduledRequest, ...]
    embed_rows: torch.Tensor
    num_short: int
    rows: IntArray
    tables: BlockTables
    dtype: torch.dtype

    @cached_property
    def decodes(self) -> tuple[DecodeGroup, ...]:
        """Groups of short shares that are attended to together."""
        short = self.items[: self.num_short]
        return tuple(_decode_groups(short, self.rows[: self.num_short], self.tables, self.dtype))

    @cached_property
    def prefills(self) -> tuple[PrefillSequence, ...]:
        """The long shares."""
        ends: list[int] = self.sequence_begins[1:].tolist()
        return tuple(
            _prefill(self.items[index], ends[index], self.rows[index : index + 1], self.tables)
            for index in range(self.num_short, len(self.items))
        )


def build_batch(
    scheduled: Sequence[ScheduledRequest],
    tables: BlockTables,
    dtype: torch.dtype,
    is_scored: Callable[[ScheduledRequest], bool] = lambda _: False,
) -> Batch:
    """Index tensors of a step; `tables` must have been brought up to date with its plan."""
    short = [item for item in scheduled if item.num_tokens <= MAX_SHORT_SHARE]
    short.sort(key=lambda item: (item.num_tokens, item.end))
    items = short + [item for item in scheduled if item.num_tokens > MAX_SHORT_SHARE]
    rows = tables.rows(items)
    counts = np.array([item.num_tokens for item in items], dtype=np.int64)
    ends = np.cumsum(counts)
    positions = np.concatenate([np.arange(item.start, item.end, dtype=np.int64) for item in items])
    token_ids = np.concatenate([np.array(item.token_ids, dtype=np.int64) for item in items])
    samples = [index for index, item in enumerate(items) if item.sample]
    scored = [index for index, item in enumerate(items) if is_scored(item)]
    embedders = [index for index, item in enumerate(items) if item.embed]
    spans = [np.arange(ends[index] - items[index].num_draft_tokens - 1, ends[index]) for index in samples]
    spans += [np.arange(ends[index] - items[index].num_tokens, ends[index]) for index in scored]
    return Batch(
        items=tuple(items),
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(tables.slots(np.repeat(rows, counts), positions)),
        logits_rows=torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *spans])),
        sequence_begins=torch.from_numpy(np.concatenate([np.zeros(1, dtype=np.int64), ends])),
        block_tables=torch.from_numpy(tables.block_ids(rows, -(-max(item.end for item in items) // tables.block_size))),
        samplers=tuple(items[index] for index in samples),
        scored=tuple(items[index] for index in scored),
        embedders=tuple(items[index] for index in embedders),
        embed_rows=torch.from_numpy(ends[embedders] - 1),
        num_short=len(short),
        rows=rows,
        tables=tables,
        dtype=dtype,
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
    short: Sequence[ScheduledRequest], rows: IntArray, tables: BlockTables, dtype: torch.dtype
) -> list[DecodeGroup]:
    """Cut sorted shares where their size changes or the longest context would be over twice the shortest.

    So padding stays bounded, and the number of groups is one of sizes and lengths, not of sequences.
    """
    groups: list[DecodeGroup] = []
    first = 0
    begin = 0
    for index in range(1, len(short) + 1):
        if (
            index < len(short)
            and short[index].num_tokens == short[first].num_tokens
            and short[index].end <= 2 * short[first].end + tables.block_size
        ):
            continue
        group = _decode_group(short[first:index], begin, rows[first:index], tables, dtype)
        groups.append(group)
        first, begin = index, group.end
    return groups


def _decode_group(
    items: Sequence[ScheduledRequest], begin: int, rows: IntArray, tables: BlockTables, dtype: torch.dtype
) -> DecodeGroup:
    num_tokens = items[0].num_tokens
    lengths = np.array([item.end for item in items], dtype=np.int64)
    num_blocks = -(-int(lengths[-1]) // tables.block_size)
    positions = np.arange(num_blocks * tables.block_size)
    # Token i of a share sees num_tokens - 1 - i positions fewer than its last one.
    seen = lengths[:, None] - np.arange(num_tokens - 1, -1, -1)[None, :]
    outside = positions[None, None, :] >= seen[:, :, None]
    mask = torch.zeros(outside.shape, dtype=dtype).masked_fill_(torch.from_numpy(outside), -torch.inf)
    return DecodeGroup(
        begin=begin,
        end=begin + len(items) * num_tokens,
        num_tokens=num_tokens,
        block_ids=torch.from_numpy(tables.block_ids(rows, num_blocks)),
        padding=torch.from_numpy(np.flatnonzero(outside[:, -1])),
        mask=mask[:, None],
    )
