"""GGUF files of every architecture against the model they were made from, and SentencePiece vocabularies.

Files are written as llama.cpp's converter writes them: its tensor names (the gguf package's table), its permutation,
Gemma's 1 added to norms, Llama 3's rotation factors as a tensor.
"""

from __future__ import annotations

import dataclasses
import io
import math
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import load_file

from paceline_engine.models import loader
from paceline_engine.models.errors import ModelError
from paceline_engine.models.source import resolve
from paceline_engine.tokenizer import Tokenizer, byte_alphabet

VOCAB = [*byte_alphabet(), "<|end|>"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# architecture: transformers' configuration, and the keys that its own converter class adds.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"model_type": "llama", "head_dim": 16, "rope_parameters": LLAMA3}, {}),
    "qwen2": (
        {
            "model_type": "qwen2",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    "qwen3": ({"model_type": "qwen3", "head_dim": 16}, {}),
    "smollm3": ({"model_type": "smollm3", "num_hidden_layers": 4}, {}),
    "gemma": ({"model_type": "gemma", "head_dim": 16, "tie_word_embeddings": True}, {}),
    "gemma2": (
        {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9,
         "tie_word_embeddings": True, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {"attention.sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9,
         "num_hidden_layers": 6,
         "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        {"attention.sliding_window": 9, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
}  # fmt: skip


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def llama3_factors(config: Any) -> np.ndarray:
    """As in llama.cpp's converter."""
    speeds = 1.0 / LLAMA3["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    factors = []
    for wavelength in 2 * math.pi / speeds:
        if wavelength < LLAMA3["original_max_position_embeddings"] / LLAMA3["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > LLAMA3["original_max_position_embeddings"] / LLAMA3["low_freq_factor"]:
            factors.append(LLAMA3["factor"])
        else:
            smooth = (LLAMA3["original_max_position_embeddings"] / wavelength - 1.0) / 3.0
            factors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(factors, np.float32)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCAB)
    writer.add_token_types([1] * 256 + [3])
    writer.add_token_merges([])


def write_gguf(path: Path, architecture: str, checkpoint: Any, extra: dict[str, Any]) -> Path:
    """The checkpoint as a GGUF file of float32 tensors."""
    config = checkpoint.reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(checkpoint.config.head_dim)
    writer.add_rope_freq_base(checkpoint.config.rope_theta)
    for key, value in extra.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{architecture}.{key}", value)
    add_vocabulary(writer)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, values in load_file(checkpoint.files[0]).items():
        if architecture in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            values = permute(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    if architecture == "llama":
        writer.add_tensor("rope_freqs.weight", llama3_factors(checkpoint.config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", FAMILIES)
def test_greedy_from_the_file_equals_transformers(architecture, build, new_loop, prompts_for, tmp_path):
    geometry, extra = FAMILIES[architecture]
    checkpoint = build(tmp_path / "hf", {"vocab_size": len(VOCAB), **geometry})
    path = write_gguf(tmp_path / "m.gguf", architecture, checkpoint, extra)
    model = loader.load_model_dir(loader.prepare_model(resolve(f"file://{path}"), tmp_path / "cache"))
    prompts = prompts_for(4, len(VOCAB), seed=5)
    expected = {str(i): checkpoint.reference_tokens(prompt, 14) for i, prompt in enumerate(prompts)}
    loop = new_loop(dataclasses.replace(checkpoint, config=model.config, files=model.files))
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, 14)
    assert loop.run() == expected


# --- SentencePiece -------------------------------------------------------------------------------------------------

TEXT = (
    "Once upon a time there was a cat, and the cat ran to the other cats. They were the cat's friends!\n"
    "  def cat(time):\n    return time + 1  # the time\n" * 3
).splitlines()
ALPHABET = "abcdehnorstuw  \n\t.,!'+1()#éß東京😀\u2581"


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def spm(request, tmp_path_factory):
    """A trained SentencePiece BPE model, and our tokenizer for a GGUF file with its vocabulary."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=trained, model_type="bpe", vocab_size=340, byte_fallback=True,
        character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=request.param, hard_vocab_limit=False, minloglevel=3,
    )  # fmt: skip
    oracle = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    folder = tmp_path_factory.mktemp("spm")
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    kinds = [("is_unknown", 2), ("is_control", 3), ("is_unused", 5), ("is_byte", 6)]
    ids = range(oracle.vocab_size())
    types = [next((kind for name, kind in kinds if getattr(oracle, name)(i)), 1) for i in ids]
    for add, value in (
        (writer.add_context_length, 64), (writer.add_embedding_length, 8), (writer.add_block_count, 0 + 1),
        (writer.add_feed_forward_length, 8), (writer.add_head_count, 1), (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_tokenizer_model, "llama"), (writer.add_tokenizer_pre, "default"),
        (writer.add_token_list, [oracle.id_to_piece(i) for i in ids]),
        (writer.add_token_scores, [oracle.get_score(i) for i in ids]), (writer.add_token_types, types),
        (writer.add_bos_token_id, oracle.bos_id()), (writer.add_eos_token_id, oracle.eos_id()),
        (writer.add_add_space_prefix, request.param),
    ):  # fmt: skip
        add(value)
    writer.add_tensor("token_embd.weight", np.ones((len(types), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    directory = loader.prepare_model(resolve(f"file://{folder / 'm.gguf'}"), folder / "cache")
    return oracle, Tokenizer(loader.load_model_dir(directory).tokenizer_file)


def test_a_sentencepiece_vocabulary_tokenises_as_sentencepiece_does(spm):
    oracle, tokenizer = spm
    generator = random.Random(7)
    texts = [*TEXT, *("".join(generator.choices(ALPHABET, k=generator.randrange(1, 40))) for _ in range(400))]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text), text
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")
    assert tokenizer.encode("a cat", add_special_tokens=True)[0] == oracle.bos_id()
    assert tokenizer.encode("</s>", add_special_tokens=False)[-1] == oracle.eos_id()


def test_a_sentencepiece_vocabulary_without_byte_pieces_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for add, value in (
        (writer.add_context_length, 64), (writer.add_embedding_length, 8), (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 8), (writer.add_head_count, 1), (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_tokenizer_model, "llama"), (writer.add_token_list, ["<unk>", "a"]),
        (writer.add_token_scores, [0.0, -1.0]), (writer.add_token_types, [2, 1]),
    ):  # fmt: skip
        add(value)
    writer.add_tensor("token_embd.weight", np.ones((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="256 byte pieces"):
        loader.prepare_model(resolve(f"file://{tmp_path / 'm.gguf'}"), tmp_path / "cache")
