"""Continuous batching: who computes how many tokens in the next step.

One rule: each request's num_computed_tokens catches up with its num_tokens, under one token budget for the step.
Chunked prefill, decode and recomputation after preemption are the same subtraction. Running requests come first, in the
order in which they were admitted, then waiting ones in order of arrival.

No livelock: when blocks run out the running request admitted last gives up its own, so the first running request always
gets what it needs; a request that the whole pool can't hold is refused on arrival. Each request gets exactly one output
with a finish_reason. Imports neither tensors nor I/O, and takes neither a clock nor randomness.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from paceline_engine.core.block_pool import BlockPoolError
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.outputs import AdmittedRequest, ScheduledRequest, StepPlan, StepResult
from paceline_engine.core.request import Request, RequestStatus
from paceline_engine.messages import AddRequest, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds of the scheduler. Lengths and budgets are tokens.

    max_num_seqs bounds running requests, max_num_batched_tokens a step, prefill_chunk_tokens one request's share of a
    step, max_model_len prompt plus output, max_num_waiting the queue of requests that never ran.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    max_model_len: int
    max_num_waiting: int = 1024

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_tokens", "max_num_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")


class Scheduler:
    """Owns every live request. Call order: add/abort any number of times, then schedule, then update."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, eos_token_ids: Iterable[int] = ()) -> None:
        self.config = config
        self.kv = kv
        self.num_preemptions = 0
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._admitted: list[AdmittedRequest] = []
        self._released: list[str] = []

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none: new or preempted."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    def add(self, message: AddRequest) -> RequestOutput | None:
        """Queue a request, or return its terminal "error" output."""
        known = self._requests.get(message.request_id)
        if known is not None:
            # Two requests under one id can't both be answered; ending the id once keeps "one terminal output" true.
            return self._finish(known, "error", "the request id is already in use; ids must be unique")
        request = Request.from_message(message)
        problem = self._why_refused(request)
        if problem is not None:
            return RequestOutput(request_id=message.request_id, finish_reason="error", error=problem)
        self._requests[request.request_id] = request
        self._waiting.append(request)
        return None

    def _why_refused(self, request: Request) -> str | None:
        num_prompt, max_model_len = request.num_prompt_tokens, self.config.max_model_len
        if num_prompt == 0:
            return "the prompt has no tokens"
        if request.sampling.max_tokens < 1:
            return f"max_tokens must be at least 1, not {request.sampling.max_tokens}"
        if num_prompt >= max_model_len:
            return (
                f"the prompt has {num_prompt} tokens; with a maximum length of {max_model_len} at most "
                f"{max_model_len - 1} fit, so that one can be generated"
            )
        needed = self.kv.num_blocks_for(request.max_kv_tokens(max_model_len))
        if needed > self.kv.pool.num_blocks:
            return (
                f"the request may need {needed} KV blocks and the engine has {self.kv.pool.num_blocks}; shorten the "
                "prompt, lower max_tokens or give the engine more KV cache memory"
            )
        if len(self._waiting) >= self.config.max_num_waiting:
            return f"the engine's queue is full ({self.config.max_num_waiting} requests); try again later"
        return None

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; its terminal "abort" output, or None if it ended before."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, "abort")

    def abort_all(self) -> list[RequestOutput]:
        """End every live request; their terminal "abort" outputs."""
        return [self._finish(request, "abort") for request in list(self._requests.values())]

    def schedule(self) -> StepPlan:
        """Choose the next step's work and take the blocks it needs; preempts when they run out."""
        scheduled: list[ScheduledRequest] = []
        budget = self._schedule_running(scheduled, self.config.max_num_batched_tokens)
        # After a preemption this lets nobody in: the last victim waits in front, and it lost its blocks because fewer
        # were left than it needs to come back.
        self._schedule_waiting(scheduled, budget)
        released, self._released = tuple(self._released), []
        admitted, self._admitted = tuple(self._admitted), []
        return StepPlan(scheduled=tuple(scheduled), admitted=admitted, released=released)

    def _schedule_running(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        index = 0
        # Not a for loop: preemption shortens the list from its end.
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            num_tokens = min(request.num_pending_tokens, self.config.prefill_chunk_tokens, budget)
            new_block_ids = self._grow_or_preempt(request, num_tokens)
            if new_block_ids is None:
                break
            scheduled.append(self._share_of(request, num_tokens, new_block_ids))
            budget -= num_tokens
            index += 1
        return budget

    def _grow_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for the next tokens, taken from the last running requests if need be; None if it was this one.

        Victims stand behind `request` in the running list, so none of them is part of this step yet.
        """
        while True:
            new_block_ids = self.kv.grow(request, request.num_computed_tokens + num_tokens)
            if new_block_ids is not None:
                return new_block_ids
            if self._running == [request]:
                raise BlockPoolError(f"request {request.request_id} alone doesn't fit in the pool")
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return None

    def _preempt(self, request: Request) -> None:
        self.kv.preempt(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        # Victims leave from the back of the running list, so pushing each to the front keeps their order.
        self._waiting.appendleft(request)
        self._released.append(request.request_id)

    def _schedule_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        reserved = sum(self.kv.num_missing_blocks(request, request.num_tokens) for request in self._running)
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            request = self._waiting[0]
            needed = self.kv.num_blocks_for(request.num_tokens)
            if reserved + needed > self._num_admissible_blocks():
                break  # Strictly in order: letting a smaller one pass could starve this one.
            self._waiting.popleft()
            new_block_ids = self._admit(request)
            num_tokens = min(request.num_pending_tokens, self.config.prefill_chunk_tokens, budget)
            more = self.kv.grow(request, request.num_computed_tokens + num_tokens)
            if more is None:
                raise BlockPoolError(f"no blocks for request {request.request_id}, although they were counted")
            scheduled.append(self._share_of(request, num_tokens, new_block_ids + more))
            budget -= num_tokens
            reserved += self.kv.num_missing_blocks(request, request.num_tokens)

    def _num_admissible_blocks(self) -> int:
        """Free blocks less one for each running request: a newcomer shouldn't be thrown out by their next block."""
        return self.kv.pool.num_free_blocks - len(self._running)

    def _admit(self, request: Request) -> list[int]:
        """Make a waiting request running, its offloaded KV restored; the blocks that took."""
        new_block_ids = self.kv.grow(request, request.num_offloaded_tokens)
        if new_block_ids is None:
            raise BlockPoolError(f"no blocks to restore request {request.request_id}, although they were counted")
        self.kv.restore(request)
        request.status = RequestStatus.RUNNING
        self._running.append(request)
        self._admitted.append(_admitted(request))
        return new_block_ids

    def _share_of(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> ScheduledRequest:
        start = request.num_computed_tokens
        return ScheduledRequest(
            request_id=request.request_id,
            token_ids=request.token_ids[start : start + num_tokens],
            start=start,
            new_block_ids=new_block_ids,
            sample=start + num_tokens == request.num_tokens,
        )

    def update(self, plan: StepPlan, sampled: Iterable[StepResult]) -> list[RequestOutput]:
        """Book a step's results: tokens join their requests, finished ones give their blocks back.

        A stop token is part of the output, as its last token.
        """
        results = {result.request_id: result for result in sampled}
        outputs: list[RequestOutput] = []
        for item in plan.scheduled:
            request = self._requests.get(item.request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue  # Ended while the step ran.
            request.num_computed_tokens = item.end
            if item.sample:
                outputs.append(self._accept(request, results.get(item.request_id)))
        return outputs

    def _accept(self, request: Request, result: StepResult | None) -> RequestOutput:
        if result is None:
            return self._finish(request, "error", "the device returned no token for this request")
        if result.error is not None:
            return self._finish(request, "error", result.error)
        token_id = result.token_ids[-1]
        request.token_ids.append(token_id)
        reason = self._finish_reason(request, token_id)
        if reason is None:
            return RequestOutput(request_id=request.request_id, new_token_ids=(token_id,))
        return self._finish(request, reason, new_token_ids=(token_id,))

    def _finish_reason(self, request: Request, token_id: int) -> str | None:
        sampling = request.sampling
        if token_id in sampling.stop_token_ids:
            return "stop"
        if token_id in self._eos_token_ids and not sampling.ignore_eos:
            return "stop"
        if request.num_output_tokens >= sampling.max_tokens or request.num_tokens >= self.config.max_model_len:
            return "length"
        return None

    def _finish(
        self, request: Request, reason: str, error: str | None = None, new_token_ids: tuple[int, ...] = ()
    ) -> RequestOutput:
        """The only way out: removes the request everywhere and makes its one terminal output."""
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._released.append(request.request_id)
        else:
            self._waiting.remove(request)
        self.kv.finish(request)
        request.status = RequestStatus.FINISHED
        return RequestOutput(
            request_id=request.request_id, new_token_ids=new_token_ids, finish_reason=reason, error=error
        )

    def check_integrity(self) -> None:
        """Raise unless every live request is in exactly one queue and the block books balance."""
        queued = [*self._running, *self._waiting]
        if len(queued) != len(self._requests) or {r.request_id for r in queued} != set(self._requests):
            raise BlockPoolError(f"{len(self._requests)} live requests, {len(queued)} in the queues")
        if any(request.status is not RequestStatus.RUNNING for request in self._running):
            raise BlockPoolError("a request in the running list isn't running")
        if len(self._running) > self.config.max_num_seqs:
            raise BlockPoolError(f"{len(self._running)} running requests, at most {self.config.max_num_seqs} allowed")
        self.kv.check_integrity(queued)


def _admitted(request: Request) -> AdmittedRequest:
    return AdmittedRequest(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
    )
