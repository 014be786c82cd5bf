"""What is left of a card's memory for KV."""

from __future__ import annotations

import pytest

from paceline_engine.backends.triton.memory import MIB, MemoryProfile, kv_bytes, sampling_bytes

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


def test_sampling_takes_more_for_more_rows_and_words():
    assert sampling_bytes(256, 128_000) > 3 * 4 * 256 * 128_000
    assert sampling_bytes(1, 1000) < MIB
