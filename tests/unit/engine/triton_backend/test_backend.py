"""The whole engine core on the GPU backend, under the interpreter, beside the CPU's."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from tiny_models import LLAMA, make_config, random_tensors, save

from paceline_engine.backends.choice import settle_device
from paceline_engine.backends.triton.device import compiler_problem
from paceline_engine.backends.warm_up import compile_kernels, warm_up
from paceline_engine.batch import build_batch
from paceline_engine.config import EngineConfig
from paceline_engine.core.outputs import StepPlan
from paceline_engine.core.step_log import StepLog
from paceline_engine.core_commands import Commands
from paceline_engine.core_process import CoreLoop
from paceline_engine.core_setup import Core, build_core
from paceline_engine.kernels.attention import choose_tiling
from paceline_engine.messages import AddRequest, Command, FromCore, SamplingParams, Shutdown, StepOutputs, ToCore

MAX_MODEL_LEN, BLOCK_SIZE = 48, 4
# Float32: two layers, keys and values, one head of 16.
BLOCK_BYTES = 2 * 2 * 16 * 4 * BLOCK_SIZE


@pytest.fixture(scope="module")
def vocab_size() -> int:
    return LLAMA["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny random Llama as Hugging Face lays models out."""
    path = tmp_path_factory.mktemp("llama")
    save(path, random_tensors(make_config()))
    description = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": LLAMA["vocab_size"],
        "hidden_size": LLAMA["hidden_size"],
        "intermediate_size": LLAMA["intermediate_size"],
        "num_hidden_layers": LLAMA["num_layers"],
        "num_attention_heads": LLAMA["num_heads"],
        "num_key_value_heads": LLAMA["num_kv_heads"],
        "head_dim": LLAMA["head_dim"],
        "max_position_embeddings": LLAMA["max_position_embeddings"],
        "rms_norm_eps": LLAMA["rms_norm_eps"],
        "rope_theta": LLAMA["rope_theta"],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(description))
    (path / "tokenizer.json").write_text("{}")
    return path


def core(folder: Path, **options: Any) -> Core:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_bytes": 1 << 20,
        "kv_store_bytes": 1 << 20,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "prefill_chunk_tokens": 7,
    }
    return build_core(EngineConfig(model_dir=str(folder), **{**settings, **options}))


def answers(made: Core, requests: Sequence[AddRequest]) -> dict[str, tuple[list[int], str, str | None]]:
    """Tokens, why they ended and what went wrong, by request, through the real core loop."""
    messages: list[ToCore] = list(requests)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended: dict[str, tuple[list[int], str, str | None]] = {}

    def receive(_seconds: float) -> ToCore | None:
        if messages:
            return messages.pop(0)
        return None if made.scheduler.has_work else Shutdown()

    def keep(message: FromCore) -> None:
        assert isinstance(message, StepOutputs)
        made.scheduler.check_integrity()
        for output in message.outputs:
            assert output.request_id not in ended, "an output after the terminal one"
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                ended[output.request_id] = (tokens[output.request_id], output.finish_reason, output.error)

    CoreLoop(made, receive, keep).run()
    assert ended.keys() == tokens.keys()
    return ended


def requests(seed: int, count: int, vocab_size: int, **sampling: Any) -> list[AddRequest]:
    """Prompts of which some begin alike; none of their texts ends before its length."""
    rng = random.Random(seed)
    trunk = [rng.randrange(3, vocab_size) for _ in range(8)]
    return [
        AddRequest(
            request_id=str(number),
            prompt_token_ids=tuple(
                trunk[: rng.choice((0, 4, 8))] + [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 5))]
            ),
            sampling=SamplingParams(max_tokens=rng.choice((2, 3, 5)), ignore_eos=True, seed=number, **sampling),
        )
        for number in range(count)
    ]


def crowd(count: int, vocab_size: int, **sampling: Any) -> list[AddRequest]:
    """Requests that begin with two blocks and end with three; five blocks are too few for two of them."""
    rng = random.Random(1)
    return [
        AddRequest(
            request_id=str(number),
            prompt_token_ids=tuple(rng.randrange(3, vocab_size) for _ in range(6)),
            sampling=SamplingParams(max_tokens=5, ignore_eos=True, seed=number, **sampling),
        )
        for number in range(count)
    ]


CROWDED: dict[str, Any] = {"kv_cache_bytes": 5 * BLOCK_BYTES, "max_model_len": 20, "enable_prefix_caching": False}


def test_greedy_text_is_the_cpus(folder, vocab_size):
    """Prefills in chunks beside decodes, shared prefixes, more requests than places."""
    wanted = requests(0, 7, vocab_size, temperature=0.0)
    assert answers(core(folder, device="cuda"), wanted) == answers(core(folder, device="cpu"), wanted)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 0.7, "frequency_penalty": 0.6, "min_tokens": 4, "stop_token_ids": (7, 9, 11, 13, 15, 17)},
    {"temperature": 0.0, "logit_bias": ((5, 3.0), (6, 2.0)), "bad_words": ((5, 6), (8,))},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(20, 60))},
    {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
]


