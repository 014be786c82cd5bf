"""A sleeping engine's KV pool: its memory is given back, its address stays, and the engine serves again as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline_engine.backends.cpu import CpuBackend
from paceline_engine.backends.pages import release_pages
from paceline_engine.config import EngineConfig
from paceline_engine.core.outputs import StepPlan
from paceline_engine.core.step_log import StepLog
from paceline_engine.core_commands import Commands
from paceline_engine.core_setup import build_core
from paceline_engine.messages import AddRequest, Command, SamplingParams

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux only")
def test_memory_goes_back_and_the_address_stays():
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    address, before = tensor.data_ptr(), resident_bytes()
    assert release_pages(tensor) > 63 * MIB
    assert resident_bytes() < before - 60 * MIB
    assert tensor.data_ptr() == address
    assert int(tensor[1 * MIB : 63 * MIB].sum()) == 0
    assert release_pages(tensor[::2]) == 0
    assert release_pages(torch.ones(3)) == 0


def test_a_sleeping_core_forgets_its_kv_and_serves_again(tiny, prompts_for):
    folder = tiny.files[0].parent
    (folder / "tokenizer.json").write_text("{}")
    core = build_core(EngineConfig(model_dir=str(folder), kv_cache_bytes=4 * MIB, kv_store_bytes=0))
    scheduler, backend = core.scheduler, core.backend
    assert isinstance(backend, CpuBackend)
    log = StepLog(scheduler)
    log.begin()
    commands = Commands(scheduler, backend, log, core.handoffs)
    (prompt,) = prompts_for(1, tiny.config.vocab_size, seed=3, longest=60)

    def serve(name: str) -> list[int]:
        sampling = SamplingParams(max_tokens=6)
        scheduler.add(AddRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
        tokens: list[int] = []
        while scheduler.has_work:
            plan = scheduler.schedule()
            for output in scheduler.update(plan, backend.execute(plan)):
                tokens += output.new_token_ids
        backend.execute(StepPlan(released=scheduler.schedule().released))
        return tokens

    expected = tiny.reference_tokens(prompt, 6)
    assert serve("before") == expected
    assert commands.run(Command(command_id="1", name="sleep"), 0.0)[0].values == {"asleep": True}
    pool = backend._runner.kv.tensor
    assert int(pool.flatten()[4096:-4096].count_nonzero()) == 0
    commands.run(Command(command_id="2", name="wake"), 0.0)
    assert serve("after") == expected
