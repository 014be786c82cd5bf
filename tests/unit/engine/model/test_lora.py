"""LoRA adapters against PEFT: several in one batch, base rows bit for bit, load and unload, what is refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline_engine.config import EngineConfig
from paceline_engine.core.step_log import StepLog
from paceline_engine.core_commands import Commands
from paceline_engine.core_setup import build_core
from paceline_engine.messages import AddRequest, Command, CommandResult, SamplingParams
from paceline_engine.models.decoder import Decoder
from paceline_engine.models.lora_files import AdapterFolder, LoraError

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "everything": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "qv": {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
    "stabilised": {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": ["down_proj", "up_proj"]},
    "patterns": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["k_proj", "o_proj", "gate_proj"],
        "rank_pattern": {"layers.1.self_attn.o_proj": 5},
        "alpha_pattern": {"k_proj": 16},
        "layers_to_transform": [0, 1],
    },
}


@pytest.fixture(scope="module")
def adapters(build, tmp_path_factory):
    """A Qwen2 checkpoint (biased projections), each adapter saved by PEFT, and PEFT's own model with all of them."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("lora")
    checkpoint = build(folder / "model", {"model_type": "qwen2"})
    torch.manual_seed(5)
    configs = {
        name: LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **options)
        for name, options in ADAPTERS.items()
    }
    with warnings.catch_warnings():  # Of names that transformers deprecated.
        warnings.simplefilter("ignore")
        model = get_peft_model(checkpoint.reference, configs["everything"], adapter_name="everything")
        for name in list(configs)[1:]:
            model.add_adapter(name, configs[name])
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    with warnings.catch_warnings():  # It looks for the base model's configuration on the hub.
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return checkpoint, model.eval(), {name: folder / name for name in ADAPTERS}


def reference_tokens(adapters, name: str | None, prompt: list[int], count: int) -> list[int]:
    checkpoint, model, _ = adapters
    if name is None:
        with model.disable_adapter():
            return checkpoint.reference_tokens(prompt, count)
    model.set_adapter(name)
    return checkpoint.reference_tokens(prompt, count)


def add(loop, request_id: str, prompt: list[int], count: int, adapter: str | None) -> None:
    message = AddRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=count, logprobs=0),
        adapter=adapter,
    )
    assert loop.scheduler.add(message) is None


def load(loop, name: str, folder: Path) -> str:
    digest = loop.runner._decoder.adapters.load(name, folder)
    loop.scheduler.arrivals.set_adapter(name, digest)
    return digest


def test_a_mixed_batch_equals_peft_request_by_request(adapters, new_loop, prompts_for):
    checkpoint, _, folders = adapters
    loop = new_loop(checkpoint, prefill_chunk_tokens=7)
    for name, folder in folders.items():
        load(loop, name, folder)
    prompts = prompts_for(3, checkpoint.config.vocab_size, seed=2)
    expected = {}
    for i, prompt in enumerate(prompts):
        for name in (None, *ADAPTERS):
            expected[f"{name} {i}"] = reference_tokens(adapters, name, prompt, 12)
            add(loop, f"{name} {i}", prompt, 12, name)
    assert len({tuple(expected[f"{name} 0"]) for name in (None, *ADAPTERS)}) == 5, "adapters that change too little"
    assert loop.run() == expected


def test_base_rows_are_the_same_bits_beside_adapters(adapters):
    checkpoint, _, folders = adapters
    decoder = Decoder(checkpoint.config, checkpoint.files, max_model_len=64, dtype=torch.float32)
    for name, folder in folders.items():
        decoder.adapters.load(name, folder)
    ids, positions = torch.arange(40), torch.zeros(40, dtype=torch.int64)

    def logits(names: list[str | None]) -> torch.Tensor:
        deltas = decoder.adapters.deltas(names, [10] * 4)
        return decoder.forward(ids, positions, torch.arange(40), lambda layer, q, k, v: q, deltas)

    alone = logits([None] * 4)
    mixed = logits([None, "qv", None, "everything"])
    assert torch.equal(mixed[:10], alone[:10])
    assert torch.equal(mixed[20:30], alone[20:30])
    assert not torch.allclose(mixed[10:20], alone[10:20])
    assert not torch.allclose(mixed[30:], alone[30:])


