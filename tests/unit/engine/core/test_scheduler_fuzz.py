"""Random schedules: whatever arrives and leaves, books balance, budgets hold, everyone ends exactly once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.core.request import Request
from paceline_engine.core.scheduler import Scheduler, SchedulerConfig
from paceline_engine.messages import AddRequest, RequestOutput, SamplingParams

EOS = 0


class ForgetfulStore:
    """Keeps a random part of what it is given, and returns a random part of that."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.kept: dict[str, int] = {}

    def save(self, request: Request) -> int:
        kept = self.rng.randint(0, request.num_computed_tokens)
        if kept:
            self.kept[request.request_id] = kept
        return kept

    def load(self, request: Request, num_tokens: int, start: int = 0) -> int:
        return self.rng.randint(0, min(num_tokens, self.kept.pop(request.request_id)))

    def drop(self, request: Request) -> None:
        self.kept.pop(request.request_id, None)


@dataclass
class Client:
    """Sends requests and aborts, keeps the ledger of what came back, and plays the device."""

    rng: random.Random
    scheduler: Scheduler
    started: set[str] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)

    def take(self, output: RequestOutput | None) -> None:
        if output is None:
            return
        assert output.request_id in self.started
        assert output.request_id not in self.ended, "an output after the terminal one"
        if output.finish_reason is not None:
            self.ended[output.request_id] = output.finish_reason

    def add(self) -> None:
        rng, name = self.rng, str(len(self.started))
        self.started.add(name)
        prompt = tuple(rng.randint(1, 50) for _ in range(rng.randint(0, 45)))
        sampling = SamplingParams(max_tokens=rng.randint(0, 30), ignore_eos=rng.random() < 0.5)
        self.take(self.scheduler.add(AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)))

    def abort(self) -> None:
        self.take(self.scheduler.abort(self.rng.choice(sorted(self.started))))

    def step(self) -> StepPlan:
        num_preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        config = self.scheduler.config
        if self.scheduler.num_preemptions > num_preemptions:
            assert not plan.admitted, "let in where somebody was just thrown out"
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.scheduled) <= config.max_num_seqs
        assert all(1 <= item.num_tokens <= config.prefill_chunk_tokens for item in plan.scheduled)
        self._play_device(plan)
        if self.started and self.rng.random() < 0.1:
            self.abort()  # While the step runs.
        for output in self.scheduler.update(plan, self._sample(plan)):
            self.take(output)
        self.scheduler.check_integrity()
        return plan

    def _play_device(self, plan: StepPlan) -> None:
        """Follow block tables as a device must: rows need blocks for every token, no block twice."""
        for request_id in plan.released:
            self.tables.pop(request_id, None)
        fresh = {admitted.request_id for admitted in plan.admitted}
        assert fresh <= {item.request_id for item in plan.scheduled}
        for item in plan.scheduled:
            if item.request_id in fresh:
                assert item.request_id not in self.tables
                self.tables[item.request_id] = []
            else:
                assert item.start == self.computed[item.request_id], "a gap or an overlap in computed tokens"
            self.tables[item.request_id] += item.new_block_ids
            self.computed[item.request_id] = item.end
            assert len(self.tables[item.request_id]) * self.scheduler.kv.block_size >= item.end
        held = [block_id for table in self.tables.values() for block_id in table]
        assert len(held) == len(set(held))

    def _sample(self, plan: StepPlan) -> list[StepResult]:
        rng = self.rng
        return [
            StepResult(item.request_id, error="not finite")
            if rng.random() < 0.01
            else StepResult(item.request_id, (rng.choice((EOS, *range(1, 30))),))
            for item in plan.scheduled
            if item.sample
        ]


def make_client(seed: int) -> Client:
    rng = random.Random(seed)
    config = SchedulerConfig(
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(1, 40),
        prefill_chunk_tokens=rng.randint(1, 24),
        max_model_len=rng.randint(2, 60),
        max_num_waiting=rng.randint(1, 20),
    )
    store = ForgetfulStore(rng) if rng.random() < 0.6 else None
    kv = KVManager(BlockPool(rng.randint(1, 24)), rng.randint(1, 8), store)
    return Client(rng, Scheduler(config, kv, eos_token_ids=(EOS,)))


@pytest.mark.parametrize("seed", range(150))
def test_everyone_ends_exactly_once_and_all_blocks_come_back(seed):
    client = make_client(seed)
    scheduler, rng = client.scheduler, client.rng
    for _ in range(60):
        for _ in range(rng.choice((0, 0, 1, 3))):
            client.add()
        client.step()
    # A step computes at least one token. A request has at most 60 of them, and is computed anew at most once for each
    # preemption; far beyond that it is a livelock.
    for _ in range(60 * len(client.started) * 4 + 100):
        if not scheduler.has_work:
            break
        assert client.step().scheduled, "work, but nobody was scheduled"
    assert not scheduler.has_work
    assert set(client.ended) == client.started
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks
    store = scheduler.kv._store
    assert store is None or not store.kept, "the store still holds KV of requests that ended"


def test_the_oldest_running_request_progresses_in_every_step():
    """No starvation: under constant pressure the request at the head is never preempted and never skipped."""
    rng = random.Random(7)
    config = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=16, prefill_chunk_tokens=8, max_model_len=60, max_num_waiting=50
    )
    client = Client(rng, Scheduler(config, KVManager(BlockPool(16), 4), eos_token_ids=(EOS,)))
    for _ in range(400):
        if client.scheduler.num_waiting < 20:
            client.add()
        head = client.scheduler._running[0] if client.scheduler.num_running else None
        before = head.num_computed_tokens if head else 0
        client.step()
        assert head is None or head.request_id in client.ended or head.num_computed_tokens > before
    assert client.scheduler.num_preemptions > 0
