"""What changes a token's KV changes the identity it is stored under: every field of the architecture, tried."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_engine.config import EngineConfig
from paceline_engine.core_setup import identity
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.loader import LoadedModel

YARN = {"rope_scaling": {"rope_type": "yarn"}}  # Its factor and trained length are the model's length then.
WINDOWED = {"sliding_window": 5, "sliding_layers": (0,)}
# Of each field: what the model is like otherwise, and another value. The weights stay what they are.
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "max_position_embeddings": (YARN, 256),
    "rms_norm_eps": ({}, 1e-2),
    "rope_theta": ({}, 5000.0),
    "rope_scaling": ({}, {"rope_type": "linear", "factor": 2.0}),
    "rope_factors": ({}, (2.0,) * 6),
    "local_rope_theta": (WINDOWED, 100.0),
    "no_rope_layers": ({}, (1,)),
    "norm_offset": ({}, 1.0),
    "embedding_scale": ({}, 2.0),
    "hidden_act": ({}, "gelu_tanh"),
    "attention_scale": ({}, 0.9),
    "attention_softcap": ({}, 0.5),
    "sliding_window": (WINDOWED, 9),
    "sliding_layers": (WINDOWED, (0, 1)),
}
NO_CHANGE: dict[str, Any] = {
    "logit_softcap": 2.0,
    "tie_word_embeddings": False,
    "bos_token_id": 3,
    "eos_token_ids": (4,),
}
# Other tensors, or tensors of another shape: the digest of the weights tells.
IN_THE_WEIGHTS = {
    "vocab_size", "hidden_size", "intermediate_size", "num_heads", "attention_bias", "attention_output_bias",
    "mlp_bias", "qk_norm", "post_norms",
}  # fmt: skip
IN_THE_NAMESPACE = {"architecture", "num_layers", "num_kv_heads", "head_dim"}


def loaded(config: ModelConfig, **changes: Any) -> LoadedModel:
    described: dict[str, Any] = {
        "directory": Path(), "config": config, "files": [], "weights_digest": "aa", "tokenizer_digest": "bb",
        "tokenizer_file": Path(), "chat_template": None, "special_tokens": {},
    }  # fmt: skip
    return LoadedModel(**described | changes)


def identity_of(config: ModelConfig) -> str:
    return identity(EngineConfig(model_dir="m"), loaded(config))


def kv_of(new_loop: Any, checkpoint: Any, config: ModelConfig) -> torch.Tensor:
    """All layers' KV of one prompt, longer than any window here."""
    loop = new_loop(replace(checkpoint, config=config), num_blocks=16)
    loop.add("a", [7 * n % 199 for n in range(40)], 1)
    loop.run()
    return loop.runner.kv.tensor.clone()


def test_no_field_is_forgotten():
    assert {*CHANGES, *NO_CHANGE, *IN_THE_WEIGHTS, *IN_THE_NAMESPACE} == {field.name for field in fields(ModelConfig)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_changes_the_kv_changes_the_identity(name: str, checkpoints, new_loop):
    checkpoint = checkpoints("mha-untied")
    base, value = CHANGES[name]
    config = replace(checkpoint.config, **base)
    changed = replace(config, **{name: value})
    assert not torch.equal(kv_of(new_loop, checkpoint, config), kv_of(new_loop, checkpoint, changed)), "what is tested?"
    assert identity_of(config) != identity_of(changed)


@pytest.mark.parametrize("name", NO_CHANGE)
def test_a_field_that_does_not_change_the_kv_costs_no_hit(name: str, checkpoints, new_loop):
    checkpoint = checkpoints("mha-untied")
    changed = replace(checkpoint.config, **{name: NO_CHANGE[name]})
    assert torch.equal(kv_of(new_loop, checkpoint, checkpoint.config), kv_of(new_loop, checkpoint, changed))
    assert identity_of(checkpoint.config) == identity_of(changed)


def test_each_part_of_the_configuration_and_the_files_counts(tiny):
    model = loaded(tiny.config)
    options: list[dict[str, Any]] = [
        {}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"},
        {"block_size": 32}, {"tensor_parallel_size": 2},
    ]  # fmt: skip
    files = [{"weights_digest": "ab"}, {"tokenizer_digest": "aa"}]
    geometry = {name: getattr(tiny.config, name) for name in sorted(IN_THE_NAMESPACE)}
    digests = [
        *(identity(EngineConfig(model_dir="m", **option), model) for option in options),
        *(identity(EngineConfig(model_dir="m"), loaded(tiny.config, **file)) for file in files),
        *(identity_of(replace(tiny.config, **{name: value * 2})) for name, value in geometry.items()),
    ]
    assert len(set(digests)) == len(digests)


def test_other_hash_seeds_give_the_same_identity(tiny):
    config = replace(tiny.config, rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0})
    code = (
        "from pathlib import Path, PosixPath\n"
        "from paceline_engine.config import EngineConfig\n"
        "from paceline_engine.core_setup import identity\n"
        "from paceline_engine.models.config import ModelConfig\n"
        "from paceline_engine.models.loader import LoadedModel\n"
        f"print(identity(EngineConfig(model_dir='m'), {loaded(config)!r}))\n"
    )
    for seed in ("0", "77"):
        command = [sys.executable, "-c", code]
        out = subprocess.run(command, env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True)
        assert out.stdout.strip() == identity_of(config)
