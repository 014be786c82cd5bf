"""transformers' own continuous batching on the same shapes, prompts and chip, as a ratio.

Only what is installed there: without a flash-attention package it attends with torch's scaled dot product and a mask.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from on_gpu.device import Device
from on_gpu.engine import LOADS, Load
from on_gpu.models import of_transformers, prompts
from on_gpu.run import Run
from report import Row
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig


def generate(model: Any, given: Sequence[Sequence[int]], output: int, device: Device) -> float:
    """Output tokens a second, prefill included: of the second of two equal runs, with the first one's manager."""
    wanted: dict[str, Any] = {"auto_switch_to_flash": False}  # It would be fetched, and can't be.
    if device.is_dry:
        # There's no memory of a card to infer sizes from.
        wanted |= {"num_blocks": 16, "max_batch_tokens": 64, "page_size": 16, "use_cuda_graph": False}
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    arguments = {
        "inputs": [list(prompt) for prompt in given],
        "generation_config": GenerationConfig(
            max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=0
        ),
        "continuous_batching_config": ContinuousBatchingConfig(**{n: v for n, v in wanted.items() if n in known}),
        "persistent_manager": True,
    }
    model.generate_batch(**arguments)
    begin = time.perf_counter()
    answers = model.generate_batch(**arguments)
    seconds = time.perf_counter() - begin
    lengths = sorted(len(answer.generated_tokens) for answer in answers.values())
    if lengths != [output] * len(given):
        raise RuntimeError(f"transformers answered {len(lengths)} of {len(given)} requests, with {set(lengths)} tokens")
    return len(given) * output / seconds


def ours(run: Run, load: Load) -> float | None:
    """What the engine reached in this run."""
    found = [row.ours for row in run.report.rows if row.case == load.name and row.metric.endswith("prefill included")]
    return found[-1] if found else None


def speed(run: Run, device: Device) -> None:
    """Each load, beside what the engine reached in this run."""
    for name, full in run.cases((load.name, load) for load in LOADS):
        with run.case(name):
            load = full.in_small() if device.is_dry else full
            model = of_transformers(load.model, device.torch, torch.float32 if device.is_dry else torch.bfloat16)
            given = prompts(load.model, load.num_requests, load.prompt)
            theirs = generate(model, given, load.output, device)
            peer = "transformers continuous batching, sdpa"
            run.add(Row(full.name, "output tokens, prefill included", "1/s", ours(run, full), round(theirs, 1), peer))
            del model
        device.free()
