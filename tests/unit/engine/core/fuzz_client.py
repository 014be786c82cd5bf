"""Random requests, aborts and commands for a random scheduler, and the ledger that tells whether it did right."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from fuzz_device import Device, Memory, MemoryStore, PrefixStore, text_of

from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.core.prefix_cache import PrefixCache
from paceline_engine.core.scheduler import Scheduler, SchedulerConfig
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.core.step_log import Commanded, RecordingPrefixes, RecordingStore, StepLog
from paceline_engine.core.stored_prefixes import StoredPrefixes
from paceline_engine.messages import AddRequest, RequestOutput, SamplingParams

EOS = 0


@dataclass
class Client:
    """Sends requests and aborts, and keeps the ledger of what came back. Its clock ticks once a step.

    overlapped: plans are made, as far as may be, before the last one's results are known. The device computes a plan at
    any time until its results are needed.
    """

    rng: random.Random
    scheduler: Scheduler
    device: Device
    store: MemoryStore | None = None
    prefixes: PrefixStore | None = None
    log: StepLog | None = None
    overlapped: bool = False
    in_flight: StepPlan | None = None
    executed: list[StepResult] | None = None
    now: float = 0.0
    started: dict[str, AddRequest] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    delivered: dict[str, list[int]] = field(default_factory=dict)

    def take(self, output: RequestOutput | None) -> None:
        if output is None:
            return
        name = output.request_id
        assert name in self.started
        assert name not in self.ended, "an output after the terminal one"
        first = bool(output.new_token_ids) and name not in self.delivered
        if first and self.started[name].sampling.prompt_logprobs is not None:
            assert len(output.prompt_logprobs) == len(self.started[name].prompt_token_ids)
        else:
            assert not output.prompt_logprobs
        self.delivered.setdefault(name, []).extend(output.new_token_ids)
        embeds = self.started[name].embed and output.finish_reason == "stop"
        assert output.embedding == (name.encode() if embeds else b"")
        assert output.num_cached_tokens < max(1, len(self.started[name].prompt_token_ids))
        if output.finish_reason is not None:
            if output.error_kind == "internal":
                assert output.error == "not finite", "an error that the device didn't make"
            self.ended[name] = output.finish_reason
            self._check_end(name, output.finish_reason)

    def _check_end(self, name: str, reason: str) -> None:
        if self.started[name].embed:
            assert not self.delivered[name], "tokens of a request for an embedding"
            return
        sampling, tokens = self.started[name].sampling, self.delivered[name]
        assert tokens == text_of(self.started[name], len(tokens)), "other tokens than alone"
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        assert len(tokens) <= max(0, sampling.max_tokens)
        early = [i for i, token in enumerate(tokens) if token in stops and i >= sampling.min_tokens]
        assert early == ([len(tokens) - 1] if reason == "stop" else []), "an output goes on behind its end"
        if reason == "length":
            whole = len(self.started[name].prompt_token_ids) + len(tokens)
            assert len(tokens) == sampling.max_tokens or whole == self.scheduler.config.max_model_len

    def add(self) -> None:
        rng, name = self.rng, str(len(self.started))
        trunk = (1, 2, 3, 1, 2, 3, 4, 5, 1, 2, 3, 4) * 4
        prompt = trunk[: rng.choice((0, 4, 9, 16, 30))] + tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 12)))
        embed = rng.random() < 0.15
        sampling = SamplingParams(
            max_tokens=1 if embed else rng.randint(0, 30),
            ignore_eos=rng.random() < 0.5,
            min_tokens=rng.choice((0, 0, 3)),
            stop_token_ids=rng.choice(((), (5,))),
            prompt_logprobs=0 if rng.random() < 0.1 and not embed else None,
        )
        message = AddRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            salt=rng.choice(("", "", "tenant")),
            tenant=rng.choice(("", "acme")),
            adapter=rng.choice((None, None, "style", "unknown")) if rng.random() < 0.3 else None,
            priority=rng.choice((0, 0, 0, -1, 3)),
            ttft_s=rng.choice((None, None, None, 0.0, 3.0, 20.0)),
            e2e_s=rng.choice((None, None, None, 5.0, 30.0)),
            traffic_class=rng.choice(("", "chat")),
            embed=embed,
        )
        self.started[name] = message
        self.device.announce(message)
        self.send(message)

    def reuse(self) -> None:
        """The request that ended last once more, under the same id, which may be part of a plan in flight."""
        if self.ended:
            name, _ = self.ended.popitem()
            self.delivered.pop(name, None)
            self.send(self.started[name])

    def send(self, message: AddRequest) -> None:
        digest = "" if message.adapter is None else self.scheduler.arrivals.adapters.get(message.adapter)
        if self.prefixes is not None and digest is not None and self.rng.random() < 0.5:
            self.prefixes.keep(message, digest)
        if self.log is not None:
            self.log.added(message, self.now)
        self.take(self.scheduler.add(message, self.now))

    def disturb(self) -> None:
        """Something that is no step: an abort, an id that is used again, a reset, a nap."""
        what = self.rng.random()
        if what < 0.7 and self.started:
            self.abort()
        elif what < 0.8 and self.started:
            self.abort()
            self.reuse()
        elif what < 0.95:
            self.settle()
            self.command("reset_prefix_cache")
            self.scheduler.reset_prefix_cache()
        else:
            self.settle()
            self.command("sleep")
            for output in self.scheduler.sleep():
                self.take(output)
            self.command("wake")
            self.scheduler.wake()

    @property
    def is_loading(self) -> bool:
        """Whether somebody may wait for the store of prefixes, or it is still to be offered something."""
        store, stored = self.prefixes, self.scheduler.kv.stored
        if store is None or stored is None:
            return False
        return bool(store.loading or store.found or store.asked or stored.num_offers)

    def abort(self) -> None:
        name = self.rng.choice(sorted(self.started))
        if self.log is not None:
            self.log.aborted(name)
        self.take(self.scheduler.abort(name))

    def command(self, what: Literal["reset_prefix_cache", "sleep", "wake"]) -> None:
        if self.log is not None:
            self.log.commanded(Commanded(what))

    def step(self) -> StepPlan:
        if self.log is not None:
            if self.log.is_full:
                self.settle()
            self.log.begin()
        if not (self.overlapped and self.scheduler.can_plan_ahead()):
            self.settle()
        num_preemptions, last = self.scheduler.num_preemptions, self.in_flight
        plan = self.scheduler.schedule(self.now, last)
        config = self.scheduler.config
        if self.scheduler.num_preemptions > num_preemptions:
            assert not plan.admitted, "let in where somebody was just thrown out"
            assert last is None, "thrown out before results were known"
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.scheduled) <= config.max_num_seqs
        assert all(1 <= item.num_tokens <= config.prefill_chunk_tokens for item in plan.scheduled)
        if self.log is not None:
            self.log.planned(self.now, plan, last is not None)
        if last is not None:
            self.book(last, plan)
        self.in_flight, self.executed = plan, None
        if self.rng.random() < 0.5:
            self.executed = self.device.execute(plan)
        if not self.overlapped:
            if self.started and self.rng.random() < 0.1:
                self.abort()  # While the step runs.
            self.settle()
        return plan

    def settle(self) -> None:
        last, self.in_flight = self.in_flight, None
        if last is not None:
            self.book(last, None)

    def book(self, plan: StepPlan, later: StepPlan | None) -> None:
        results = self.executed if self.executed is not None else self.device.execute(plan)
        self.now += 1.0
        if self.log is not None:
            self.log.updated(tuple(results), self.now, 1.0)
        for output in self.scheduler.update(plan, results, self.now, 1.0, later):
            self.take(output)
        self.scheduler.check_integrity()


def make_client(seed: int, log_weight: int | None = None) -> Client:
    """A client of a random scheduler; with `log_weight` its steps are logged."""
    rng = random.Random(seed)
    config = SchedulerConfig(
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(1, 40),
        prefill_chunk_tokens=rng.randint(1, 24),
        max_model_len=rng.randint(2, 60),
        max_num_waiting=rng.randint(1, 20),
        max_preemptions=rng.choice((0, 1, 3)),
        scheduling_policy=rng.choice(("priority", "priority", "fcfs")),
        batching=rng.choice(("continuous", "continuous", "continuous", "static", "dynamic")),
        batch_wait_s=rng.choice((0.0, 2.5)),
        num_scheduler_steps=rng.choice((1, 1, 2, 3, 8)),
    )
    speculation = SpeculationConfig(
        method=rng.choice(("none", "none", "ngram", "draft")), num_tokens=rng.choice((None, 3)), min_n=1, max_n=3
    )
    pool, block_size = BlockPool(rng.randint(1, 24)), rng.randint(1, 8)
    memory = Memory(pool.num_blocks, block_size)
    store = MemoryStore(rng, memory) if rng.random() < 0.5 else None
    cached: Any = rng.choice((None, "hash", "hash", "radix"))
    recorded = RecordingStore(store) if store is not None else None
    cache = PrefixCache(pool, block_size, cached) if cached else None
    chunk_blocks = rng.randint(1, 3)
    prefixes = PrefixStore(rng, memory, chunk_blocks) if rng.random() < 0.5 else None
    stored: StoredPrefixes | None = None
    if prefixes is not None and cache is not None:
        max_wait_s = rng.choice((1.5, 6.0, 20.0))
        stored = StoredPrefixes(pool, cache, block_size, RecordingPrefixes(prefixes), chunk_blocks, max_wait_s)
    kv = KVManager(pool, block_size, recorded, cache, stored)
    scheduler = Scheduler(config, kv, (EOS,), speculation)
    scheduler.arrivals.set_adapter("style", "digest")
    log = StepLog(scheduler, recorded, log_weight) if log_weight is not None else None
    device = Device(rng, memory)
    return Client(rng, scheduler, device, store, prefixes, log, overlapped=rng.random() < 0.5)
