"""The device's decoder beside the CPU's, through Triton's interpreter, over batches of chunks, decodes and guesses.

Tolerance of logits, which are of order 10: float32 1e-4, which the order of sums may change; bfloat16 as its test says.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    MAX_MODEL_LEN,
    Sequences,
    make_config,
    random_tensors,
    reference_logits,
    save,
)
from torch.utils._python_dispatch import TorchDispatchMode

from paceline_engine.backends.triton.decoder import TritonDecoder
from paceline_engine.kernels.quantized_gemm import dequantize, pack_matrix
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.decoder import Decoder, HiddenRows
from paceline_engine.models.weights import WeightsError

TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}
CPU = torch.device("cpu")


def make_decoder(config: ModelConfig, files, dtype=torch.float32, **options) -> TritonDecoder:
    return TritonDecoder(config, files, device=CPU, max_model_len=MAX_MODEL_LEN, dtype=dtype, **options)


def make_reference(config: ModelConfig, files, dtype=torch.float32) -> Decoder:
    return Decoder(config, files, max_model_len=MAX_MODEL_LEN, dtype=dtype)


def check(sequences: Sequences, reference: Decoder) -> None:
    """Each position's logits and likeliest token are the reference's."""
    for index in range(3):
        expected = reference_logits(reference, sequences.computed(index))
        torch.testing.assert_close(sequences.logits(index), expected, **TOLERANCE)
        assert torch.equal(sequences.logits(index).argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_computes_what_the_cpu_does(name, tmp_path):
    config = make_config(**ARCHITECTURES[name])
    files = save(tmp_path, random_tensors(config))
    decoder = make_decoder(config, files)
    sequences = Sequences(config)
    sequences.run(lambda batch: decoder.forward(batch, sequences.kv))
    check(sequences, make_reference(config, files))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(config, files) of the plainest model."""
    config = make_config()
    return config, save(tmp_path_factory.mktemp("llama"), random_tensors(config))


def test_split_keys_change_nothing_but_rounding(llama):
    decoder, sequences = make_decoder(*llama), Sequences(llama[0])
    sequences.run(lambda batch: decoder.forward(batch, sequences.kv), num_segments=2)
    check(sequences, make_reference(*llama))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_matrices_are_the_packed_ones(quantization, tied, tmp_path):
    """Beside the CPU's decoder of what the packed matrices hold: 8 bits in the head of either."""
    config = make_config(hidden_size=64, attention_bias=True, tie_word_embeddings=tied)
    tensors = random_tensors(config)
    decoder = make_decoder(config, save(tmp_path / "plain", tensors), quantization=quantization)
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    rounded = {
        name: dequantize(pack_matrix(tensor, quantization)) if name.endswith("proj.weight") else tensor
        for name, tensor in tensors.items()
    }
    rounded["lm_head.weight"] = dequantize(pack_matrix(head, "int8"))
    reference = make_reference(make_config(hidden_size=64, attention_bias=True), save(tmp_path / "rounded", rounded))
    sequences = Sequences(config)
    sequences.run(lambda batch: decoder.forward(batch, sequences.kv))
    check(sequences, reference)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(torch.int8, 0.01), (torch.float8_e4m3fn, 0.1)])
def test_kv_of_8_bits(kv_dtype, tolerance, llama):
    """What is written is keys and values but for `tolerance`, relative; logits are exactly those over what is written.

    The interpreter loses the carry of a rounded float8.
    """
    decoder, sequences = make_decoder(*llama), Sequences(llama[0], kv_dtype=kv_dtype)
    sequences.run(lambda batch: decoder.forward(batch, sequences.kv))

    def stored(index, layer, vectors):
        replaced = sequences.stored(index, layer)
        for exact, rounded in zip(vectors, replaced, strict=True):
            assert 0 < (rounded - exact).norm() < tolerance * exact.norm()
        return replaced

    for index in range(3):
        expected = reference_logits(make_reference(*llama), sequences.computed(index), replaced=partial(stored, index))
        torch.testing.assert_close(sequences.logits(index), expected, **TOLERANCE)


