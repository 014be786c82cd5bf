"""Guesses for the next step from a device-side drafter: a small model, or the target itself made cheaper.

A drafter follows the target: it has the same tokens at the same block ids, so there's one allocation and one table for
both. What it computes for the newest token and its own guesses is transient, and may lie beyond a sequence's blocks, in
a few scratch blocks of each row. Wrong or missing drafter KV costs acceptance, never correctness: guesses are drawn
from the distribution that `Drafts` hands to the verification, whatever it is.

Cheaper is fewer layers (Zhang et al., "Draft & Verify", arXiv 2309.08168) or weights of fewer bits; the KV is then the
target's own, which verification writes anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline_engine.batch import BlockTables, ScratchBlocks, build_batch
from paceline_engine.core.outputs import ScheduledRequest, StepPlan
from paceline_engine.core.spec import MAX_DRAFT_TOKENS
from paceline_engine.paged_kv import PagedKV
from paceline_engine.paged_model import PagedModel
from paceline_engine.sampling.noise import Float32Array, Stream
from paceline_engine.sampling.row import Row
from paceline_engine.sampling.sampler import Sampler, distribution
from paceline_engine.sampling.speculation import Drafts


def num_scratch_blocks(max_num_seqs: int, block_size: int) -> int:
    """Blocks beyond the block pool's that a drafter's KV must have."""
    return max_num_seqs * -(-MAX_DRAFT_TOKENS // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """What drafts. kv: [num_blocks of the pool + num_scratch_blocks]; shares_kv: it is the target's own."""

    decoder: PagedModel
    kv: PagedKV
    shares_kv: bool


class Drafter:
    """Keeps a draft model in step with the target and asks it for guesses."""

    def __init__(
        self, model: DraftModel, sampler: Sampler, *, num_blocks: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        block_size = model.kv.block_size
        scratch = ScratchBlocks(num_blocks, -(-MAX_DRAFT_TOKENS // block_size))
        if model.kv.num_blocks < num_blocks + max_num_seqs * scratch.num_per_row:
            raise ValueError(f"the drafter's KV has {model.kv.num_blocks} blocks, too few for {max_num_seqs} sequences")
        self._model = model
        self._sampler = sampler
        self._max_model_len = max_model_len
        self._tables = BlockTables(max_num_seqs, -(-max_model_len // block_size), block_size, scratch)
        self._num_computed: dict[str, int] = {}
        self._adapters: dict[str, str | None] = {}

    def apply(self, plan: StepPlan) -> None:
        """Follow the plan's block tables; what was computed for admitted requests came with their blocks."""
        self._tables.apply(plan)
        for request_id in plan.released:
            self._num_computed.pop(request_id, None)
        admitted = {request.request_id for request in plan.admitted}
        for item in plan.scheduled:
            if item.request_id in admitted:
                self._num_computed[item.request_id] = item.start

    def propose(self, scheduled: Sequence[ScheduledRequest], rows: Sequence[Row], wanted: Sequence[int]) -> None:
        """Set `drafts` of rows that want some. Rows stand behind this step's tokens; states are left as they are."""
        drafting = [_Draft(row, self._room(row, count)) for row, count in zip(rows, wanted, strict=True)]
        self._adapters = {row.request_id: row.adapter for row in rows}
        shares = [self._share(item, draft) for item, draft in zip(scheduled, drafting, strict=True)]
        logits = self._forward([share for share in shares if share is not None])
        active = [draft for draft in drafting if draft.room > 0]
        while active:
            for draft, values in zip(active, logits, strict=True):
                self._guess(draft, values)
            active = [draft for draft in active if draft.room > 0]
            if active:
                logits = self._forward([draft.next_share() for draft in active])
        for draft in drafting:
            draft.finish()

    def _room(self, row: Row, wanted: int) -> int:
        return max(0, min(wanted, MAX_DRAFT_TOKENS, self._max_model_len - len(row.token_ids)))

    def _share(self, item: ScheduledRequest, draft: _Draft) -> ScheduledRequest | None:
        """The known tokens that the drafter hasn't computed; the newest one only where guesses follow it."""
        row = draft.row
        # The newest token of a row that samples has no block for sure; it is computed again when it has one.
        known = len(row.token_ids) - 1 if item.sample else item.end
        start = known if self._model.shares_kv else self._num_computed[item.request_id]
        self._num_computed[item.request_id] = known
        end = known + 1 if draft.room > 0 else known
        if start >= end:
            return None
        return ScheduledRequest(
            request_id=item.request_id,
            token_ids=row.token_ids[start:end],
            start=start,
            new_block_ids=[],
            sample=draft.room > 0,
        )

    def _forward(self, shares: Sequence[ScheduledRequest]) -> list[Float32Array]:
        """Logits [vocab] of the last token of each share that samples, in the order of `shares`."""
        if not shares:
            return []
        kv = self._model.kv
        batch = build_batch(shares, self._tables, kv.tensor.dtype)
        logits = self._model.decoder.step(batch, kv)
        row_of = {item.request_id: row for row, item in enumerate(batch.samplers)}
        values = logits.cpu().numpy()
        return [values[row_of[share.request_id]] for share in shares if share.sample]

    def _guess(self, draft: _Draft, values: Float32Array) -> None:
        row = draft.row
        if row.has_rules:
            row.restrict(values)
        if not np.isfinite(values.max()):
            draft.room = 0
            return
        if row.greedy:
            token_id = int(values.argmax())
        else:
            draft.probabilities.append(distribution(row, values).astype(np.float32))
            token_id = self._sampler.draw(row, values, len(row.token_ids), Stream.DRAFT)
        draft.add(token_id)


class _Draft:
    """Guesses in the making for one row. room: how many may still come."""

    def __init__(self, row: Row, room: int) -> None:
        self.row = row
        self.room = room
        self.probabilities: list[Float32Array] = []
        self._position = len(row.token_ids)
        self._token_ids: list[int] = []

    def add(self, token_id: int) -> None:
        """Move the row over one more guess; none follows one that ends the output."""
        if not self.row.push(token_id):
            self.probabilities = self.probabilities[: len(self._token_ids)]
            self.room = 0
            return
        self._token_ids.append(token_id)
        self.room = 0 if token_id in self.row.ending_ids else self.room - 1

    def next_share(self) -> ScheduledRequest:
        """The latest guess, to be computed for the one after it."""
        return ScheduledRequest(
            request_id=self.row.request_id,
            token_ids=[self._token_ids[-1]],
            start=self._position + len(self._token_ids) - 1,
            new_block_ids=[],
            sample=True,
        )

    def finish(self) -> None:
        """Move the row back and leave the guesses with it."""
        self.row.pop(len(self._token_ids))
        self.row.drafts = None
        if self._token_ids:
            self.row.drafts = Drafts(
                position=self._position,
                token_ids=tuple(self._token_ids),
                probabilities=np.stack(self.probabilities) if self.probabilities else None,
            )
