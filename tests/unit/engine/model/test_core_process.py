"""The core as a process: ready or failed, heartbeats, answers, aborts, and an end in every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from paceline_engine.backends.simulated import SimulatedBackend
from paceline_engine.config import EngineConfig
from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.scheduler import Scheduler, SchedulerConfig
from paceline_engine.core_process import CoreLoop, spawn
from paceline_engine.core_setup import Core
from paceline_engine.grammar import import_xgrammar
from paceline_engine.messages import (
    AbortRequest,
    AddRequest,
    Command,
    CommandResult,
    CoreFailed,
    CoreReady,
    FromCore,
    LoadGrammar,
    PrepareGrammars,
    SamplingParams,
    Shutdown,
    StepOutputs,
    ToCore,
)
from paceline_engine.sizing import SetupError, size_blocks

DEADLINE = 60.0


class CoreClient:
    """What the API process does, without HTTP: binds both sockets, sends, receives with a deadline."""

    def __init__(self, config: EngineConfig, folder: Path, *, inbox_bound: bool = True) -> None:
        self._context = zmq.Context()
        self.to_core = self._context.socket(zmq.PUSH)
        self.from_core = self._context.socket(zmq.PULL)
        addresses = [f"ipc://{folder}/{name}" for name in ("in", "out")]
        self.inbox_address = addresses[0]
        if inbox_bound:
            self.to_core.bind(addresses[0])
        self.from_core.bind(addresses[1])
        self.process = spawn(config, *addresses)

    def send(self, message: ToCore) -> None:
        self.to_core.send(msgspec.msgpack.encode(message))

    def receive(self, seconds: float = DEADLINE) -> FromCore:
        assert self.from_core.poll(int(seconds * 1000)), "the core is silent"
        return msgspec.msgpack.decode(self.from_core.recv(), type=FromCore)

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.send(AddRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling))

    def finish(self, *request_ids: str) -> tuple[dict[str, list[int]], dict[str, str], StepOutputs]:
        """Receive until all of them ended: tokens and finish reasons by id, and the last message."""
        tokens: dict[str, list[int]] = {name: [] for name in request_ids}
        reasons: dict[str, str] = {}
        while True:
            message = self.receive()
            assert isinstance(message, StepOutputs), message
            for output in message.outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    reasons[output.request_id] = output.finish_reason
            if set(reasons) == set(request_ids):
                return tokens, reasons, message

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._context.destroy(linger=0)


@contextmanager
def running_core(config: EngineConfig, folder: Path) -> Iterator[CoreClient]:
    folder.mkdir(exist_ok=True)
    client = CoreClient(config, folder)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(scope="module")
def model_dir(tiny) -> Path:
    """The tiny checkpoint as a Hugging Face folder; the core needs a tokenizer's digest but never its contents."""
    folder = tiny.files[0].parent
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def cpu_core(model_dir, tmp_path_factory) -> Iterator[CoreClient]:
    config = EngineConfig(model_dir=str(model_dir), kv_cache_bytes=1 << 20, prefill_chunk_tokens=8)
    with running_core(config, tmp_path_factory.mktemp("core")) as client:
        ready = client.receive()
        assert isinstance(ready, CoreReady), ready
        assert len(ready.namespace_digest) == 64
        assert ready.max_model_len == 128
        yield client


@pytest.fixture
def simulated(model_dir) -> EngineConfig:
    return EngineConfig(model_dir=str(model_dir), device="simulated", simulated_alpha_ms=0.5, simulated_beta_ms=0.0)


def test_answers_equal_the_reference(cpu_core, tiny, prompts_for):
    prompts = {str(i): prompt for i, prompt in enumerate(prompts_for(4, tiny.config.vocab_size, seed=8))}
    for name, prompt in prompts.items():
        cpu_core.add(name, prompt, 12)
    tokens, reasons, last = cpu_core.finish(*prompts)
    assert tokens == {name: tiny.reference_tokens(prompt, 12) for name, prompt in prompts.items()}
    assert set(reasons.values()) == {"length"}
    assert last.stats.num_free_blocks == last.stats.num_blocks
    assert last.stats.num_scheduled_tokens >= sum(len(prompt) + 11 for prompt in prompts.values())
    assert last.stats.step_seconds > 0


