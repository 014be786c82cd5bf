"""Families beside Llama against transformers: tiny random models, token by token in float32, and what is refused.

Each configuration is read from the folder that transformers saved, so the reading of config.json is under test too.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_engine.backends.cpu_attention import _attend
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.models.decoder import Decoder
from paceline_engine.models.errors import ModelError
from paceline_engine.models.hf_folder import read_config

WINDOW = 9  # Shorter than most prompts, and no multiple of the block size.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA2 = {"model_type": "gemma2", "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
GEMMA3 = {**GEMMA2, "model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 3}

FAMILIES: dict[str, dict[str, Any]] = {
    "mistral-window": {"model_type": "mistral", "sliding_window": WINDOW},
    "mistral-no-window": {"model_type": "mistral", "sliding_window": None, "head_dim": 20},
    "qwen2-bias": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen2-yarn": {"model_type": "qwen2", "rope_parameters": YARN},
    "llama-yarn-untruncated": {"rope_parameters": {**YARN, "truncate": False, "attention_factor": 0.8}},
    "llama-yarn-mscale": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 16}},
    "llama-dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "qwen3-bias-window": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "smollm3-no-positions": {"model_type": "smollm3", "no_rope_layer_interval": 2, "attention_bias": True},
    "smollm3-window": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "gemma": {"model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2": {**GEMMA2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma2-no-caps": {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3": GEMMA3,
    "gemma3-scaled": {
        **GEMMA3,
        "final_logit_softcapping": 2.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    },
}


@pytest.fixture(scope="module")
def family(build, tmp_path_factory):
    """A family's checkpoint, built once a module."""
    built: dict[str, Any] = {}

    def get(name: str):
        if name not in built:
            built[name] = build(tmp_path_factory.mktemp(name), FAMILIES[name])
        return built[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers_in_a_batch_and_in_chunks(name, family, new_loop, prompts_for, equals_greedy):
    checkpoint = family(name)
    prompts = prompts_for(5, checkpoint.config.vocab_size, seed=3)
    expected = {str(i): checkpoint.reference_tokens(prompt, 14) for i, prompt in enumerate(prompts)}
    assert max(len(set(tokens)) for tokens in expected.values()) > 4, "a model that repeats itself shows little"
    for chunk in (64, 5):
        loop = new_loop(checkpoint, prefill_chunk_tokens=chunk)
        for i, prompt in enumerate(prompts):
            loop.add(str(i), prompt, 14)
        equals_greedy(checkpoint, {str(i): prompt for i, prompt in enumerate(prompts)}, loop.run(), expected)


NEUTRAL: dict[str, Any] = {
    "sliding_window": None,
    "attention_softcap": None,
    "logit_softcap": None,
    "attention_scale": None,
    "embedding_scale": 1.0,
    "norm_offset": 0.0,
    "local_rope_theta": None,
    "rope_scaling": None,
    "no_rope_layers": (),
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_output_bias": False,
}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("mistral-window", "sliding_window"),
        ("qwen2-bias", "attention_bias"),
        ("qwen2-yarn", "rope_scaling"),
        ("qwen3-bias-window", "attention_output_bias"),
        ("smollm3-no-positions", "no_rope_layers"),
        ("gemma", "hidden_act"),
        ("gemma", "norm_offset"),
        ("gemma", "embedding_scale"),
        ("gemma2", "attention_softcap"),
        ("gemma2", "attention_scale"),
        ("gemma2", "sliding_window"),
        ("gemma3", "local_rope_theta"),
    ],
)
def test_a_family_needs_each_of_its_fields(name, field, family, new_loop, prompts_for):
    """Guards the test above: a field that changed nothing in these small models would not be tested by them."""
    checkpoint = family(name)
    prompts = prompts_for(5, checkpoint.config.vocab_size, seed=3)
    expected = {str(i): checkpoint.reference_tokens(prompt, 14) for i, prompt in enumerate(prompts)}
    assert getattr(checkpoint.config, field) != NEUTRAL[field]
    neutral = dataclasses.replace(checkpoint.config, **{field: NEUTRAL[field]})
    loop = new_loop(dataclasses.replace(checkpoint, config=neutral))
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, 14)
    assert loop.run() != expected


@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "gemma3-scaled"])
def test_guesses_are_verified_inside_each_layers_window(name, family, new_loop, prompts_for):
    """Several tokens of one sequence in a step, each with a window of its own; the model itself guesses."""
    checkpoint = family(name)
    prompts = prompts_for(4, checkpoint.config.vocab_size, seed=3)
    expected = {str(i): checkpoint.reference_tokens(prompt, 14) for i, prompt in enumerate(prompts)}
    loop = new_loop(checkpoint, speculation=SpeculationConfig(method="draft", num_tokens=3), draft=checkpoint)
    loop.scheduler.speculation.num_wanted = lambda traffic_class: 3
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, 14)
    assert loop.run() == expected
    counters = loop.scheduler.speculation.counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 0


