"""One model over two and four processes beside one process, and what each of them reads.

The processes meet once, over gloo, and run all cases. Tolerance of logits of order 10: 1e-4 in float32.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank import CASES, SCHEDULE
from tiny_models import MAX_MODEL_LEN, Sequences, make_config, random_tensors, reference_logits, save

from paceline_engine.backends.triton.decoder import TritonDecoder
from paceline_engine.backends.triton.parallel import TensorParallel
from paceline_engine.backends.triton.sharding import RankWeights, Shard, check_size
from paceline_engine.backends.triton.weights import load_weights
from paceline_engine.models.decoder import Decoder
from paceline_engine.models.weights import WeightFiles, WeightsError

TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """(folder of the checkpoints, what each rank saw of each case)."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, (changes, _, _) in CASES.items():
        save(folder / name, random_tensors(make_config(**changes)))
    command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(folder)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=100)
    return folder, {
        name: [torch.load(folder / f"{name}-{rank}.pt") for rank in ranks] for name, (_, _, ranks) in CASES.items()
    }


@pytest.mark.parametrize("name", ["four", "tied"])
def test_many_ranks_compute_what_the_cpu_does(name, ranks):
    folder, seen = ranks
    config = make_config(**CASES[name][0])
    files = [folder / name / "model.safetensors"]
    reference = Decoder(config, files, max_model_len=MAX_MODEL_LEN, dtype=torch.float32)
    for logits, tokens in zip(seen[name][0]["logits"], seen[name][0]["tokens"], strict=True):
        expected = reference_logits(reference, torch.tensor(tokens[: len(logits)]))
        torch.testing.assert_close(logits, expected, **TOLERANCE)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_quantized_parts_are_parts_of_the_quantized_whole(ranks):
    folder, seen = ranks
    config, files = make_config(**CASES["int4"][0]), [folder / "int4" / "model.safetensors"]
    sizes = {"max_model_len": MAX_MODEL_LEN, "dtype": torch.float32, "quantization": "int4"}
    decoder, alone = TritonDecoder(config, files, device=CPU, **sizes), Sequences(config)
    alone.run(lambda batch: decoder.forward(batch, alone.kv), SCHEDULE)
    assert seen["int4"][0]["tokens"] == [member.tokens for member in alone.members[:2]]
    for index in (0, 1):
        torch.testing.assert_close(seen["int4"][0]["logits"][index], alone.logits(index), **TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_ranks_see_the_same_and_hold_their_heads(name, ranks):
    of_ranks = ranks[1][name]
    for other in of_ranks[1:]:
        assert other["tokens"] == of_ranks[0]["tokens"]
        assert all(map(torch.equal, other["logits"], of_ranks[0]["logits"]))
    kv_heads = max(1, make_config(**CASES[name][0]).num_kv_heads // len(of_ranks))
    assert [seen["kv"][4] for seen in of_ranks] == [kv_heads] * len(of_ranks)


def test_adapters_are_refused_by_every_rank(ranks):
    said = {seen["refused"] for of_ranks in ranks[1].values() for seen in of_ranks}
    assert said == {"LoRA adapters with tensor parallelism are not built: use --tensor-parallel-size 1"}


class Counting(RankWeights):
    """Counts the bytes that come from the files."""

    num_bytes = 0

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = super()._read(name, shape)
        self.num_bytes += tensor.nbytes
        return tensor


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_reads_its_part_and_no_more(size, tmp_path):
    """All matrices and the vocabulary are shared out; norms are read by everyone."""
    config = make_config(num_heads=8, num_kv_heads=4, vocab_size=100)
    tensors = random_tensors(config)
    files = save(tmp_path, tensors)
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)
    whole = sum(tensor.nbytes for tensor in tensors.values())
    for rank in range(size):
        shard, opened = Shard(config, rank, size), []

        def open_weights(dtype, shard=shard, opened=opened) -> WeightFiles:
            opened.append(Counting(files, dtype, shard))
            return opened[-1]

        load_weights(shard.part(), open_weights, device=CPU, dtype=torch.float32, quantization="none")
        assert sum(each.num_bytes for each in opened) == (whole - norms) // size + norms


def test_a_vocabulary_smaller_than_its_parts_is_filled_up(tmp_path):
    config = make_config(vocab_size=5)
    files = save(tmp_path, random_tensors(config))
    whole = WeightFiles(files, torch.float32).take("lm_head.weight", 5, 48)
    parts = [
        RankWeights(files, torch.float32, Shard(config, rank, 4)).take("lm_head.weight", 2, 48) for rank in range(4)
    ]
    assert torch.equal(torch.cat(parts)[:5], whole)
    assert not torch.cat(parts)[5:].any()


def test_a_part_of_a_misshapen_tensor_is_refused(tmp_path):
    config = make_config(num_heads=4, num_kv_heads=4)
    files = save(tmp_path, random_tensors(config))
    weights = RankWeights(files, torch.float32, Shard(replace(config, intermediate_size=128), 1, 2))
    with pytest.raises(
        WeightsError, match=r"down_proj.weight' has shape \(48, 80\), the configuration implies \(48, 1"
    ):
        weights.take("model.layers.0.mlp.down_proj.weight", 48, 64)
    with pytest.raises(WeightsError, match="no tensor"):
        weights.take("model.layers.7.mlp.down_proj.weight", 48, 64)


@pytest.mark.parametrize(
    ("changes", "size", "quantization", "says"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "none", "the model's 9 query heads can't be .*: use 1$"),
        (
            {"num_heads": 12, "num_kv_heads": 3, "intermediate_size": 96},
            2,
            "none",
            "the model's 3 KV heads .*: use 1 or 3 or 6 or 12$",
        ),
        (
            {"num_heads": 12, "num_kv_heads": 12, "intermediate_size": 80},
            3,
            "none",
            "the MLP's 80 columns .*: use 1 or 2 or 4$",
        ),
        (
            {"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 128},
            8,
            "int4",
            "groups of 32 int4 .*: use 1 or 2 or 4$",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_refused(changes, size, quantization, says, tmp_path):
    config = make_config(**changes)
    with pytest.raises(ValueError, match=f"--tensor-parallel-size {size}: {says}") as refused:
        TritonDecoder(
            config,
            save(tmp_path, {"x": torch.zeros(1)}),
            device=CPU,
            max_model_len=MAX_MODEL_LEN,
            dtype=torch.float32,
            quantization=quantization,
            parallel=TensorParallel(0, size),
        )
    assert "\n" not in str(refused.value)
    check_size(config, 1, "none")