@pytest.mark.parametrize("loop", [{"num_scheduler_steps": 4}, {"async_scheduling": True}], ids=["steps", "overlapped"])
def test_the_other_loops_answer_alike(model_dir, tmp_path, tiny, prompts_for, loop):
    config = EngineConfig(model_dir=str(model_dir), kv_cache_bytes=1 << 20, prefill_chunk_tokens=8, **loop)
    prompts = {str(i): prompt for i, prompt in enumerate(prompts_for(3, tiny.config.vocab_size, seed=8))}
    with running_core(config, tmp_path) as core:
        assert isinstance(core.receive(), CoreReady)
        for name, prompt in prompts.items():
            core.add(name, prompt, 12)
        tokens, _, last = core.finish(*prompts)
        assert tokens == {name: tiny.reference_tokens(prompt, 12) for name, prompt in prompts.items()}
        assert last.stats.num_free_blocks == last.stats.num_blocks
        core.send(Shutdown())
        assert core.process.wait(DEADLINE) == 0


def test_a_warm_cache_gives_the_same_answers_until_it_is_reset(cpu_core, tiny, prompts_for):
    (prompt,) = prompts_for(1, tiny.config.vocab_size, seed=5, longest=40)
    prompt = (prompt * 40)[:40]
    expected = tiny.reference_tokens(prompt, 8)
    cached: list[int] = []
    for name in ("cold", "warm", "reset"):
        if name == "reset":
            cpu_core.send(Command(command_id="1", name="reset_prefix_cache"))
        cpu_core.add(name, prompt, 8)
        tokens, _, last = cpu_core.finish(name)
        assert tokens[name] == expected
        cached.append(last.outputs[-1].num_cached_tokens)
    assert cached == [0, 32, 0]


def test_an_idle_core_sends_heartbeats_and_ignores_ctrl_c(cpu_core):
    for _ in range(2):
        cpu_core.process.send_signal(signal.SIGINT)
        message = cpu_core.receive(seconds=10)
        assert isinstance(message, StepOutputs)
        assert message.outputs == ()


def test_abort_ends_a_request_and_frees_its_blocks(cpu_core):
    cpu_core.add("long", [1, 2, 3], 100)
    cpu_core.send(AbortRequest(request_id="long"))
    _, reasons, last = cpu_core.finish("long")
    assert reasons == {"long": "abort"}
    assert last.stats.num_free_blocks == last.stats.num_blocks


def test_a_refused_request_gets_its_terminal_output(cpu_core):
    cpu_core.add("endless", list(range(150)), 5)
    assert cpu_core.finish("endless")[1] == {"endless": "error"}


def test_a_grammar_is_loaded_while_the_core_idles_and_requests_name_it(cpu_core, tiny):
    xgrammar = import_xgrammar()
    words = ["", "</s>", *map(chr, range(48, 58))]
    words += [f"<unused{i}>" for i in range(tiny.config.vocab_size - len(words))]
    info = xgrammar.TokenizerInfo(words, vocab_size=len(words), stop_token_ids=[1])
    compiled = xgrammar.GrammarCompiler(info).compile_regex("[0-9]{40}").serialize_json().encode()
    cpu_core.send(PrepareGrammars())
    cpu_core.send(PrepareGrammars(vocabulary=info.serialize_json().encode()))
    cpu_core.send(LoadGrammar(command_id="l1", grammar_id=1, grammar=compiled))
    cpu_core.send(LoadGrammar(command_id="l2", grammar_id=2, grammar=b"nonsense"))
    results: dict[str, CommandResult] = {}
    while len(results) < 2:
        results |= {result.command_id: result for result in cpu_core.receive().results}
    assert results["l1"].values["bytes"] > 0
    assert "can't be loaded" in str(results["l2"].error)
    for name, grammar_id in (("good", 1), ("bad", 2)):
        sampling = SamplingParams(max_tokens=9)
        cpu_core.send(AddRequest(request_id=name, prompt_token_ids=(5, 6), sampling=sampling, grammar_id=grammar_id))
    tokens, reasons, last = cpu_core.finish("good", "bad")
    assert reasons == {"good": "length", "bad": "error"}
    assert all(words[token].isdigit() for token in tokens["good"])
    assert (last.stats.device["grammar_loaded"], last.stats.device["grammar_waited"]) == (2, 0)