def test_sampled_text_is_the_cpus_with_every_rule_and_cut(folder, vocab_size):
    """Steps overlap on the device by default, and some requests lose their blocks."""
    wanted = [
        replace(request, sampling=replace(request.sampling, **MIXED[number % len(MIXED)]))
        for number, request in enumerate(crowd(len(MIXED), vocab_size))
    ]
    plain = answers(core(folder, device="cpu"), wanted)
    tight = core(folder, device="cuda", **CROWDED)
    assert tight.overlapped
    assert answers(tight, wanted) == plain
    assert tight.scheduler.num_preemptions > 0
    assert tight.scheduler.kv.num_restored_sequences > 0


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False, "enforce_eager": True},
        {"num_scheduler_steps": 3},
        {"speculative_method": "ngram"},
        {"speculative_method": "selfDraft", "speculative_layers": 1, "speculative_num_tokens": 2},
    ],
    ids=["synchronous and eager", "several steps", "n-gram guesses", "layers that draft"],
)
def test_greedy_text_does_not_depend_on_how_steps_are_made(folder, vocab_size, monkeypatch, options):
    # A tiny model's guess costs as much as a step, so that nobody would want one.
    monkeypatch.setattr("paceline_engine.backends.triton.backend.measure_draft_cost", lambda _: 0.1)
    wanted = requests(2, 3, vocab_size, temperature=0.0)
    assert answers(core(folder, device="cuda", **options), wanted) == answers(core(folder, device="cpu"), wanted)


def test_kv_of_8_bits_is_offloaded_and_restored_with_its_scales(folder, vocab_size):
    """The text with room for all, and where sequences lose their blocks to the store and come back."""
    wanted = crowd(2, vocab_size, temperature=0.0)
    # A vector of 16 numbers in 8 bits, and its scale.
    in_8_bits = {**CROWDED, "kv_cache_bytes": CROWDED["kv_cache_bytes"] * (16 + 4) // (16 * 4)}
    options = {"device": "cuda", "kv_cache_dtype": "int8"}
    roomy, tight = core(folder, **options), core(folder, **options, **in_8_bits)
    assert answers(tight, wanted) == answers(roomy, wanted)
    assert tight.scheduler.kv.num_restored_sequences > 0


def test_a_sleeping_engine_has_no_kv_and_wakes_up_right(folder, vocab_size):
    made = core(folder, device="cuda")
    wanted = requests(4, 2, vocab_size, temperature=0.0)
    before = answers(made, wanted)
    log = StepLog(made.scheduler)
    log.begin()
    commands = Commands(made.scheduler, made.backend, log, made.handoffs)
    recorded = cast("Any", made.backend)._resident._graphs._graphs
    recorded[1] = "stands for a CUDA graph"
    assert commands.run(Command(command_id="1", name="sleep", arguments={}), 0.0)[0].error is None
    assert not recorded, "graphs know the address of KV that is gone"
    assert made.backend._resident.kv.tensor.untyped_storage().nbytes() == 0
    assert commands.run(Command(command_id="2", name="wake", arguments={}), 0.0)[0].error is None
    assert answers(made, wanted) == before


def test_a_steps_time_on_the_gpu_has_no_time_of_the_host_in_it(folder, monkeypatch):
    """An idle GPU would pass the first mark while the host still lays out the step; released rows are no step."""
    runner: Any = cast("Any", core(folder, device="cpu").backend)._runner
    seen: list[str] = []

    @contextmanager
    def marked(_plan: StepPlan) -> Iterator[None]:
        seen.append("begin")
        yield
        seen.append("end")

    monkeypatch.setattr(runner, "_around_launch", marked)
    monkeypatch.setattr(
        "paceline_engine.runner.build_batch", lambda *given: seen.append("laid out") or build_batch(*given)
    )
    forward = runner._forward
    monkeypatch.setattr(runner, "_forward", lambda batch: seen.append("handed over") or forward(batch))
    warm_up(runner)
    assert seen == ["laid out", "begin", "handed over", "end"]


def test_kernels_are_compiled_before_anybody_waits_for_them(folder, vocab_size, monkeypatch):
    """Under the interpreter: a start as on a GPU changes no text, and steps with every tiling of attention."""
    made = core(folder, device="cuda")
    backend: Any = made.backend
    seen: list[StepPlan] = []
    execute = backend._runner.execute
    monkeypatch.setattr(backend._runner, "execute", lambda plan: seen.append(plan) or execute(plan))
    compile_kernels(backend._runner, most_tokens=backend._longest_share())
    items = [item for plan in seen for item in plan.scheduled]
    lengths = {item.num_tokens for item in items}
    assert max(lengths) == 7
    for group in (1, 3, 4):
        tilings = {choose_tiling(length, group, 128) for length in range(1, 8)}
        assert {choose_tiling(length, group, 128) for length in lengths} == tilings
    assert {item.num_draft_tokens for item in items} == {0, 1}
    sampled = [admitted.sampling for plan in seen for admitted in plan.admitted]
    assert {(each.temperature > 0.0, each.top_k > 0, each.presence_penalty > 0.0) for each in sampled} == {
        (False, False, False),
        (True, False, False),
        (True, True, True),
    }
    wanted = requests(6, 3, vocab_size, temperature=0.0)
    assert answers(made, wanted) == answers(core(folder, device="cpu"), wanted)


def test_a_device_that_is_not_there_is_refused_with_what_to_do():
    """In a process of its own, without the interpreter."""
    code = (
        "from paceline_engine.backends.choice import settle_device\n"
        "from paceline_engine.config import EngineConfig\n"
        "print(settle_device(EngineConfig(model_dir='')).device)\n"
        "settle_device(EngineConfig(model_dir='', device='cuda'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == ["cpu"]
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ValueError: --device cuda: ")
    assert "use --device cpu" in message


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"), ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2")],
)
def test_what_only_gpus_do_is_refused_on_the_cpu(folder, options, flag):
    with pytest.raises(ValueError, match=f"{flag} needs GPUs, and this engine runs on cpu"):
        core(folder, device="cpu", **options)