def random_geometry(seed: int) -> dict[str, Any]:
    """A family and sizes that nobody would choose."""
    choose = random.Random(seed)
    kv_heads = choose.choice([1, 2, 3])
    layers = choose.choice([1, 2, 4])
    heads = kv_heads * choose.choice([1, 2, 5])
    geometry: dict[str, Any] = {
        "model_type": choose.choice(["llama", "mistral", "qwen3", "gemma", "gemma2", "gemma3_text"]),
        "vocab_size": choose.choice([61, 199, 256]),
        "hidden_size": heads * choose.choice([6, 14]),
        "intermediate_size": choose.choice([30, 77]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": choose.choice([2, 10, 22]),
        "tie_word_embeddings": choose.random() < 0.3,
        "attention_bias": choose.random() < 0.3,
    }
    if geometry["model_type"] in ("mistral", "gemma2", "gemma3_text"):
        geometry["sliding_window"] = choose.choice([1, 2, 7, 33])
    return geometry


@pytest.mark.parametrize("seed", range(10))
def test_odd_geometries_equal_transformers(seed, build, new_loop, prompts_for, tmp_path, equals_greedy):
    checkpoint = build(tmp_path, random_geometry(seed))
    prompts = prompts_for(4, checkpoint.config.vocab_size, seed=seed)
    expected = {str(i): checkpoint.reference_tokens(prompt, 8) for i, prompt in enumerate(prompts)}
    loop = new_loop(checkpoint, block_size=1 + seed % 5, prefill_chunk_tokens=1 + seed)
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, 8)
    equals_greedy(checkpoint, {str(i): prompt for i, prompt in enumerate(prompts)}, loop.run(), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name, family):
    """What greedy tokens cannot show, such as a cap that keeps the order of logits."""
    checkpoint = family(name)
    layers = checkpoint.config.attention_layers()
    ids = torch.arange(3, 3 + WINDOW - 1)
    decoder = Decoder(checkpoint.config, checkpoint.files, max_model_len=32, dtype=torch.float32)
    rows = torch.arange(len(ids))
    ours = decoder.forward(ids, rows, rows, lambda layer, q, k, v: _attend(q, k, v, layers[layer], None))
    with torch.inference_mode():
        theirs = checkpoint.reference(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


# --- config.json ---------------------------------------------------------------------------------------------------


def read(folder: Path, changes: dict[str, Any]):
    geometry = {
        "vocab_size": 99, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(geometry | changes))
    return read_config(folder)


def test_a_window_longer_than_any_context_is_none(tmp_path):
    config = read(tmp_path, {"architectures": ["MistralForCausalLM"], "sliding_window": 128})
    assert config.sliding_window is None
    assert config == dataclasses.replace(config, sliding_layers=())
    config = read(tmp_path, {"architectures": ["MistralForCausalLM"], "sliding_window": 127})
    assert (config.sliding_window, config.sliding_layers) == (127, (0, 1, 2, 3))


def test_gemma_3_files_of_before_and_of_now_read_alike(tmp_path):
    """Gemma 3 1B's own config.json has one theta for each kind and a pattern; transformers 5 writes them by kind."""
    gemma = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "num_key_value_heads": 1, "sliding_window": 32}
    before = {"rope_theta": 1000000, "rope_local_base_freq": 10000, "sliding_window_pattern": 3, "rope_scaling": None}
    now = {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    config = read(tmp_path, gemma | before)
    assert config == read(tmp_path, gemma | now)
    assert config.sliding_layers == (0, 1, 3)
    assert config.tie_word_embeddings
    assert config.embedding_scale == pytest.approx(48**0.5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM' is not supported: use one of Llama"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "'Gemma3ForConditionalGeneration' is not supported"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope scaling 'longrope' is not built yet"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear' has no factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "rope scaling 'yarn': factor is 'x'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not built yet"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not built yet"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": -1}, "attn_logit_softcapping is -1"),
        ({"architectures": ["GemmaForCausalLM"], "use_bidirectional_attention": True}, "bidirectional attention"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim is 7: it must be even"),
    ],
)  # fmt: skip
def test_a_configuration_that_would_be_computed_wrongly_is_refused_by_name(tmp_path, changes, says):
    with pytest.raises(ModelError, match=says) as refused:
        read(tmp_path, {"architectures": ["LlamaForCausalLM"], **changes})
    assert "\n" not in str(refused.value)
