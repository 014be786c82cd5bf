"""Throw-away steps at start: they touch what the first request would wait for, and time a guess against a step."""

from __future__ import annotations

import time

from paceline_engine.core.outputs import AdmittedRequest, ScheduledRequest, StepPlan
from paceline_engine.messages import SamplingParams
from paceline_engine.runner import ModelRunner

_TIMED_STEPS, _TIMED_GUESSES = 3, 4
_PLAIN = SamplingParams(max_tokens=_TIMED_GUESSES + 2, ignore_eos=True)
# All that has a kernel of its own.
_EVERYTHING = SamplingParams(
    max_tokens=2,
    temperature=0.5,
    top_k=2,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.1,
    logit_bias=((0, 1.0),),
    logprobs=1,
    ignore_eos=True,
)


def warm_up(runner: ModelRunner, num_guesses: int = 0) -> float:
    """Seconds of one throw-away step; the first maps the weights' pages, starts threads, compiles kernels."""
    begin = time.perf_counter()
    _step(runner, _PLAIN, num_tokens=1, num_wanted=num_guesses)
    return time.perf_counter() - begin


def compile_kernels(runner: ModelRunner, *, most_tokens: int) -> None:
    """Steps of every sort that requests bring, so that none of them waits for a compiler.

    Prompts of up to most_tokens: kernels' tiles go by powers of two. Plain draws, all rules and cuts, guesses.
    """
    lengths = {most_tokens, *(1 << power for power in range(most_tokens.bit_length()))}
    for num_tokens in sorted(lengths):
        _step(runner, _PLAIN, num_tokens=num_tokens)
    for sampling in (SamplingParams(max_tokens=2, temperature=1.0, ignore_eos=True), _EVERYTHING):
        _step(runner, sampling, num_tokens=1)
        if most_tokens > 1:
            _step(runner, sampling, num_tokens=2, num_guesses=1)


def measure_draft_cost(runner: ModelRunner) -> float:
    """Time of one guess of one sequence over a step's."""
    warm_up(runner, _TIMED_GUESSES)
    plain = min(warm_up(runner) for _ in range(_TIMED_STEPS))
    drafting = min(warm_up(runner, _TIMED_GUESSES) for _ in range(_TIMED_STEPS))
    return max(0.0, drafting / plain - 1.0) / _TIMED_GUESSES


def _step(
    runner: ModelRunner, sampling: SamplingParams, *, num_tokens: int, num_guesses: int = 0, num_wanted: int = 0
) -> None:
    """One request's, and its end; the last num_guesses of the tokens are guesses."""
    num_known = num_tokens - num_guesses
    admitted = AdmittedRequest(
        request_id="warm-up", token_ids=(0,) * num_known, num_prompt_tokens=num_known, sampling=sampling
    )
    item = ScheduledRequest(
        request_id="warm-up",
        token_ids=[0] * num_tokens,
        start=0,
        new_block_ids=list(range(-(-num_tokens // runner.kv.block_size))),
        sample=True,
        num_draft_tokens=num_guesses,
        num_wanted_drafts=num_wanted,
    )
    runner.execute(StepPlan(admitted=(admitted,), scheduled=(item,)))
    runner.execute(StepPlan(released=("warm-up",)))
