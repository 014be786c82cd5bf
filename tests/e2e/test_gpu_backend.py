"""The engine's processes on the GPU backend, under Triton's interpreter: what a client gets is what the CPU gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_process import HTTP, engine_process
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytestmark = pytest.mark.e2e

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 48, 80, 2, 2, 1, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny random Llama whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0} | {letter: number for number, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    shapes = {"model.embed_tokens": (len(vocabulary), HIDDEN)}
    for index in range(LAYERS):
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        shapes |= {f"{attention}q_proj": (HEADS * HEAD_DIM, HIDDEN), f"{attention}o_proj": (HIDDEN, HEADS * HEAD_DIM)}
        shapes |= {f"{attention}{name}_proj": (KV_HEADS * HEAD_DIM, HIDDEN) for name in "kv"}
        shapes |= {f"{mlp}{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{mlp}down_proj"] = (HIDDEN, INNER)
    tensors = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    norms = [f"layers.{index}.{name}_layernorm" for index in range(LAYERS) for name in ("input", "post_attention")]
    tensors |= {f"model.{name}.weight": torch.ones(HIDDEN) for name in [*norms, "norm"]}
    save_file(tensors, folder / "model.safetensors")
    description = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(description))
    return folder


def answers(directory: Path, model: Path, device: str) -> list[object]:
    """Greedy, sampled and constrained answers, whole and streamed."""
    directory.mkdir()
    source, small = f"file://{model}", ("--dtype", "float32", "--max-model-len", "96", "--max-num-seqs", "4")
    with engine_process(directory, "--model", source, "--device", device, "--kv-cache-memory", "4Mi", *small) as engine:
        plain = {"model": "m", "prompt": "one two", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        sampled = {**plain, "temperature": 0.9, "top_p": 0.8, "seed": 5, "presence_penalty": 0.4, "logprobs": 1}
        bodies = [plain, sampled, {**plain, "guided_regex": "[a-c]{4}", "ignore_eos": False}]
        found: list[object] = []
        for body in bodies:
            answer = engine.post(body)
            assert answer.status_code == 200, answer.text
            found += [answer.json()["choices"][0]["text"], answer.json()["usage"]["completion_tokens"]]
        with HTTP.stream("POST", f"{engine.http}/v1/completions", json={**plain, "stream": True}) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == found[0]
        # No card, no series.
        assert "paceline_engine_gpu" not in HTTP.get(f"{engine.metrics}/metrics").text
        return found


def test_a_client_gets_from_the_gpu_backend_what_the_cpu_gives(tmp_path, model, monkeypatch):
    on_cpu = answers(tmp_path / "cpu", model, "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert answers(tmp_path / "gpu", model, "cuda") == on_cpu


def test_an_engine_without_a_card_says_what_to_do(tmp_path, model, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with engine_process(tmp_path, "--model", f"file://{model}", "--device", "cuda", ready=False) as engine:
        assert engine.wait_exit() == 1
        assert "--device cuda: " in engine.log.read_text()
        assert "use --device cpu" in engine.log.read_text()
