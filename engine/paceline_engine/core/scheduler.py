"""Continuous batching: who computes how many tokens in the next step.

One rule: each request's num_computed_tokens catches up with its num_tokens, under one token budget for the step.
Chunked prefill, decode, verification of guesses and recomputation after preemption are the same subtraction. Running
requests come first, then waiting ones, both in order of rank: (priority, arrival), lower first.

No livelock: when blocks run out the running request that ranks last gives up its own, so the first running request
always gets what it needs; a request that the whole pool can't hold is refused on arrival. Since running requests are
served in order of rank, a victim is never part of the step already. Each request gets exactly one output with a
finish_reason. Imports neither tensors nor I/O, and takes neither a clock nor randomness: `now` is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline_engine.core.block_pool import BlockPoolError
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.outputs import AdmittedRequest, ScheduledRequest, StepPlan, StepResult
from paceline_engine.core.ranked import RankedRequests, SchedulingPolicy
from paceline_engine.core.request import Request, RequestStatus
from paceline_engine.core.spec import MAX_DRAFT_TOKENS, NgramIndex, SpeculationConfig, SpeculationPolicy
from paceline_engine.core.speed import StepSpeed
from paceline_engine.messages import AddRequest, ErrorKind, RequestOutput, TokenLogprobs


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
    scheduling_policy: SchedulingPolicy = "priority"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_tokens", "max_num_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")


class Scheduler:
    """Owns every live request. Call order: add/abort any number of times, then schedule, then update."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        eos_token_ids: Iterable[int] = (),
        speculation: SpeculationConfig | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.num_preemptions = 0
        self.asleep = False
        self.speed = StepSpeed(config.prefill_chunk_tokens)
        self.speculation = SpeculationPolicy(speculation or SpeculationConfig())
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_arrivals = 0
        self._adapters: dict[str, str] = {}
        self._requests: dict[str, Request] = {}
        self._running = RankedRequests(config.scheduling_policy)
        self._waiting = RankedRequests(config.scheduling_policy)
        self._admitted: list[AdmittedRequest] = []
        self._released: list[str] = []
        self._began = 0.0

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

    def add(self, message: AddRequest, now: float = 0.0) -> RequestOutput | None:
        """Queue a request, or return its terminal "error" output."""
        known = self._requests.get(message.request_id)
        if known is not None:
            # Two requests under one id can't both be answered; ending the id once keeps "one terminal output" true.
            return self._finish(known, "error", "the request id is already in use; ids must be unique", "invalid")
        self._num_arrivals += 1
        request = Request.from_message(
            message,
            max_model_len=self.config.max_model_len,
            eos_token_ids=self._eos_token_ids,
            adapter_digest=self._adapters.get(message.adapter or "", ""),
            arrival=self._num_arrivals,
            now=now,
        )
        refusal = self._why_refused(request)
        if refusal is not None:
            return RequestOutput(
                request_id=message.request_id, finish_reason="error", error=refusal[1], error_kind=refusal[0]
            )
        self._requests[request.request_id] = request
        self._waiting.add(request)
        return None

    def _why_refused(self, request: Request) -> tuple[ErrorKind, str] | None:
        num_prompt, max_model_len = request.num_prompt_tokens, self.config.max_model_len
        if self.asleep:
            return "asleep", "the engine sleeps; wake it first"
        if request.adapter is not None and request.adapter not in self._adapters:
            return "invalid", f"the adapter {request.adapter!r} isn't loaded"
        if num_prompt == 0:
            return "invalid", "the prompt has no tokens"
        if request.sampling.max_tokens < 1:
            return "invalid", f"max_tokens must be at least 1, not {request.sampling.max_tokens}"
        if num_prompt >= max_model_len:
            return "invalid", (
                f"the prompt has {num_prompt} tokens; with a maximum length of {max_model_len} at most "
                f"{max_model_len - 1} fit, so that one can be generated"
            )
        needed = self.kv.num_blocks_for(request.max_kv_tokens)
        if needed > self.kv.pool.num_blocks:
            return "invalid", (
                f"the request may need {needed} KV blocks and the engine has {self.kv.pool.num_blocks}; shorten the "
                "prompt, lower max_tokens or give the engine more KV cache memory"
            )
        if len(self._waiting) >= self.config.max_num_waiting:
            limit = self.config.max_num_waiting
            return "queue_full", f"the engine's queue is full ({limit} requests); try again later"
        return None

    def set_adapter(self, name: str, digest: str) -> None:
        """Requests may name this adapter from now on; its content's `digest` becomes part of block identity."""
        self._adapters[name] = digest

    def remove_adapter(self, name: str) -> None:
        """Requests that name this adapter are refused from now on. Raises ValueError while one is live."""
        users = sum(1 for request in self._requests.values() if request.adapter == name)
        if users:
            raise ValueError(f"{users} requests use the adapter {name!r}; try again when they have ended")
        self._adapters.pop(name, None)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; its terminal "abort" output, or None if it ended before."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, "abort")

    def abort_all(self) -> list[RequestOutput]:
        """End every live request; their terminal "abort" outputs."""
        return [self._finish(request, "abort") for request in list(self._requests.values())]

    def reset_prefix_cache(self) -> None:
        """From now on no request finds KV that was computed before; running ones go on with what they hold."""
        self.kv.forget_everything(self._running, self._waiting)

    def sleep(self) -> list[RequestOutput]:
        """End every live request and refuse new ones until `wake`: the device may lose its KV meanwhile."""
        outputs = self.abort_all()
        self.reset_prefix_cache()
        self.asleep = True
        return outputs

    def wake(self) -> None:
        """Accept requests again."""
        self.asleep = False

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Choose the next step's work and take the blocks it needs; preempts when they run out."""
        self._began = now
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
        # Prefills leave one token for each decode behind them, or a few long prompts would stop everybody's stream.
        decodes_left = sum(1 for request in self._running if request.num_pending_tokens == 1)
        # Not a for loop: preemption shortens the list from its end.
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            index += 1
            pending = request.num_pending_tokens
            if pending == 1:
                decodes_left -= 1
                num_tokens = 1
            else:
                # The first running request always moves, whatever stands behind it.
                room = budget - decodes_left if index > 1 else max(1, budget - decodes_left)
                num_tokens = min(pending, self.config.prefill_chunk_tokens, room)
                if num_tokens < 1:
                    continue
            new_block_ids = self._grow_or_preempt(request, num_tokens)
            if new_block_ids is None:
                break
            item = self._share_of(request, num_tokens, new_block_ids, budget - decodes_left)
            scheduled.append(item)
            budget -= len(item.token_ids)
        return budget

    def _grow_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for the next tokens, taken from the last running requests if need be; None if it was this one.

        Victims rank behind `request`, so none of them is part of this step yet.
        """
        while True:
            new_block_ids = self.kv.grow(request, request.num_computed_tokens + num_tokens)
            if new_block_ids is not None:
                return new_block_ids
            if len(self._running) == 1:
                raise BlockPoolError(f"request {request.request_id} alone doesn't fit in the pool")
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return None

    def _preempt(self, request: Request) -> None:
        self.kv.preempt(request)
        request.status = RequestStatus.PREEMPTED
        request.draft_token_ids = ()
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request)
        self._released.append(request.request_id)

    def _schedule_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        reserved = sum(self.kv.num_missing_blocks(request, request.num_tokens) for request in self._running)
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            request = self._waiting[0]
            cached = self.kv.find_cached(request)
            needed = self.kv.num_blocks_to_admit(request, cached)
            if reserved + needed > self._num_admissible_blocks():
                break  # Strictly in order: letting a smaller one pass could starve this one.
            self._waiting.pop(0)
            new_block_ids = self._admit(request, cached)
            num_tokens = min(request.num_pending_tokens, self.config.prefill_chunk_tokens, budget)
            more = self.kv.grow_if_free(request, request.num_computed_tokens + num_tokens)
            scheduled.append(self._share_of(request, num_tokens, new_block_ids + more, num_tokens))
            budget -= num_tokens
            reserved += self.kv.num_missing_blocks(request, request.num_tokens)

    def _num_admissible_blocks(self) -> int:
        """Free blocks less one for each running request: a newcomer shouldn't be thrown out by their next block."""
        return self.kv.pool.num_free_blocks - len(self._running)

    def _admit(self, request: Request, cached: list[int]) -> list[int]:
        """Make a waiting request running on cached blocks, its offloaded KV restored; the blocks that it then has."""
        self.kv.attach(request, cached)
        new_block_ids = cached + self.kv.grow_if_free(request, request.num_offloaded_tokens)
        self.kv.restore(request)
        self.kv.publish(request)
        # What is computed again is reported again.
        del request.prompt_logprobs[request.num_computed_tokens :]
        request.status = RequestStatus.RUNNING
        self._running.add(request)
        self._admitted.append(request.admitted())
        return new_block_ids

    def _share_of(self, request: Request, num_tokens: int, new_block_ids: list[int], budget: int) -> ScheduledRequest:
        """The request's part of the step: `num_tokens` known tokens, and guesses as far as `budget` has room."""
        start = request.num_computed_tokens
        end = start + num_tokens
        sample = end == len(request.token_ids)
        token_ids = request.token_ids[start:end]
        if not sample or not (self.speculation.is_on or request.draft_token_ids):
            return ScheduledRequest(
                request_id=request.request_id,
                token_ids=token_ids,
                start=start,
                new_block_ids=new_block_ids,
                sample=sample,
            )
        wanted = self.speculation.num_wanted(request.traffic_class)
        drafts = self._drafts(request, wanted, min(budget, self.config.prefill_chunk_tokens) - num_tokens)
        if drafts:
            token_ids += drafts
            new_block_ids = new_block_ids + self.kv.grow_if_free(request, end + len(drafts))
        return ScheduledRequest(
            request_id=request.request_id,
            token_ids=token_ids,
            start=start,
            new_block_ids=new_block_ids,
            sample=True,
            num_draft_tokens=len(drafts),
            num_wanted_drafts=wanted if self.speculation.device_drafts else 0,
        )

    def _drafts(self, request: Request, wanted: int, room: int) -> list[int]:
        """Guesses to verify: never past the request's last token, the step's room, or the blocks that can be spared."""
        num_tokens = len(request.token_ids)
        # Of g kept guesses and one token more, the last must still be within the request's length.
        room = min(room, request.max_total_tokens - num_tokens - 1, MAX_DRAFT_TOKENS)
        spare = max(0, self.kv.pool.num_free_blocks - len(self._running))
        room = min(room, (len(request.block_ids) + spare) * self.kv.block_size - num_tokens)
        if room < 1:
            return []
        if request.draft_token_ids:
            return list(request.draft_token_ids[:room])
        if not self.speculation.proposes_ngrams or wanted < 1:
            return []
        if request.ngrams is None:
            config = self.speculation.config
            request.ngrams = NgramIndex(config.min_n, config.max_n)
        return request.ngrams.propose(request.token_ids, min(wanted, room))

    def update(self, plan: StepPlan, sampled: Iterable[StepResult], now: float = 0.0) -> list[RequestOutput]:
        """Book a step's results: tokens join their requests, finished ones give their blocks back.

        A stop token is part of the output, as its last token.
        """
        self._measure(plan, now)
        results = {result.request_id: result for result in sampled}
        outputs: list[RequestOutput] = []
        for item in plan.scheduled:
            request = self._requests.get(item.request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue  # Ended while the step ran.
            result = results.get(item.request_id)
            if result is not None and result.error is not None:
                outputs.append(self._finish(request, "error", result.error, "internal"))
                continue
            if result is not None and result.prompt_logprobs and request.wants_prompt_logprobs:
                request.prompt_logprobs.extend(result.prompt_logprobs)
            if item.sample:
                outputs.append(self._accept(request, item, result))
            else:
                request.num_computed_tokens += len(item.token_ids)
                self.kv.publish(request)
        return outputs

    def _measure(self, plan: StepPlan, now: float) -> None:
        num_tokens = num_decodes = 0
        for item in plan.scheduled:
            num_tokens += len(item.token_ids)
            num_decodes += len(item.token_ids) - item.num_draft_tokens == 1
        self.speed.observe(num_tokens, num_tokens - num_decodes, now - self._began)
        if self.speculation.is_on:
            self.speculation.set_verification_cost(self.speed.verification_share(num_decodes))

    def _accept(self, request: Request, item: ScheduledRequest, result: StepResult | None) -> RequestOutput:
        token_ids = result.token_ids if result is not None else ()
        num_guesses = item.num_draft_tokens
        num_kept = len(token_ids) - 1
        if result is None or not 0 <= num_kept <= num_guesses:
            problem = f"the device returned {len(token_ids)} tokens for this request, not 1 to {num_guesses + 1}"
            return self._finish(request, "error", problem, "internal")
        if num_kept and list(token_ids[:num_kept]) != item.token_ids[-num_guesses:][:num_kept]:
            return self._finish(request, "error", "the device kept guesses that were not made", "internal")
        num_taken, reason = request.accept(token_ids)
        # KV of kept guesses is there; that of rejected ones is overwritten by what comes in their place.
        request.num_computed_tokens = item.start + len(item.token_ids) - num_guesses + min(num_kept, num_taken)
        self.kv.publish(request)
        request.draft_token_ids = result.draft_token_ids
        if num_guesses:
            num_kept = min(num_kept, num_taken)
            # Guesses that a grammar forced say nothing about those that somebody made.
            self.speculation.observe(request.traffic_class, num_guesses, num_kept, learn=request.constraint is None)
        return self._output(request, result, num_taken, reason, num_guesses, num_kept)

    def _output(
        self,
        request: Request,
        result: StepResult,
        num_taken: int,
        reason: str | None,
        num_guesses: int,
        num_kept: int,
    ) -> RequestOutput:
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        if request.wants_prompt_logprobs:
            if len(request.prompt_logprobs) != request.num_prompt_tokens - 1:
                problem = (
                    f"the device returned {len(request.prompt_logprobs)} prompt logprobs, not "
                    f"{request.num_prompt_tokens - 1}"
                )
                return self._finish(request, "error", problem, "internal")
            prompt_logprobs = (None, *request.prompt_logprobs)
            request.wants_prompt_logprobs = False
            request.prompt_logprobs = []
        if reason is not None:
            self._remove(request)
        return RequestOutput(
            request_id=request.request_id,
            new_token_ids=result.token_ids[:num_taken],
            finish_reason=reason,
            logprobs=result.logprobs[:num_taken],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
            num_draft_tokens=num_guesses,
            num_accepted_tokens=num_kept,
        )

    def _finish(
        self, request: Request, reason: str, error: str | None = None, error_kind: ErrorKind | None = None
    ) -> RequestOutput:
        self._remove(request)
        return RequestOutput(
            request_id=request.request_id,
            finish_reason=reason,
            error=error,
            error_kind=error_kind,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _remove(self, request: Request) -> None:
        """The only way out: whoever calls this makes the request's one terminal output."""
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._released.append(request.request_id)
        else:
            self._waiting.remove(request)
        self.kv.finish(request)
        request.status = RequestStatus.FINISHED

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
