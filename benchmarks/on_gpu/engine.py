"""The engine itself on the device with random weights: scheduler, runner and the GPU backend in this process.

The core is the one that serves, overlapped as it is there; left out are the HTTP process, sockets and tokenisation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from on_gpu.device import Device
from on_gpu.models import LLAMA_31_8B, QWEN3_06B, RandomWeights, prompts, shrunk, streamed_bytes
from on_gpu.run import Run
from report import Row

from paceline_engine import core_setup
from paceline_engine.config import EngineConfig
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.core_loop import OverlappedSteps, Steps
from paceline_engine.core_setup import Core
from paceline_engine.messages import AddRequest, SamplingParams
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.loader import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Load:
    """As many requests at once, each with a random prompt of that length and so many output tokens."""

    name: str
    model: ModelConfig
    num_requests: int
    prompt: int
    output: int
    options: dict[str, Any]

    def in_small(self) -> Load:
        """For a dry run."""
        few = min(3, self.num_requests)
        return Load(
            name=self.name,
            model=shrunk(self.model),
            num_requests=few,
            prompt=9,
            output=4,
            options={**self.options, "max_num_seqs": few, "max_model_len": 64, "kv_cache_bytes": 2**20},
        )


BATCH = Load(
    name="Qwen3-0.6B shape, 256 sequences",
    model=QWEN3_06B,
    num_requests=256,
    prompt=128,
    output=256,
    options={"max_num_seqs": 256, "max_num_batched_tokens": 8192, "prefill_chunk_tokens": 2048, "max_model_len": 1024},
)
STREAM = Load(
    name="Llama-3.1-8B shape, one sequence",
    model=LLAMA_31_8B,
    num_requests=1,
    prompt=128,
    output=256,
    options={"max_num_seqs": 1, "max_num_batched_tokens": 2048, "prefill_chunk_tokens": 2048, "max_model_len": 1024},
)
LOADS = (BATCH, STREAM)


@dataclass(frozen=True, slots=True)
class Speed:
    """Output tokens a second: over all, and over the steps after the last first token."""

    overall: float
    decoding: float


class _NoLog:
    """No step is recorded here: a log needs msgspec, and its cost is the scheduler's, not the device's."""

    def planned(self, now: float, plan: StepPlan, ahead: bool = False) -> None:
        pass

    def updated(self, results: tuple[StepResult, ...], end: float, seconds: float = 0.0) -> None:
        pass


def make_engine(load: Load, device: Device, **options: Any) -> Core:
    """The core as it serves, but for the weights, which are random and made on the device."""
    from paceline_engine.backends.triton import decoder

    loaded = LoadedModel(
        directory=Path(),
        config=load.model,
        files=[],
        weights_digest="",
        tokenizer_digest="",
        tokenizer_file=Path(),
        chat_template=None,
        special_tokens={},
    )
    dtype = "float32" if device.is_dry else "bfloat16"
    settings = {"device": "cuda", "dtype": dtype, "kv_store_bytes": 0, **load.options, **options}
    with (
        patch.object(core_setup, "load_model_dir", lambda _: loaded),
        patch.object(decoder, "WeightFiles", partial(RandomWeights, device=device.torch)),
    ):
        return core_setup.build_core(EngineConfig(model_dir="random", **settings))


def generate(core: Core, given: Sequence[Sequence[int]], output: int) -> Speed:
    """Greedy answers to all prompts, which come at once."""
    steps = (OverlappedSteps if core.overlapped else Steps)(core.scheduler, core.backend, _NoLog(), time.perf_counter)
    core.scheduler.reset_prefix_cache()
    begin = time.perf_counter()
    for number, prompt in enumerate(given):
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        request = AddRequest(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling)
        refused = core.scheduler.add(request, begin)
        if refused is not None:
            raise RuntimeError(f"the engine refused a request of the benchmark: {refused.error}")
    waiting = {str(number) for number in range(len(given))}
    last_first, num_before, total = begin, 0, 0
    while core.scheduler.has_work:
        for out in steps.step():
            if out.error is not None:
                raise RuntimeError(f"a request of the benchmark failed: {out.error}")
            total += len(out.new_token_ids)
            if out.new_token_ids and out.request_id in waiting:
                waiting.remove(out.request_id)
                last_first, num_before = time.perf_counter(), total
    end = time.perf_counter()
    steps.settle()
    steps.close()
    if total != len(given) * output:
        raise RuntimeError(f"{total} tokens came of {len(given) * output}")
    return Speed(total / (end - begin), (total - num_before) / (end - last_first))


def speed(run: Run, device: Device) -> None:
    """Each load twice, the second time measured."""
    for name, full in run.cases((load.name, load) for load in LOADS):
        with run.case(name):
            load = full.in_small() if device.is_dry else full
            core = make_engine(load, device)
            given = prompts(load.model, load.num_requests, load.prompt)
            generate(core, given, min(load.output, 16))
            found = generate(core, given, load.output)
            run.add(*rows(run, device, full, found))
            del core
        device.free()


def rows(run: Run, device: Device, load: Load, found: Speed) -> list[Row]:
    """The speed, and for one sequence how much of what the weights' bytes allow."""
    listed = [
        Row(load.name, "output tokens, prefill included", "1/s", round(found.overall, 1)),
        Row(load.name, "output tokens while decoding", "1/s", round(found.decoding, 1)),
    ]
    if load is BATCH:
        run.measured["qwen3 batch"] = found.overall
    if load is not STREAM:
        return listed
    for limits, source in ((device.datasheet, "datasheet"), (device.measured, "measured here")):
        if limits is not None:
            most = limits.bandwidth / streamed_bytes(load.model)
            listed.append(
                Row(
                    load.name,
                    "output tokens while decoding",
                    "1/s",
                    round(found.decoding, 1),
                    round(most, 1),
                    f"weights' bytes at the bandwidth, {source}",
                )
            )
            if source == "datasheet":
                run.measured["llama stream"] = found.decoding / most
    return listed
