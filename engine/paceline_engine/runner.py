"""Runs step plans on a paged model: index tensors, forward pass, sampling.

Holds what outlives a step on the device side: weights, KV memory and block tables. Decides nothing; the scheduler does.
"""

from __future__ import annotations

import torch

from paceline_engine.backends.cpu_attention import CpuAttention, PagedKV
from paceline_engine.batch import BlockTables, build_batch
from paceline_engine.core.outputs import AdmittedRequest, StepPlan, StepResult
from paceline_engine.models.decoder import Decoder
from paceline_engine.sampler import sample


class ModelRunner:
    """One model with its KV pool."""

    def __init__(self, decoder: Decoder, kv: PagedKV, *, max_num_seqs: int, max_model_len: int) -> None:
        self.kv = kv
        self._decoder = decoder
        max_blocks = -(-max_model_len // kv.block_size)
        self._tables = BlockTables(max_num_seqs, max_blocks, kv.block_size)
        self._rows: dict[str, AdmittedRequest] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[StepResult]:
        """Compute the plan's KV and one token for each request that samples."""
        self._tables.apply(plan)
        for request_id in plan.released:
            self._rows.pop(request_id, None)
        for admitted in plan.admitted:
            self._rows[admitted.request_id] = admitted
        if not plan.scheduled:
            return []
        batch = build_batch(plan, self._tables, self.kv.tensor.dtype)
        logits = self._decoder.forward(
            batch.token_ids, batch.positions, batch.logits_rows, CpuAttention(self.kv, batch)
        )
        return sample(logits, batch.samplers, [self._rows[item.request_id].sampling for item in batch.samplers])