def test_shutdown_ends_live_requests_and_the_process(simulated, tmp_path):
    with running_core(simulated, tmp_path) as core:
        assert isinstance(core.receive(), CoreReady)
        core.add("a", [1, 2, 3], 100)
        core.send(Shutdown())
        assert core.finish("a")[1] == {"a": "abort"}
        assert core.process.wait(DEADLINE) == 0


def test_the_core_is_not_ready_before_it_can_be_reached(simulated, tmp_path):
    core = CoreClient(simulated, tmp_path, inbox_bound=False)
    try:
        assert not core.from_core.poll(3000), "ready, although nothing can be sent to it"
        core.to_core.bind(core.inbox_address)
        assert isinstance(core.receive(), CoreReady)
        for path in tmp_path.iterdir():
            path.unlink()
        core.add("a", [1, 2, 3], 4)
        assert core.finish("a")[1] == {"a": "length"}
    finally:
        core.close()


def test_a_model_that_cannot_be_loaded_is_one_clear_line(tmp_path):
    with running_core(EngineConfig(model_dir=str(tmp_path / "nowhere"), device="simulated"), tmp_path) as core:
        failed = core.receive()
        assert isinstance(failed, CoreFailed)
        assert "nowhere" in failed.message
        assert "\n" not in failed.message
        assert core.process.wait(DEADLINE) == 1


def test_a_message_that_makes_no_sense_ends_the_core_loudly(simulated, tmp_path):
    with running_core(simulated, tmp_path) as core:
        assert isinstance(core.receive(), CoreReady)
        core.to_core.send(b"\xc1")
        while isinstance(message := core.receive(), StepOutputs):
            pass
        assert isinstance(message, CoreFailed)
        assert core.process.wait(DEADLINE) == 1


def test_the_core_dies_with_its_parent(simulated, tmp_path):
    code = (
        "import sys, msgspec\n"
        "from paceline_engine.config import EngineConfig\n"
        "from paceline_engine.core_process import spawn\n"
        "config = msgspec.json.decode(sys.argv[1], type=EngineConfig)\n"
        "process = spawn(config, *sys.argv[2:4])\n"
        "sys.stdout.write(str(process.pid))\n"
        "sys.stdout.flush()\n"
        "import os; os._exit(0)\n"
    )
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("in", "out")]
    command = [sys.executable, "-c", code, msgspec.json.encode(simulated).decode(), *addresses]
    # Not a pipe: the core inherits its write end, so reading to its end would itself wait for the core.
    with (tmp_path / "pid").open("w") as output:
        subprocess.run(command, stdout=output, check=True, timeout=DEADLINE)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + DEADLINE
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the core outlived its parent"
        time.sleep(0.05)