def test_the_digest_is_of_the_content(adapters, tmp_path, new_loop):
    checkpoint, _, folders = adapters
    loop = new_loop(checkpoint)
    first = load(loop, "a", folders["qv"])
    assert load(loop, "b", folders["qv"]) == first
    copy = tmp_path / "copy"
    copy.mkdir()
    weights = load_file(folders["qv"] / "adapter_model.safetensors")
    (copy / "adapter_config.json").write_bytes((folders["qv"] / "adapter_config.json").read_bytes())
    save_file(weights, copy / "adapter_model.safetensors")
    changed = next(iter(weights))
    weights[changed] = weights[changed] + 1
    save_file(weights, copy / "adapter_model.safetensors")
    assert load(loop, "a", copy) != first
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1}))
    assert load(loop, "a", copy) not in (first, load(loop, "b", folders["qv"]))


def test_replaced_weights_serve_the_next_request_and_share_no_cached_prefix(adapters, new_loop, prompts_for):
    checkpoint, _, folders = adapters
    loop = new_loop(checkpoint)
    prompt = prompts_for(1, checkpoint.config.vocab_size, longest=1)[0] * 12
    for run, name in enumerate(("everything", "patterns", "everything")):
        load(loop, "tuned", folders[name])
        add(loop, str(run), prompt, 8, "tuned")
        assert loop.run()[str(run)] == reference_tokens(adapters, name, prompt, 8)


def test_a_request_for_an_adapter_that_is_gone_fails_alone(adapters, new_loop):
    checkpoint, _, folders = adapters
    loop = new_loop(checkpoint)
    load(loop, "tuned", folders["qv"])
    add(loop, "tuned", [1, 2, 3], 4, "tuned")
    add(loop, "base", [1, 2, 3], 4, None)
    loop.runner._decoder.adapters.unload("tuned")
    loop.run()
    assert loop.finished["tuned"].error == "the adapter 'tuned' isn't loaded"
    assert loop.tokens["base"] == reference_tokens(adapters, None, [1, 2, 3], 4)


def test_adapters_are_bounded_in_number_and_rank(adapters):
    checkpoint, _, folders = adapters
    options = {"max_model_len": 16, "dtype": torch.float32}
    table = Decoder(checkpoint.config, checkpoint.files, max_adapters=1, max_rank=4, **options).adapters
    table.load("a", folders["qv"])
    table.load("a", folders["everything"])
    with pytest.raises(LoraError, match="1 adapters are loaded, the most there may be: unload one"):
        table.load("b", folders["qv"])
    with pytest.raises(LoraError, match="has rank 9, over the 4 that are allowed: raise --max-lora-rank"):
        table.load("a", folders["stabilised"])
    with pytest.raises(LoraError, match="'b' isn't loaded"):
        table.unload("b")
    table.unload("a")
    assert "a" not in table


def damage(folder: Path, source: Path, config: dict[str, Any], tensors: dict[str, Any], cut: int) -> Path:
    folder.mkdir()
    made = json.loads((source / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps(made))
    weights = load_file(source / "adapter_model.safetensors")
    for name, change in tensors.items():
        full = f"base_model.model.model.layers.0.{name}" if not name.startswith("base_model") else name
        weights[full] = change(weights.get(full))
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, folder / "adapter_model.safetensors")
    data = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data[: len(data) - cut])
    return folder


