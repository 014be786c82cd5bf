"""Which requests are refused on arrival, each with one line that says what to do instead.

What can never run is refused at once, so that nothing waits for ever; what can't run in time is refused before it costs
anything. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline_engine.core.batching import Batching
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.ranked import RankedRequests, SchedulingPolicy
from paceline_engine.core.request import Request
from paceline_engine.core.speed import StepSpeed
from paceline_engine.messages import ErrorKind

Refusal = tuple[ErrorKind, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds of the scheduler. Lengths and budgets are tokens.

    max_num_seqs bounds running requests, max_num_batched_tokens a step, prefill_chunk_tokens one request's share of a
    step, max_model_len prompt plus output, max_num_waiting the queue of requests that never ran, max_preemptions how
    often one request may lose its blocks. scheduling_policy: "priority" orders by (priority, arrival), "fcfs" by
    arrival alone. batching: when a place is refilled; batch_wait_s: how long a dynamic batch may take to fill, seconds.
    num_scheduler_steps: most steps that a device makes in one round trip while all requests only decode.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    max_model_len: int
    max_num_waiting: int = 1024
    max_preemptions: int = 3
    scheduling_policy: SchedulingPolicy = "priority"
    batching: Batching = "continuous"
    batch_wait_s: float = 0.02
    num_scheduler_steps: int = 1

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_chunk_tokens",
            "max_num_waiting",
            "num_scheduler_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_preemptions", "batch_wait_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")


def why_impossible(request: Request, config: SchedulerConfig, kv: KVManager) -> str | None:
    """Why a request can never run on this engine, or None."""
    num_prompt, max_model_len = request.num_prompt_tokens, config.max_model_len
    if num_prompt == 0:
        return "the prompt has no tokens"
    if request.sampling.max_tokens < 1:
        return f"max_tokens must be at least 1, not {request.sampling.max_tokens}"
    if request.embeds and request.wants_prompt_logprobs:
        return "an embedding comes without prompt_logprobs; ask for one of them"
    if request.embeds and num_prompt <= max_model_len:
        return _why_too_large(request, kv)
    if num_prompt >= max_model_len:
        return (
            f"the prompt has {num_prompt} tokens; with a maximum length of {max_model_len} at most "
            f"{max_model_len - 1} fit, so that one can be generated"
        )
    return _why_too_large(request, kv)


def _why_too_large(request: Request, kv: KVManager) -> str | None:
    needed = kv.num_blocks_for(request.max_kv_tokens)
    if needed > kv.pool.num_blocks:
        return (
            f"the request may need {needed} KV blocks and the engine has {kv.pool.num_blocks}; shorten the "
            "prompt, lower max_tokens or give the engine more KV cache memory"
        )
    return None


def why_too_late(request: Request, ahead: Iterable[Request], kv: KVManager, speed: StepSpeed, now: float) -> str | None:
    """Why a request's deadline can't be met at the measured speed of prefill, or None; never before a measurement.

    `ahead`: requests whose prompts are computed first. The estimate leaves out their decoding, and prompts that the KV
    store may bring back, so it is a lower bound.
    """
    limits = [limit for limit in (request.ttft_deadline, request.e2e_deadline) if limit is not None]
    if not limits:
        return None
    allowed = min(limits) - now
    if allowed <= 0.0:
        return "the deadline has passed already"
    if speed.prefill_tokens_per_second <= 0.0:
        return None
    num_tokens = sum(
        other.num_pending_tokens for other in ahead if other.num_pending_tokens > 1 and not kv.may_come_back(other)
    )
    if not kv.may_come_back(request):
        num_tokens += request.num_prompt_tokens - len(kv.find_cached(request)) * kv.block_size
    needed = num_tokens / speed.prefill_tokens_per_second
    if needed <= allowed:
        return None
    return (
        f"the first token would take {needed:.3g} s ({num_tokens} prompt tokens at "
        f"{speed.prefill_tokens_per_second:.4g} tokens/s) and the deadline allows {allowed:.3g} s; allow more time or "
        "use another replica"
    )


def num_blocks_at_risk(request: Request, running: RankedRequests, config: SchedulerConfig, kv: KVManager) -> int:
    """Blocks by which running requests could outgrow the pool, and so preempt one that may not be any more.

    A request that was preempted max_preemptions times runs again only if it and all that rank before it fit in the pool
    at their longest: victims rank last, so it can't become one. Whoever would break that has to wait.
    """
    limit = config.max_preemptions
    total = at_risk = 0
    for member in (*running.before(request), request, *running.after(request)):
        total += kv.num_blocks_for(member.max_kv_tokens)
        if member.num_preemptions >= limit:
            at_risk = max(at_risk, total - kv.pool.num_blocks)
    return at_risk


def num_worth_waiting_for(request: Request, cached: list[int], ahead: list[Request], kv: KVManager) -> int:
    """Tokens that a request `ahead` is computing just now, if they are half of what this one would compute; else 0.

    Equal prompts that arrive together, as for n > 1, are computed once: the others come a step later and find it.
    """
    if not ahead or request.num_preemptions:
        return 0
    num_coming = kv.num_coming_tokens(request, cached, ahead)
    num_to_compute = request.num_tokens - len(cached) * kv.block_size
    return num_coming if 2 * num_coming >= num_to_compute else 0