def test_the_simulated_core_never_imports_torch(simulated):
    code = (
        "import sys, msgspec\n"
        "from paceline_engine.config import EngineConfig\n"
        "from paceline_engine import core_process, core_setup\n"
        "core_setup.build_core(msgspec.json.decode(sys.argv[1], type=EngineConfig))\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, msgspec.json.encode(simulated).decode()]
    subprocess.run(command, check=True, timeout=DEADLINE)


def test_bad_arguments_exit_with_2(tmp_path):
    command = [sys.executable, "-m", "paceline_engine.core_process", "ipc://a", "ipc://b", "1"]
    environment = {**os.environ, "PACELINE_CORE_CONFIG": '{"model_dir": "x", "block_size": 0}'}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert result.returncode == 2
    assert "block_size must be at least 1" in result.stderr


def simulate(seed: int, chunk: int, sleeps: list[float], messages: list[ToCore]) -> list[FromCore]:
    """The loop over a simulated device, fed from a list; it ends with Shutdown when the list and the work are done."""
    backend = SimulatedBackend(vocab_size=1000, seed=seed, alpha_ms=5.0, beta_ms=0.5, sleep=sleeps.append)
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=32, prefill_chunk_tokens=chunk, max_model_len=64, max_num_waiting=8
    )
    scheduler = Scheduler(config, KVManager(BlockPool(12), 4))
    inbox = list(messages)
    sent: list[FromCore] = []

    def receive(_seconds: float) -> ToCore | None:
        if inbox:
            return inbox.pop(0)
        return None if scheduler.has_work else Shutdown()

    core = Core(scheduler=scheduler, backend=backend, max_model_len=64, namespace_digest="00" * 32)
    clock = iter(range(10_000))
    CoreLoop(core, receive, sent.append, clock=lambda: float(next(clock))).run()
    return sent


def adds(count: int) -> list[ToCore]:
    sampling = SamplingParams(max_tokens=20)
    return [AddRequest(request_id=str(i), prompt_token_ids=(i, 2, 3, 4, 5, 6), sampling=sampling) for i in range(count)]


def tokens_of(sent: list[FromCore]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for message in sent:
        assert isinstance(message, StepOutputs)
        for output in message.outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def test_simulated_tokens_depend_on_neither_batch_nor_chunks_nor_preemption():
    sent = simulate(1, chunk=16, sleeps=[], messages=adds(4))
    together = tokens_of(sent)
    assert isinstance(sent[-1], StepOutputs)
    assert sent[-1].stats.num_preemptions > 0
    assert all(len(tokens) == 20 for tokens in together.values())
    assert len({tuple(tokens) for tokens in together.values()}) == 4
    assert tokens_of(simulate(1, chunk=2, sleeps=[], messages=adds(1))) == {"0": together["0"]}
    assert tokens_of(simulate(2, chunk=16, sleeps=[], messages=adds(4))) != together


def test_a_simulated_step_sleeps_alpha_plus_beta_per_token():
    sleeps: list[float] = []
    simulate(1, chunk=16, sleeps=sleeps, messages=adds(1))
    assert sleeps[0] == pytest.approx(0.005 + 0.0005 * 6)
    assert sleeps[1:] == pytest.approx([0.0055] * 19)


def test_stats_count_steps_tokens_and_time():
    last = simulate(1, chunk=16, sleeps=[], messages=adds(1))[-1]
    assert isinstance(last, StepOutputs)
    assert (last.stats.num_steps, last.stats.num_scheduled_tokens, last.stats.step_seconds) == (20, 25, 20.0)


def test_cache_size_gives_the_number_of_blocks_and_the_length(tiny):
    per_block = tiny.config.kv_bytes_per_token(4) * 16
    assert size_blocks(EngineConfig(model_dir="m", kv_cache_bytes=3 * per_block + 1), tiny.config) == (3, 48)
    assert size_blocks(EngineConfig(model_dir="m", kv_cache_bytes=1000 * per_block), tiny.config) == (1000, 128)
    exact = EngineConfig(model_dir="m", kv_cache_bytes=6 * per_block, max_model_len=90)
    assert size_blocks(exact, tiny.config) == (6, 90)


def test_a_cache_too_small_and_a_length_too_large_are_refused_with_a_remedy(tiny):
    per_block = tiny.config.kv_bytes_per_token(4) * 16
    with pytest.raises(SetupError, match="fewer than 120; set kv-cache-memory to at least 1Mi or lower"):
        size_blocks(EngineConfig(model_dir="m", kv_cache_bytes=per_block, max_model_len=120), tiny.config)
    with pytest.raises(SetupError, match="beyond the model's 128 positions"):
        size_blocks(EngineConfig(model_dir="m", max_model_len=129), tiny.config)
