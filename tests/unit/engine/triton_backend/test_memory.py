"""What is left of a card's memory for KV."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import make_config

from paceline_engine.backends.triton.batch import DeviceBatch
from paceline_engine.backends.triton.memory import MIB, MemoryProfile, kv_bytes, sampling_bytes
from paceline_engine.backends.triton.model import TritonModel
from paceline_engine.backends.triton.penalty_counts import PenaltyCounts
from paceline_engine.paged_kv import PagedKV

CARD = MemoryProfile(total=80_000 * MIB, others=500 * MIB, peak=17_000 * MIB)


def test_kv_gets_the_share_less_what_the_largest_step_takes():
    assert kv_bytes(CARD, 0.9) == (72_000 - 17_000) * MIB
    assert kv_bytes(CARD, 0.5, reserved=1000 * MIB) == (40_000 - 18_000) * MIB


def test_other_processes_memory_is_not_taken():
    crowded = MemoryProfile(total=80_000 * MIB, others=30_000 * MIB, peak=17_000 * MIB)
    assert kv_bytes(crowded, 0.9) == (50_000 - 17_000) * MIB


@pytest.mark.parametrize(("others", "named"), [(500, False), (60_000, True)])
def test_where_nothing_is_left_the_error_says_what_takes_it(others, named):
    full = MemoryProfile(total=80_000 * MIB, others=others * MIB, peak=75_000 * MIB)
    with pytest.raises(ValueError, match="no memory is left for KV") as error:
        kv_bytes(full, 0.9)
    assert "weights and activations 75000 MiB" in str(error.value)
    assert "raise gpu-memory-utilization" in str(error.value)
    assert ("other processes 60000 MiB" in str(error.value)) == named


def test_sampling_has_room_for_logits_reported_ones_and_counted_penalties():
    counts = PenaltyCounts(256, 128_000, torch.device("meta")).update({})
    assert sampling_bytes(256, 128_000) > 2 * 4 * 256 * 128_000 + counts.nbytes
    assert sampling_bytes(1, 1000) < MIB


class Decoder:
    def forward(self, batch: DeviceBatch, kv: PagedKV) -> None:
        self.batch = batch


@pytest.mark.parametrize(("num_tokens", "num_sequences", "longest"), [(10, 3, 4), (10, 32, 1), (8, 1, 8)])
def test_the_step_that_is_measured_is_as_large_as_any(num_tokens, num_sequences, longest):
    """Every token's logits may be wanted: of a prompt whose logprobs are asked for, or of guesses."""
    decoder: Any = Decoder()
    kv = PagedKV(make_config(), 4, 4, torch.float32)
    TritonModel(decoder, torch.device("cpu")).largest_step(kv, num_tokens, num_sequences)
    batch = decoder.batch
    assert batch.logits_rows.tolist() == list(range(num_tokens))
    assert batch.token_ids.shape == batch.positions.shape == (num_tokens,)
    assert int(batch.begins[-1]) == num_tokens
    assert batch.max_query_len == longest
    assert batch.begins.diff().tolist() == batch.context_lens.tolist()
