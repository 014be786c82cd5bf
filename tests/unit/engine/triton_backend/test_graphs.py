"""Decode steps in padded batches: a ladder of sizes, and rows that belong to nobody."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny_models import MAX_MODEL_LEN, Sequences, make_config, random_tensors, save

from paceline_engine.backends.triton.decoder import TritonDecoder
from paceline_engine.backends.triton.graphs import DecodeGraphs, ladder
from paceline_engine.kernels.attention import choose_num_segments


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 64, 250, 256])
def test_every_batch_fits_a_size_that_wastes_little(most):
    sizes = ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count < max(8, count)


def test_padded_rows_change_neither_the_others_nor_kv(tmp_path, monkeypatch):
    # One size for all, so that rows of an earlier batch lie behind those of a smaller one.
    monkeypatch.setattr("paceline_engine.backends.triton.graphs.ladder", lambda _: [4])
    config = make_config()
    files = save(tmp_path, random_tensors(config))
    decoder = TritonDecoder(config, files, device=torch.device("cpu"), max_model_len=MAX_MODEL_LEN, dtype=torch.float32)
    plain, padded = Sequences(config), Sequences(config)
    forwards = [partial(decoder.forward, kv=plain.kv), partial(decoder.forward, kv=padded.kv)]
    for sequences, forward in zip((plain, padded), forwards, strict=True):
        sequences.step(forward, ((0, 13), (1, 7), (2, 2)))
    graphs = DecodeGraphs(
        forwards[1],
        max_num_seqs=8,
        max_blocks=MAX_MODEL_LEN // padded.kv.block_size,
        vocab_size=config.vocab_size,
        device=torch.device("cpu"),
        choose_segments=lambda size: 2,
    )
    graphs.capture()
    for shares in (((0, 1), (1, 1), (2, 1)), ((2, 1),), ((1, 1), (2, 1))):
        plain.step(forwards[0], shares)
        padded.step(lambda batch: graphs.run(batch).clone(), shares)
    for index in range(3):
        torch.testing.assert_close(padded.logits(index), plain.logits(index), atol=1e-4, rtol=0)
        assert padded.members[index].tokens == plain.members[index].tokens
    torch.testing.assert_close(padded.kv.tensor, plain.kv.tensor, atol=1e-4, rtol=0, equal_nan=True)


def test_segments_are_powers_of_two_so_that_few_kernels_are_compiled():
    found = {choose_num_segments(1, 8, length, 132) for length in range(1, 40_000, 37)}
    assert found == {1, 2, 4, 8, 16, 32, 64}
