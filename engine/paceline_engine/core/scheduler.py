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

from collections.abc import Iterable, Mapping

from paceline_engine.core.admission import SchedulerConfig, num_blocks_at_risk, num_worth_waiting_for, why_too_late
from paceline_engine.core.ahead import assume, needs_results, room_ahead, steps_made, with_more_steps
from paceline_engine.core.arrivals import Arrivals
from paceline_engine.core.batching import BatchGate
from paceline_engine.core.block_pool import BlockPoolError
from paceline_engine.core.deadlines import missed_text
from paceline_engine.core.kv_manager import KVManager, SequenceStore
from paceline_engine.core.live import LiveRequests
from paceline_engine.core.outputs import AdmittedRequest, ScheduledRequest, StepPlan, StepResult
from paceline_engine.core.request import Request, RequestStatus
from paceline_engine.core.results import embedding_of, output_of, problem_with, take_prompt_logprobs
from paceline_engine.core.spec import SpeculationConfig, SpeculationPolicy
from paceline_engine.core.speed import StepSpeed
from paceline_engine.core.state import SchedulerState, kv_from_state, request_from_state, request_to_state
from paceline_engine.core.stored_kv import StoredKV
from paceline_engine.core.waiting import Reason, Waiting, explain
from paceline_engine.messages import AddRequest, RequestOutput

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Owns every live request. Call order: add/abort any number of times, then schedule, then update.

    Ahead, a plan's update comes when the next one has been scheduled; nothing else may be called between those two.
    num_deadline_misses: requests that were cut. num_scheduled_tokens: computed until now.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        eos_token_ids: Iterable[int] = (),
        speculation: SpeculationConfig | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.speed = StepSpeed(config.prefill_chunk_tokens)
        self.speculation = SpeculationPolicy(speculation or SpeculationConfig())
        self._speculates = self.speculation.is_on
        self.num_preemptions = 0
        self.num_deadline_misses = 0
        self.num_scheduled_tokens = 0
        self._live = LiveRequests(config.scheduling_policy, kv)
        self.arrivals = Arrivals(config, kv, self._live, self.speed, eos_token_ids)
        self._requests, self._deadlines = self._live.by_id, self._live.deadlines
        self._running, self._waiting = self._live.running, self._live.waiting
        self._gate = BatchGate(config.batching, config.max_num_seqs, config.batch_wait_s)
        self._ended: list[RequestOutput] = []
        self._admitted: list[AdmittedRequest] = []
        # Whether a running request may not be preempted any more.
        self._has_settled = False
        # Of the step that was planned last.
        self._num_decodes = 0
        self._is_idle = False
        self._holdup: tuple[Reason, float] = ("budget", 0.0)

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
        stored = self.kv.stored
        return bool(self._requests) or bool(self._ended) or (stored is not None and stored.num_offers > 0)

    def seconds_to_wait(self, now: float) -> float:
        """How long nothing can be scheduled unless a request arrives, or the KV store has news.

        So while a batch is given time to fill, or all wait for KV that is brought back.
        """
        if len(self._running) or self._ended:
            return 0.0
        seconds = max(0.0, self._gate.seconds_to_wait(self._waiting, now))
        if seconds == 0.0 and self._is_idle and self.kv.stored is not None:
            seconds = min(self.kv.stored.seconds_to_wait(now), self._deadlines.seconds_left(now, self._requests))
        return max(0.0, seconds)

    def add(self, message: AddRequest, now: float = 0.0) -> RequestOutput | None:
        """Queue a request, or return its terminal "error" output."""
        known = self._requests.get(message.request_id)
        if known is not None:
            # Two requests under one id can't both be answered; ending the id once keeps "one terminal output" true.
            return self._live.finish(known, "error", "the request id is already in use; ids must be unique", "invalid")
        request = self.arrivals.request_of(message, now)
        refusal = self.arrivals.why_refused(request, now)
        if refusal is not None:
            kind, text = refusal
            return RequestOutput(request_id=message.request_id, finish_reason="error", error=text, error_kind=kind)
        self._live.add(request)
        return None

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; its terminal "abort" output, or None if it ended before."""
        request = self._requests.get(request_id)
        return None if request is None else self._live.finish(request, "abort")

    def abort_all(self) -> list[RequestOutput]:
        """End every live request; their terminal "abort" outputs."""
        return [self._live.finish(request, "abort") for request in list(self._requests.values())]

    def reset_prefix_cache(self) -> None:
        """From now on no request finds KV that was computed before; running ones go on with what they hold."""
        self.kv.forget_everything(self._running, self._waiting)

    def sleep(self) -> list[RequestOutput]:
        """End every live request and refuse new ones until `wake`: the device may lose its KV meanwhile."""
        outputs = self.abort_all()
        self.kv.forget_everything(self._running, self._waiting, stored=False)
        self.arrivals.asleep = True
        return outputs

    def wake(self) -> None:
        """Accept requests again."""
        self.arrivals.asleep = False

    def can_plan_ahead(self) -> bool:
        """Whether the next step may be planned before the results of the last one are known."""
        if self.speculation.is_on or self.config.num_scheduler_steps > 1:
            return False
        return not needs_results(self._running, self._waiting, self.kv, self.config.max_num_seqs)

    def schedule(self, now: float = 0.0, after: StepPlan | None = None) -> StepPlan:
        """Choose the next step's work and take the blocks it needs; preempts when they run out.

        Requests that have missed a deadline are cut first; `update` returns their terminal outputs. after: the last
        plan, if its results aren't known yet; only where `can_plan_ahead`. They must be booked next.
        """
        if after is not None:
            assume(after, self._requests)
        if self.kv.stored is not None:
            self.kv.stored.step(now)
        for request, kind in self._deadlines.expired(now, self._requests):
            self.num_deadline_misses += 1
            self._ended.append(self._live.finish(request, "deadline", missed_text(request, kind), "deadline"))
        scheduled: list[ScheduledRequest] = []
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(scheduled, self.config.max_num_batched_tokens)
        # Blocks that somebody just lost go to those who needed them; he would be let in again only to lose them again.
        if self._waiting and self.num_preemptions == num_preemptions:
            self._schedule_waiting(scheduled, budget, now, in_flight=after is not None)
        self._is_idle = not scheduled
        if self.config.num_scheduler_steps > 1:
            scheduled = self._more_steps(scheduled, now)
        admitted, self._admitted = tuple(self._admitted), []
        return StepPlan(
            scheduled=tuple(scheduled),
            admitted=admitted,
            released=self._live.take_released(),
            num_decodes=self._num_decodes,
        )

    def _schedule_running(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        running, chunk, block_size = self._running.requests, self.config.prefill_chunk_tokens, self.kv.block_size
        # Prefills leave one token for each decode behind them, or a few long prompts would stop everybody's stream.
        decodes_left = 0
        for request in running:
            decodes_left += len(request.token_ids) - request.num_computed_tokens == 1
        num_decodes = decodes_left
        index = 0
        # Not a for loop: preemption shortens the list from its end.
        while index < len(running) and budget > 0:
            request = running[index]
            index += 1
            num_tokens = len(request.token_ids) - request.num_computed_tokens
            if num_tokens == 1:
                decodes_left -= 1
            else:
                # At least 1 for the first: nobody is admitted without a token, so no more run than the budget has.
                num_tokens = min(num_tokens, chunk, budget - decodes_left)
                if num_tokens < 1:
                    continue
            new_block_ids: list[int] | None = []
            if request.num_computed_tokens + num_tokens > len(request.block_ids) * block_size:
                new_block_ids = self._grow_or_preempt(request, num_tokens)
            if new_block_ids is None:
                break
            item = self._share_of(request, num_tokens, new_block_ids, budget - decodes_left)
            scheduled.append(item)
            budget -= len(item.token_ids)
        self._num_decodes = num_decodes - decodes_left
        return budget

    def _grow_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for the next tokens, taken from the last running requests if need be; None if it was this one.

        Victims rank behind `request`, so none of them is part of this step yet.
        """
        while True:
            new_block_ids = self.kv.grow(request, request.num_computed_tokens + num_tokens)
            if new_block_ids is not None:
                return new_block_ids
            if self.kv.stored is not None and self.kv.stored.give_way():
                continue
            if len(self._running) == 1:
                raise BlockPoolError(f"request {request.request_id} alone doesn't fit in the pool")
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return None

    def _preempt(self, request: Request) -> None:
        self._live.preempt(request)
        self.num_preemptions += 1

    def _schedule_waiting(self, scheduled: list[ScheduledRequest], budget: int, now: float, *, in_flight: bool) -> None:
        self._gate.begin_step(len(self._running), self._waiting, self.arrivals.count, now)
        reserved = sum(self.kv.num_missing_blocks(request, request.num_tokens) for request in self._running)
        stored, speed = self.kv.stored, self.speed.prefill_tokens_per_second
        if stored is not None:
            reserved += sum(stored.num_reserved(load.request) for load in stored.loads)
        limit = self.config.max_preemptions
        self._has_settled = any(request.num_preemptions >= limit for request in self._running)
        prefilling = [request for request in self._running if request.is_prefilling]
        index = 0
        # Those who wait for a prefix or stored KV are passed by; as many as may run are looked at.
        while index < min(len(self._waiting), self.config.max_num_seqs):
            request = self._waiting[index]
            cached = self.kv.find_cached(request)
            # Only requests ahead count: they get their tokens first, so nobody waits for one that waits for him.
            has_place = budget > 0 and self._num_places() > 0
            ahead = [other for other in prefilling if self._running.is_before(other, request)] if has_place else []
            passed_by = self._what_comes(request, cached, ahead, now)
            holdup = passed_by or self._why_not_now(request, cached, reserved, budget, now)
            if holdup is None and stored is not None:
                num_ahead = sum(other.num_pending_tokens for other in ahead)
                num_tokens = stored.begin(request, cached, now, speed, num_ahead, in_flight=in_flight)
                passed_by = holdup = ("kv", num_tokens) if num_tokens else None
                reserved += stored.num_reserved(request)
                if holdup is None and self._is_hopeless(request, now):
                    continue
            if holdup is not None:
                self._holdup = holdup
                if passed_by is None:
                    break  # Strictly in order: letting a smaller one pass could starve this one.
                index += 1
                continue
            self._waiting.pop(index)
            new_block_ids = self._admit(request, cached)
            prefilling.append(request)
            self._has_settled |= request.num_preemptions >= limit
            num_tokens = min(request.num_pending_tokens, self.config.prefill_chunk_tokens, budget)
            new_block_ids += self.kv.grow_if_free(request, request.num_computed_tokens + num_tokens)
            scheduled.append(self._share_of(request, num_tokens, new_block_ids, num_tokens))
            budget -= num_tokens
            reserved += self.kv.num_missing_blocks(request, request.num_tokens)

    def _is_hopeless(self, request: Request, now: float) -> bool:
        """End a request that only stored KV could have made quick enough, now that there is none, or too little."""
        problem = why_too_late(request, (), self.kv, self.speed, now) if request.num_preemptions == 0 else None
        if problem is None:
            return False
        self.arrivals.num_deadline_refusals += 1
        self._ended.append(self._live.finish(request, "error", problem, "deadline"))
        return True

    def _what_comes(
        self, request: Request, cached: list[int], ahead: list[Request], now: float
    ) -> tuple[Reason, float] | None:
        """What of the request's prefix will be in the cache in a moment and is worth waiting for; None if nothing."""
        num_coming = num_worth_waiting_for(request, cached, ahead, self.kv)
        if num_coming:
            return "prefix", num_coming
        if self.kv.stored is None:
            return None
        num_stored = self.kv.stored.num_awaited(request, cached, now, self.speed.prefill_tokens_per_second)
        return ("kv", num_stored) if num_stored else None

    def _num_places(self) -> int:
        """How many requests more may run, once those whose KV is being loaded do."""
        num_loads = self.kv.stored.num_loads if self.kv.stored is not None else 0
        return self.config.max_num_seqs - len(self._running) - num_loads

    def _why_not_now(
        self, request: Request, cached: list[int], reserved: int, budget: int, now: float
    ) -> tuple[Reason, float] | None:
        """What the first waiting request lacks to be admitted in this step, and how much of it; None if nothing."""
        if self._num_places() < 1:
            return "seqs", 1 - self._num_places()
        if not self._gate.admits(request):
            return "batch", self.seconds_to_wait(now)
        if budget < 1:
            return "budget", 1
        # Less one for each running request: a newcomer shouldn't be thrown out by their next block.
        free = self.kv.pool.num_free_blocks - len(self._running)
        missing = reserved + self.kv.num_blocks_to_admit(request, cached) - free
        if missing > 0:
            return "blocks", missing
        if not self._has_settled and request.num_preemptions < self.config.max_preemptions:
            return None
        missing = num_blocks_at_risk(request, self._running, self.config, self.kv)
        return ("preemption", missing) if missing > 0 else None

    def _admit(self, request: Request, cached: list[int]) -> list[int]:
        """Make a waiting request running on cached blocks, its offloaded KV restored; the blocks that it then has."""
        self._gate.admitted(request)
        self.kv.attach(request, cached)
        new_block_ids = cached + self.kv.grow_if_free(request, request.num_offloaded_tokens)
        self.kv.restore(request)
        self.kv.publish(request)
        # What is computed again is reported again.
        del request.prompt_logprobs[request.num_computed_tokens :]
        request.status = RequestStatus.RUNNING
        self._running.add(request)
        self._admitted.append(request.admitted())
        if self.kv.cache is not None:
            self.kv.cache.identify(request)
        return new_block_ids

    def _share_of(self, request: Request, num_tokens: int, new_block_ids: list[int], budget: int) -> ScheduledRequest:
        """The request's part of the step: `num_tokens` known tokens, and guesses as far as `budget` has room."""
        start = request.num_computed_tokens
        end = start + num_tokens
        token_ids = request.token_ids[start:end]
        is_last = end == len(request.token_ids)
        sample = is_last and not request.embeds
        num_drafts = num_wanted = 0
        if sample and (self._speculates or request.draft_token_ids):
            room = min(budget, self.config.prefill_chunk_tokens) - num_tokens
            wanted = self.speculation.num_wanted(request.traffic_class)
            num_wanted = wanted if self.speculation.device_drafts else 0
            room = min(room, room_ahead(request, self.kv, len(self._running)))
            drafts = self.speculation.drafts(request, wanted, room)
            num_drafts = len(drafts)
            if drafts:
                token_ids += drafts
                new_block_ids += self.kv.grow_if_free(request, end + num_drafts)
        return ScheduledRequest(
            request_id=request.request_id,
            token_ids=token_ids,
            start=start,
            new_block_ids=new_block_ids,
            sample=sample,
            num_draft_tokens=num_drafts,
            num_wanted_drafts=num_wanted,
            embed=is_last and request.embeds,
        )

    def _more_steps(self, scheduled: list[ScheduledRequest], now: float) -> list[ScheduledRequest]:
        """Several steps at once, as long as nobody's deadline passes meanwhile and no place is sure to be left free."""
        limit = float(self.config.num_scheduler_steps)
        step_seconds = self.speed.step_seconds(len(scheduled))
        if step_seconds > 0.0:
            limit = min(limit, self._deadlines.seconds_left(now, self._requests) / step_seconds)
        if self._waiting and self._running:
            limit = min(limit, *(request.max_total_tokens - request.num_tokens for request in self._running))
        return with_more_steps(scheduled, self._requests, self.kv, len(self._running), int(limit))

    def update(
        self,
        plan: StepPlan,
        sampled: Iterable[StepResult],
        now: float = 0.0,
        seconds: float = 0.0,
        later: StepPlan | None = None,
    ) -> list[RequestOutput]:
        """Book a step's results: tokens join their requests, finished ones give their blocks back.

        A stop token is part of the output, as its last token. Also returns the outputs of requests that were cut when
        the step was planned. seconds: what the step took. later: the plan that was made on top of this one.
        """
        outputs, self._ended = self._ended, []
        results = {result.request_id: result for result in sampled}
        # Of ids that ended with this step under way and came back.
        newcomers = {admitted.request_id for admitted in later.admitted} if later is not None else ()
        result_of, find, running = results.get, self._requests.get, RequestStatus.RUNNING
        for item in plan.scheduled:
            request_id = item.request_id
            result, request = result_of(request_id), find(request_id)
            if request is None or request.status is not running or request_id in newcomers:
                continue  # Ended while the step ran.
            if result is not None:
                if result.error is not None:
                    if result.error_kind == "internal":
                        self.kv.distrust(request)
                    outputs.append(self._live.finish(request, "error", result.error, result.error_kind))
                    continue
                if result.prompt_logprobs and request.wants_prompt_logprobs:
                    request.prompt_logprobs.extend(result.prompt_logprobs)
            if item.sample:
                if later is not None:
                    del request.token_ids[item.num_known_tokens :]  # What was assumed.
                outputs.append(self._accept(request, item, result, now))
            else:
                request.num_computed_tokens = item.end
                self.kv.publish(request)
                if item.embed:
                    outputs.append(self._deliver(request, result, now))
        self._measure(plan, results, seconds)
        if self.kv.stored is not None:
            self.kv.stored.start(now)
        return outputs

    def _measure(self, plan: StepPlan, results: Mapping[str, StepResult], seconds: float) -> None:
        num_steps, num_more = steps_made(plan, results) if self.config.num_scheduler_steps > 1 else (1, 0)
        num_tokens = plan.num_tokens + num_more
        self.num_scheduled_tokens += num_tokens
        if seconds > 0.0:
            num_prefill_tokens = num_tokens - num_more - plan.num_decodes
            self.speed.observe(num_tokens / num_steps, num_prefill_tokens / num_steps, seconds / num_steps)
            if self.speculation.is_on:
                self.speculation.set_verification_cost(self.speed.verification_share(plan.num_decodes))

    def _deliver(self, request: Request, result: StepResult | None, now: float) -> RequestOutput:
        """End a request whose prompt is computed with its embedding."""
        if result is None or not result.embedding:
            return self._live.finish(request, "error", "the device returned no embedding for this request", "internal")
        is_late = request.ttft_deadline is not None and now > request.ttft_deadline
        self.num_deadline_misses += is_late
        self._live.leave(request)
        return embedding_of(request, result.embedding, missed_text(request, "ttft") if is_late else None)

    def _accept(self, request: Request, item: ScheduledRequest, result: StepResult | None, now: float) -> RequestOutput:
        problem = problem_with(item, result)
        if problem is not None or result is None:
            return self._live.finish(request, "error", problem, "internal")
        prompt_logprobs = take_prompt_logprobs(request) if request.wants_prompt_logprobs else ()
        if prompt_logprobs is None:
            num_returned, num_due = len(request.prompt_logprobs), request.num_prompt_tokens - 1
            problem = f"the device returned {num_returned} prompt logprobs, not {num_due}"
            return self._live.finish(request, "error", problem, "internal")
        is_first = len(request.token_ids) == request.num_prompt_tokens
        num_guesses = item.num_draft_tokens
        num_taken, reason = request.accept(result.token_ids)
        num_ahead = min(len(result.token_ids) - 1, num_taken)
        num_kept = num_ahead if num_guesses else 0
        # KV of kept guesses and of steps made is there; that of rejected ones is overwritten by what comes instead.
        request.num_computed_tokens = item.start + len(item.token_ids) - num_guesses + num_ahead
        self.kv.publish(request)
        request.draft_token_ids = result.draft_token_ids
        if num_guesses:
            # Guesses that a grammar forced say nothing about those that somebody made.
            self.speculation.observe(request.traffic_class, num_guesses, num_kept, learn=request.grammar_id is None)
        error: str | None = None
        if reason is None and is_first and request.ttft_deadline is not None and now > request.ttft_deadline:
            reason, error = "deadline", missed_text(request, "ttft")
            self.num_deadline_misses += 1
        if reason == "length" and request.lends and self.kv.stored is not None:
            self.kv.stored.lend(request, now)
        if reason is not None:
            self._live.leave(request)
        guesses = item.token_ids[len(item.token_ids) - num_guesses :]
        return output_of(request, result, num_taken, reason, error, guesses, num_kept, prompt_logprobs)

    def waiting_reasons(self) -> dict[str, int]:
        """Waiting requests by what they wait for, as of the last step."""
        return {self._holdup[0]: len(self._waiting)} if self._waiting else {}

    def running_ids(self) -> list[str]:
        """Requests that hold blocks, in order of rank."""
        return [request.request_id for request in self._running]

    def live_ids(self) -> list[str]:
        """Requests that run or wait."""
        return list(self._requests)

    def why_waiting(self, now: float = 0.0) -> list[Waiting]:
        """For each waiting request, next one first: what is missing, as of the last step."""
        return explain(self._waiting, *self._holdup, now)

    def state(self) -> SchedulerState:
        """All that decisions depend on; between two steps only."""
        cache = self.kv.cache
        free, free_cached = self.kv.pool.free_order()
        return SchedulerState(
            config=self.config,
            speculation=self.speculation.config,
            eos_token_ids=tuple(sorted(self.arrivals.eos_token_ids)),
            block_size=self.kv.block_size,
            num_blocks=self.kv.pool.num_blocks,
            has_cache=cache is not None,
            has_store=self.kv.store is not None,
            asleep=self.arrivals.asleep,
            adapters=dict(self.arrivals.adapters),
            num_arrivals=self.arrivals.count,
            released=tuple(self._live.released),
            requests=tuple(map(request_to_state, self._requests.values())),
            free_block_ids=free,
            cached_block_ids=free_cached,
            blocks_of=cache.entries() if cache is not None else (),
            speed=self.speed.sums(),
            guess_cost=self.speculation.guess_cost,
            classes=self.speculation.records(),
            batch_newest_arrival=self._gate.newest_arrival,
            batch_num_places=self._gate.num_places,
            chunk_blocks=self.kv.stored.chunk_blocks if self.kv.stored is not None else 0,
            max_load_wait_s=self.kv.stored.max_wait_s if self.kv.stored is not None else 0.0,
            loads=self.kv.stored.state() if self.kv.stored is not None else (),
        )

    @classmethod
    def from_state(
        cls, state: SchedulerState, store: SequenceStore | None = None, stored: StoredKV | None = None
    ) -> Scheduler:
        """A scheduler that decides as the one that gave `state` will. The stores are used if that one had such."""
        made = cls(state.config, kv_from_state(state, store, stored), state.eos_token_ids, state.speculation)
        made.arrivals.asleep = state.asleep
        made.arrivals.adapters = dict(state.adapters)
        made.arrivals.count = state.num_arrivals
        made._live.restore(map(request_from_state, state.requests), state.released)
        if made.kv.stored is not None:
            made.kv.stored.restore(state.loads, made._requests)
        made.speed.restore(state.speed)
        made.speculation.restore(state.guess_cost, state.classes)
        made._gate.newest_arrival, made._gate.num_places = state.batch_newest_arrival, state.batch_num_places
        return made

    def check_integrity(self) -> None:
        """Raise unless every live request is in exactly one queue and the block books balance."""
        self._live.check_integrity(self.config.max_num_seqs, self.config.max_preemptions)
