"""Throw-away steps at start: they touch what the first request would wait for, and time a guess against a step."""

from __future__ import annotations

import time

from paceline_engine.core.outputs import AdmittedRequest, ScheduledRequest, StepPlan
from paceline_engine.messages import SamplingParams
from paceline_engine.runner import ModelRunner

_TIMED_STEPS, _TIMED_GUESSES = 3, 4


def warm_up(runner: ModelRunner, num_guesses: int = 0) -> float:
    """Seconds of one throw-away step; the first maps the weights' pages, starts threads, compiles kernels."""
    sampling = SamplingParams(max_tokens=_TIMED_GUESSES + 2, ignore_eos=True)
    admitted = AdmittedRequest(request_id="warm-up", token_ids=(0,), num_prompt_tokens=1, sampling=sampling)
    item = ScheduledRequest(
        request_id="warm-up",
        token_ids=[0],
        start=0,
        new_block_ids=[0],
        sample=True,
        num_wanted_drafts=num_guesses,
    )
    begin = time.perf_counter()
    runner.execute(StepPlan(admitted=(admitted,), scheduled=(item,)))
    seconds = time.perf_counter() - begin
    runner.execute(StepPlan(released=("warm-up",)))
    return seconds


def measure_draft_cost(runner: ModelRunner) -> float:
    """Time of one guess of one sequence over a step's."""
    warm_up(runner, _TIMED_GUESSES)
    plain = min(warm_up(runner) for _ in range(_TIMED_STEPS))
    drafting = min(warm_up(runner, _TIMED_GUESSES) for _ in range(_TIMED_STEPS))
    return max(0.0, drafting / plain - 1.0) / _TIMED_GUESSES