def test_bfloat16_is_close(llama):
    """To the CPU's float32: the interpreter cuts off where a GPU rounds, so by more than twice what bfloat16 costs."""
    decoder, sequences = make_decoder(*llama, dtype=torch.bfloat16), Sequences(llama[0], kv_dtype=torch.bfloat16)
    sequences.run(lambda batch: decoder.forward(batch, sequences.kv))
    logits, expected = sequences.logits(0), reference_logits(make_reference(*llama), sequences.computed(0))
    assert logits.dtype == torch.float32
    assert (logits - expected).norm() < 0.05 * expected.norm()


def test_only_the_wanted_rows_are_given_and_their_hidden_states(llama):
    config = llama[0]
    decoder, sequences = make_decoder(*llama), Sequences(config)
    batch = sequences.batch(((1, 5), (2, 2)), every_row=False)
    everything = sequences.batch(((1, 5), (2, 2)), every_row=True)
    states = HiddenRows.of(torch.tensor([6, 0]), config)
    logits = decoder.forward(batch, sequences.kv, states=states)
    kv = sequences.kv.tensor.clone()
    full = decoder.forward(everything, sequences.kv)
    torch.testing.assert_close(logits, full[[4, 6]], **TOLERANCE)
    assert torch.equal(sequences.kv.tensor.nan_to_num(9), kv.nan_to_num(9))
    head = random_tensors(config)["lm_head.weight"]
    torch.testing.assert_close(states.out @ head.T, full[[6, 0]], **TOLERANCE)
    none = dataclasses.replace(batch, logits_rows=torch.tensor([], dtype=torch.int64))
    assert decoder.forward(none, sequences.kv).shape == (0, config.vocab_size)


def test_rows_of_padding_write_nothing_and_change_nothing(llama):
    """As in a captured graph: sequences of no rows or one row, whose slots are negative, behind the real ones."""
    decoder, sequences = make_decoder(*llama), Sequences(llama[0])
    batch = sequences.batch(((1, 1), (2, 1)), every_row=True)
    logits = decoder.forward(batch, sequences.kv)
    unwritten = sequences.kv.tensor.isnan()
    padded = dataclasses.replace(
        batch,
        token_ids=torch.cat((batch.token_ids, torch.tensor([0, 0]))),
        positions=torch.cat((batch.positions, torch.tensor([0, 0]))),
        slots=torch.cat((batch.slots, torch.tensor([-1, -1]))),
        begins=torch.cat((batch.begins, torch.tensor([3, 4], dtype=torch.int32))),
        context_lens=torch.cat((batch.context_lens, torch.tensor([0, 0], dtype=torch.int32))),
        block_tables=torch.cat((batch.block_tables, torch.full_like(batch.block_tables, 2**31 - 1))),
        logits_rows=torch.arange(4),
    )
    torch.testing.assert_close(decoder.forward(padded, sequences.kv)[:2], logits, **TOLERANCE)
    assert torch.equal(sequences.kv.tensor.isnan(), unwritten)


def test_a_forward_pass_never_looks_at_the_devices_data(llama):
    """What would make the host wait on a GPU, and can't be captured in a graph."""
    decoder, sequences = make_decoder(*llama), Sequences(llama[0])
    batch = sequences.batch(((1, 3), (2, 1)), every_row=False)
    with Recorded() as recorded:
        decoder.forward(batch, sequences.kv)
    assert "aten.linear" in recorded.operators
    assert not recorded.operators & {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.item"}


class Recorded(TorchDispatchMode):
    """The names of the operators that torch runs, but for those of Triton's interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators.add(str(function).rpartition(".")[0])
        return function(*args, **(kwargs or {}))


def test_the_first_layers_are_a_shorter_model(llama):
    config, files = llama
    decoder, sequences = make_decoder(config, files), Sequences(config)
    shortened = decoder.first_layers(1)
    sequences.run(lambda batch: shortened.forward(batch, sequences.kv))
    check(sequences, make_reference(dataclasses.replace(config, num_layers=1), files))
    with pytest.raises(ValueError, match="a drafter has 1 to 2 of the model's layers, not 3"):
        decoder.first_layers(3)


def test_what_the_checkpoint_lacks_is_named(llama):
    config, files = llama
    with pytest.raises(WeightsError, match=r"no tensor 'model\.layers\.2\."):
        make_decoder(dataclasses.replace(config, num_layers=3), files)
    with pytest.raises(WeightsError, match=r"embed_tokens.*shape"):
        make_decoder(dataclasses.replace(config, vocab_size=7), files, quantization="int8")
