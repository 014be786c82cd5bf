"""The decoder against transformers: tiny random models of several geometries, token by token in float32."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline_engine.models.decoder import Decoder
from paceline_engine.models.rope import inverse_frequencies
from paceline_engine.models.weights import WeightsError

NAMES = ["gqa-tied", "mha-untied", "mqa-wide-heads", "bias", "linear-rope", "llama3-rope", "qwen3-qk-norm"]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_transformers_alone_and_together(name, checkpoints, new_loop, prompts_for, equals_greedy):
    checkpoint = checkpoints(name)
    prompts = prompts_for(8, checkpoint.config.vocab_size)
    expected = {str(i): checkpoint.reference_tokens(prompt, 16) for i, prompt in enumerate(prompts)}
    named = {str(i): prompt for i, prompt in enumerate(prompts)}

    together = new_loop(checkpoint)
    for i, prompt in enumerate(prompts):
        together.add(str(i), prompt, 16)
    equals_greedy(checkpoint, named, together.run(), expected)

    for i, prompt in enumerate(prompts[:3]):
        alone = new_loop(checkpoint)
        alone.add(str(i), prompt, 16)
        equals_greedy(checkpoint, named, alone.run(), {str(i): expected[str(i)]})


def test_random_models_do_not_repeat_one_token(tiny, prompts_for):
    """Guards the tests above: equal outputs prove little if a model says one thing."""
    tokens = tiny.reference_tokens(prompts_for(1, tiny.config.vocab_size)[0], 16)
    assert len(set(tokens)) > 4


def test_bfloat16_runs_and_mostly_agrees(tiny, new_loop, prompts_for):
    prompt = prompts_for(1, tiny.config.vocab_size)[0]
    loop = new_loop(tiny, dtype=torch.bfloat16)
    loop.add("a", prompt, 4)
    assert loop.run()["a"][0] == tiny.reference_tokens(prompt, 1)[0]


def test_unknown_rope_scaling_is_refused(tiny):
    config = dataclasses.replace(tiny.config, rope_scaling={"rope_type": "longrope", "factor": 4.0})
    with pytest.raises(ValueError, match="'longrope' isn't supported"):
        inverse_frequencies(config)


def test_missing_and_misshapen_tensors_are_named(tiny, tmp_path):
    def load(config, files):
        return Decoder(config, files, max_model_len=16, dtype=torch.float32)

    with pytest.raises(WeightsError, match=r"no tensor 'model\.layers\.3\."):
        load(dataclasses.replace(tiny.config, num_layers=4), tiny.files)
    with pytest.raises(WeightsError, match=r"embed_tokens.*shape"):
        load(dataclasses.replace(tiny.config, vocab_size=200), tiny.files)
    with pytest.raises(WeightsError, match=r"no \*\.safetensors file"):
        load(tiny.config, [])
    broken = tmp_path / "model.safetensors"
    broken.write_bytes(b"not a checkpoint")
    with pytest.raises(WeightsError, match=r"can't read weights from .*model\.safetensors"):
        load(tiny.config, [broken])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_weights_that_need_no_change_stay_in_the_mapped_file(tiny):
    decoder = Decoder(tiny.config, tiny.files, max_model_len=16, dtype=torch.float32)
    address = decoder._embedding.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.endswith(str(tiny.files[0]))
            return
    raise AssertionError("the weights are in no mapping")


def test_serving_path_imports_no_transformers():
    code = (
        "import sys, paceline_engine.core_process, paceline_engine.backends.cpu, paceline_engine.runner\n"
        "bad = [m for m in sys.modules if m.split('.')[0] == 'transformers']\n"
        "assert 'torch' in sys.modules and not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