@pytest.mark.parametrize(
    ("config", "tensors", "cut", "says"),
    [
        ({"use_dora": True}, {}, 0, "use_dora True is not built"),
        ({"bias": "all"}, {}, 0, "bias 'all' is not built"),
        ({"peft_type": "IA3"}, {}, 0, "peft_type 'IA3' is not built: it must be 'LORA'"),
        ({"modules_to_save": ["lm_head"]}, {}, 0, "modules_to_save"),
        ({"r": 7}, {}, 0, r"q_proj has rank 3, adapter_config.json says 7"),
        ({"lora_alpha": "x"}, {}, 0, "alpha 'x'"),
        ({"rank_pattern": {"(": 3}}, {}, 0, "is no pattern"),
        ({}, {}, 9, "truncated or damaged"),
        ({}, {"self_attn.q_proj.lora_A.weight": lambda _: None}, 0, "layer 0 q_proj has only lora_B"),
        ({}, {"self_attn.q_proj.lora_B.weight": lambda t: t[:-1].clone()}, 0, "it is for another model"),
        ({}, {"self_attn.q_proj.lora_B.weight": lambda t: t * float("nan")}, 0, "not finite"),
        ({}, {"base_model.model.lm_head.lora_A.weight": lambda _: torch.ones(2, 2)}, 0, "lm_head.*target only q_proj"),
        ({}, {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": lambda _: torch.ones(2, 2)}, 0, "3 layers"),
    ],
)
def test_an_adapter_that_would_be_computed_wrongly_is_refused(adapters, tmp_path, config, tensors, cut, says):
    checkpoint, _, folders = adapters
    decoder = Decoder(checkpoint.config, checkpoint.files, max_model_len=16, dtype=torch.float32)
    folder = damage(tmp_path / "bad", folders["qv"], config, tensors, cut)
    with pytest.raises(LoraError, match=says) as refused:
        decoder.adapters.load("bad", folder)
    assert "\n" not in str(refused.value)
    assert "bad" not in decoder.adapters


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_one_of_its_files_is_refused(adapters, tmp_path, missing):
    checkpoint, _, folders = adapters
    decoder = Decoder(checkpoint.config, checkpoint.files, max_model_len=16, dtype=torch.float32)
    folder = damage(tmp_path / "bad", folders["qv"], {}, {}, 0)
    (folder / missing).unlink()
    with pytest.raises(LoraError, match=f"can't read {missing}"):
        decoder.adapters.load("bad", folder)


def test_commands_load_and_unload_on_the_running_core(adapters, tmp_path):
    checkpoint, _, folders = adapters
    model = checkpoint.files[0].parent
    (model / "tokenizer.json").write_text("{}")
    core = build_core(EngineConfig(model_dir=str(model), kv_cache_bytes=4 << 20, block_size=4))
    log = StepLog(core.scheduler)
    log.begin()
    commands = Commands(core.scheduler, core.backend, log, core.handoffs)

    def run(name: str, /, **arguments: str) -> CommandResult:
        return commands.run(Command(command_id="1", name=name, arguments=arguments), 0.0)[0]

    loaded = run("load_adapter", name="tuned", path=str(folders["qv"]))
    assert loaded.error is None
    assert loaded.values["digest"] == AdapterFolder(folders["qv"]).digest()
    assert "can't read adapter_config.json" in (run("load_adapter", name="x", path=str(tmp_path)).error or "")
    message = AddRequest(
        request_id="a", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=4), adapter="tuned"
    )
    assert core.scheduler.add(message) is None
    assert "1 requests use the adapter 'tuned'" in (run("unload_adapter", name="tuned").error or "")
    tokens: list[int] = []
    while core.scheduler.has_work:
        plan = core.scheduler.schedule()
        for output in core.scheduler.update(plan, core.backend.execute(plan)):
            tokens += output.new_token_ids
    assert tokens == reference_tokens(adapters, "qv", [1, 2, 3], 4)
    assert run("unload_adapter", name="tuned").error is None
    assert "isn't loaded" in (run("unload_adapter", name="tuned").error or "")