def test_a_gpu_without_a_c_compiler_is_refused_with_what_to_install(monkeypatch):
    """Triton would fail at the first kernel, when the model is loaded."""
    monkeypatch.delenv("CC", raising=False)
    assert compiler_problem() is None
    monkeypatch.setenv("PATH", "")
    assert "install gcc, or name one in $CC" in (compiler_problem() or "")
    monkeypatch.setenv("CC", "/opt/cc")
    assert compiler_problem() is None


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_is_refused_for_a_card_that_has_none(monkeypatch, capability, fits):
    """And not by the compiler, when the model is loaded."""
    monkeypatch.setattr("paceline_engine.backends.triton.device.gpu_problem", lambda: None)
    monkeypatch.setattr("paceline_engine.backends.triton.device.is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    config = EngineConfig(model_dir="", device="cuda", kv_cache_dtype="fp8")
    if fits:
        assert settle_device(config) == config
    else:
        says = f"--kv-cache-dtype fp8: A card has compute capability {capability[0]}.{capability[1]} and fp8 needs 8.9"
        assert _refusal(lambda: settle_device(config)) == f"{says} or later; use int8"
    assert settle_device(EngineConfig(model_dir="", device="cuda", kv_cache_dtype="int8")).kv_dtype == "int8"


def test_a_model_that_is_spread_over_two_ranks_gives_the_cpus_text(folder, vocab_size):
    """The other rank is a process of its own, which follows steps, sleep and wake, and ends with the device."""
    wanted = requests(5, 2, vocab_size, temperature=0.0)
    made = core(folder, device="cuda", tensor_parallel_size=2)
    backend: Any = made.backend
    try:
        assert answers(made, wanted) == answers(core(folder, device="cpu"), wanted)
        backend.release_kv()
        backend.allocate_kv()
        made.scheduler.reset_prefix_cache()
        assert answers(made, wanted[:1]) == answers(core(folder, device="cpu"), wanted[:1])
        assert "not built" in _refusal(backend.load_adapter, "tuned", "nowhere")
        recorded = backend._resident._graphs._graphs
        recorded[1] = "stands for a CUDA graph"
    finally:
        backend.close()
    assert not recorded, "NCCL waits for the graphs that have its collectives in them"
    assert [process.returncode for process in backend._workers._processes] == [0]


def test_ranks_that_do_not_listen_do_not_keep_the_engine_from_ending(folder, monkeypatch):
    """As where a step has failed on rank 0, and the others wait for it in a collective."""
    monkeypatch.setattr("paceline_engine.backends.triton.workers.CLOSE_SECONDS", 0.5)
    backend: Any = core(folder, device="cuda", tensor_parallel_size=2).backend
    processes = backend._workers._processes
    processes[0].send_signal(signal.SIGSTOP)
    backend.close()
    assert [process.returncode for process in processes] == [-signal.SIGKILL]


def test_a_model_that_cannot_be_spread_so_is_refused_before_there_are_processes(folder, monkeypatch):
    """Their own failure would end the engine before it could say why."""
    monkeypatch.setattr("paceline_engine.backends.triton.workers.Workers", None)
    message = _refusal(lambda: core(folder, device="cuda", tensor_parallel_size=3))
    assert message == "--tensor-parallel-size 3: the model's 2 query heads can't be divided by it: use 1 or 2"


def _refusal(call: Any, *arguments: str) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call(*arguments)
    return str(error.value)
