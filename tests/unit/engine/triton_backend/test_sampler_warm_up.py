"""After a warm-up no step launches a kernel in a way that is compiled anew; through the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from twins import CPU, Twins

from paceline_engine.backends.triton.sampler_warm_up import warm_up_sampler

VOCAB_SIZE = 61
# Together, and each without the others, beside a plain one.
REQUESTS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "min_p": 0.2, "top_p": 0.8},
    {"allowed_token_ids": (3, 4)},
    {"bad_words": ((3,), (4, 5)), "min_tokens": 2},
    {"repetition_penalty": 1.2, "logprobs": 2},
]


@pytest.fixture
def ways(monkeypatch) -> set[tuple[Any, ...]]:
    """What a compiled kernel is known by, of all launches so far: which arguments are missing, and constants."""
    seen: set[tuple[Any, ...]] = set()
    launch = interpreter.GridExecutor.__call__

    def record(executor: interpreter.GridExecutor, *args: Any, **options: Any) -> Any:
        types = tuple(getattr(arg, "dtype", type(arg)) for arg in args)
        seen.add((executor.fn.__name__, types, *sorted(options.items())))
        return launch(executor, *args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", record)
    return seen


def test_no_step_needs_a_kernel_that_the_warm_up_did_not(ways):
    twins = Twins(VOCAB_SIZE, max_num_seqs=len(REQUESTS))
    warm_up_sampler(twins.device, VOCAB_SIZE, CPU)
    warm = set(ways)
    for at, sampling in enumerate(REQUESTS):
        twins.admit(str(at), [1], ignore_eos=True, **sampling)
    names = list(twins.requests)
    for running in [names, *(["0", name] for name in names[1:])]:
        for guesses in ([], [4, 3]):
            logits = torch.randn(len(running) + len(guesses), VOCAB_SIZE)
            twins.step(logits, {running[-1]: guesses}, running)
            if guesses and not twins.requests[running[-1]].rows[0].greedy:
                twins.draft(running[-1], guesses, np.full((2, VOCAB_SIZE), 1 / VOCAB_SIZE, dtype=np.float32))
                twins.step(logits, {running[-1]: guesses}, running)
    assert ways == warm
