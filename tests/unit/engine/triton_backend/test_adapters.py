"""LoRA adapters on the device beside the CPU's, which other tests hold to PEFT: several in a batch, load and unload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import MAX_MODEL_LEN, Sequences, make_config, random_tensors, reference_logits, save

from paceline_engine.backends.triton import adapters as device_adapters
from paceline_engine.backends.triton.decoder import TritonDecoder
from paceline_engine.models.decoder import Decoder
from paceline_engine.models.lora import projection_sizes
from paceline_engine.models.lora_files import PROJECTIONS, LoraError

# Prefills beside one another, then decodes beside a third.
SCHEDULE = (((1, 7), (0, 3)), ((0, 1), (2, 2), (1, 1)))
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}
CONFIG = make_config()
# Rank and the changed projections by layer: none of one matrix, parts of a fused one, all.
ADAPTERS: dict[str, tuple[int, dict[int, tuple[str, ...]]]] = {
    "all": (5, dict.fromkeys((0, 1), tuple(projection_sizes(CONFIG)))),
    "qv": (3, dict.fromkeys((0, 1), ("q_proj", "v_proj"))),
    "one layer": (20, {1: ("up_proj", "o_proj")}),
}


def save_adapter(folder: Path, rank: int, layers: dict[int, tuple[str, ...]], seed: int) -> Path:
    """As PEFT saves it."""
    torch.manual_seed(seed)
    sizes, tensors = projection_sizes(CONFIG), {}
    for layer, projections in layers.items():
        for name in projections:
            part = next(part for part, names in PROJECTIONS.items() if name in names)
            prefix = f"base_model.model.model.layers.{layer}.{part}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, sizes[name][1]) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(sizes[name][0], rank) * 0.3
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(the model's files, folders of the adapters)."""
    folder = tmp_path_factory.mktemp("lora")
    folders = {
        name: save_adapter(folder / name, *adapter, seed=index)
        for index, (name, adapter) in enumerate(ADAPTERS.items())
    }
    return save(folder, random_tensors(CONFIG)), folders


def make_decoder(files: list[Path], **options: Any) -> TritonDecoder:
    sizes = {"max_model_len": MAX_MODEL_LEN, "dtype": torch.float32, **options}
    return TritonDecoder(CONFIG, files, device=torch.device("cpu"), **sizes)


def run(decoder: TritonDecoder, names: tuple[str | None, ...]) -> Sequences:
    """Sequences, each with an adapter or none, in batches together."""
    sequences = Sequences(CONFIG)
    for shares in SCHEDULE:
        groups = decoder.adapters.groups([names[index] for index, _ in shares], [count for _, count in shares])
        sequences.step(lambda batch, groups=groups: decoder.forward(batch, sequences.kv, groups), shares)
    return sequences


def check(sequences: Sequences, saved: Any, names: tuple[str | None, ...]) -> None:
    reference = Decoder(CONFIG, saved[0], max_model_len=MAX_MODEL_LEN, dtype=torch.float32)
    for index, name in enumerate(names):
        token_ids, deltas = sequences.computed(index), None
        if name is not None:
            reference.adapters.load(name, saved[1][name])
            deltas = reference.adapters.deltas([name], [len(token_ids)])
        expected = reference_logits(reference, token_ids, deltas)
        torch.testing.assert_close(sequences.logits(index), expected, **TOLERANCE)


def test_adapters_and_the_base_model_in_one_batch(saved):
    decoder = make_decoder(saved[0])
    for name, folder in saved[1].items():
        decoder.adapters.load(name, folder)
    assert "qv" in decoder.adapters
    for names in (("all", None, "qv"), ("one layer", "all", "all")):
        check(run(decoder, names), saved, names)


def test_rows_of_the_base_model_are_the_same_bits_beside_adapters(saved):
    decoder, sequences = make_decoder(saved[0]), Sequences(CONFIG)
    batch = sequences.batch(((0, 4), (1, 3)), every_row=True)
    alone = decoder.forward(batch, sequences.kv)
    decoder.adapters.load("all", saved[1]["all"])
    beside = decoder.forward(batch, sequences.kv, decoder.adapters.groups(["all", None], [4, 3]))
    assert torch.equal(beside[4:], alone[4:])
    assert not torch.isclose(beside[:4], alone[:4]).all()


def test_adapters_come_go_and_are_replaced_at_run_time(saved):
    decoder = make_decoder(saved[0])
    digest = decoder.adapters.load("a", saved[1]["qv"])
    assert decoder.adapters.load("b", saved[1]["all"]) != digest
    decoder.adapters.unload("a")
    decoder.adapters.load("b", saved[1]["qv"])
    sequences = run(decoder, ("b", "a", None))
    reference = run(make_decoder(saved[0]), (None, None, None))
    torch.testing.assert_close(sequences.logits(1)[:7], reference.logits(1)[:7], **TOLERANCE)
    sequences.members = sequences.members[:1]
    check(sequences, (saved[0], {"b": saved[1]["qv"]}), ("b",))
    decoder.adapters.unload("b")
    assert decoder.adapters.groups(["b"], [1]) is None
    with pytest.raises(LoraError, match="'b' isn't loaded"):
        decoder.adapters.unload("b")


def test_what_would_be_too_much_is_refused_and_changes_nothing(saved, monkeypatch):
    decoder = make_decoder(saved[0], max_adapters=2, max_rank=8)
    decoder.adapters.load("qv", saved[1]["qv"])
    with pytest.raises(LoraError, match="has rank 20, over the 8 that are allowed"):
        decoder.adapters.load("one layer", saved[1]["one layer"])

    def fail(*arguments: Any) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device_adapters, "stack_adapters", fail)
    with pytest.raises(LoraError, match="no memory for the adapter 'all': unload one"):
        decoder.adapters.load("all", saved[1]["all"])
    assert "all" not in decoder.adapters
    decoder.adapters.load("all", saved[1]["all"])
    with pytest.raises(LoraError, match="2 adapters are loaded, the most there may be"):
        decoder.adapters.load("more", saved[1]["qv"])
    check(run(decoder, ("qv", None, None)), saved, ("qv", None, None))
