"""The real core loop on the tiny model: however it drives the device, requests get what the plain loop gives them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from paceline_engine.core.outputs import UNKNOWN, StepPlan, StepResult
from paceline_engine.core_process import CoreLoop
from paceline_engine.core_setup import Core
from paceline_engine.grammar import Grammars
from paceline_engine.kv_transfer import KVTransfer
from paceline_engine.messages import (
    AbortRequest,
    AddRequest,
    FromCore,
    SamplingParams,
    Shutdown,
    StepOutputs,
    ToCore,
    TokenLogprobs,
)
from paceline_engine.runner import Launched
from paceline_kvstore.tiers.memory import MemoryTier

# Name -> (num_scheduler_steps, how steps overlap).
MODES: dict[str, tuple[int, str]] = {"2 steps": (2, ""), "3 steps": (3, ""), "8 steps": (8, "")}
MODES |= {"overlapped": (1, "by a thread"), "launched": (1, "on the device")}
# Ids of the grammars that every loop has loaded.
DIGITS, OBJECT = 0, 1


class Device:
    """A runner as a device."""

    kv_store = None
    kv_store_bytes = 0
    stats: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.most_tokens = 0
        self.num_plans_ahead = 0

    def execute(self, plan: StepPlan) -> Sequence[StepResult]:
        results = self.runner.execute(plan)
        self.num_plans_ahead += any(UNKNOWN in item.token_ids for item in plan.scheduled)
        self.most_tokens = max([self.most_tokens, *(len(result.token_ids) for result in results)])
        return results


class LaunchingDevice(Device):
    """One that is handed the next step before anybody waits for the last one's results."""

    def launch(self, plan: StepPlan) -> Launched:
        self.num_plans_ahead += any(UNKNOWN in item.token_ids for item in plan.scheduled)
        launched = self.runner.launch(plan)
        self.most_tokens = max(self.most_tokens, 1)
        return launched


@dataclass
class Run:
    """A core that hears `messages`, one list a round, and stops when all is done."""

    loop: Any
    messages: list[list[ToCore]]
    overlapped: str = ""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, int] = field(default_factory=dict)
    embeddings: dict[str, bytes] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler = self.loop.scheduler
        make_device = LaunchingDevice if self.overlapped == "on the device" else Device
        self.device = make_device(self.loop.runner)
        core = Core(
            scheduler=self.scheduler,
            backend=self.device,
            max_model_len=96,
            namespace_digest="00" * 32,
            overlapped=bool(self.overlapped),
        )
        self._rounds = [[*messages, None] for messages in self.messages]
        CoreLoop(core, self._receive, self._keep, clock=self._tick).run()
        assert self.scheduler.kv.pool.num_free_blocks == self.scheduler.kv.pool.num_blocks

    def _tick(self) -> float:
        self.now += 0.01
        return self.now

    def _receive(self, _seconds: float) -> ToCore | None:
        if not self._rounds:
            return None if self.scheduler.has_work else Shutdown()
        message = self._rounds[0].pop(0)
        if not self._rounds[0]:
            self._rounds.pop(0)
        return message

    def _keep(self, message: FromCore) -> None:
        assert isinstance(message, StepOutputs)
        self.scheduler.check_integrity()
        for output in message.outputs:
            name = output.request_id
            assert name not in self.reasons, "an output after the terminal one"
            self.tokens.setdefault(name, []).extend(output.new_token_ids)
            self.logprobs.setdefault(name, []).extend(output.logprobs)
            self.prompt_logprobs[name] = self.prompt_logprobs.get(name, 0) + len(output.prompt_logprobs)
            if output.embedding:
                self.embeddings[name] = output.embedding
            if output.finish_reason is not None:
                self.reasons[name] = output.finish_reason


def random_requests(rng: random.Random, count: int) -> list[AddRequest]:
    """All sorts of requests; the tiny model's vocabulary has 199 tokens, 1 and 2 of them end an output."""
    trunk = [rng.randrange(3, 199) for _ in range(24)]
    requests: list[AddRequest] = []
    for number in range(count):
        prompt = trunk[: rng.choice((0, 8, 16, 24))] + [rng.randrange(3, 199) for _ in range(rng.randint(1, 12))]
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, 9, 17, 30, 30)),
            temperature=rng.choice((0.0, 0.0, 0.8, 1.5)),
            top_k=rng.choice((0, 0, 40)),
            top_p=rng.choice((1.0, 0.9)),
            seed=number,
            stop_token_ids=tuple(rng.sample(range(3, 199), rng.choice((0, 20)))),
            min_tokens=rng.choice((0, 0, 5)),
            ignore_eos=rng.random() < 0.6,
            repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
            presence_penalty=rng.choice((0.0, 0.0, 0.7)),
            logit_bias=rng.choice(((), ((1, 4.0), (7, 2.0)))),
            bad_words=rng.choice(((), ((5,), (6, 7)))),
            logprobs=rng.choice((None, 0, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )
        requests.append(
            AddRequest(
                request_id=str(number),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                priority=rng.choice((0, 0, 1)),
                grammar_id=rng.choice((DIGITS, OBJECT)) if rng.random() < 0.15 else None,
                embed=number % 7 == 3,
            )
        )
    return requests


def spread(rng: random.Random, requests: Sequence[AddRequest], num_aborts: int = 0) -> list[list[ToCore]]:
    rounds: list[list[ToCore]] = [[] for _ in range(30)]
    arrivals = sorted(rng.randrange(6) for _ in requests)
    for arrival, request in zip(arrivals, requests, strict=True):
        rounds[arrival].append(request)
    for number in rng.sample(range(len(requests)), num_aborts):
        at = rng.randint(arrivals[number], 29)
        rounds[at].append(AbortRequest(request_id=requests[number].request_id))
    return rounds


@pytest.fixture(scope="module")
def make(ending, new_loop, compiler) -> Callable[..., Any]:
    """A loop whose pool is large, or so small that requests lose their blocks, to a store or for good."""

    schema = compiler.schema('{"type": "object", "properties": {"name": {}}}')

    def grammars() -> Grammars:
        made = compiler.grammars()
        for grammar_id, constraint in ((DIGITS, compiler.regex("[0-9]{2,9}")), (OBJECT, schema)):
            made.load(grammar_id, constraint.grammar, lambda num_bytes, error: None)
        return made

    def loop(num_blocks: int = 400, tier: MemoryTier | None = None, **options: Any) -> Any:
        def store(kv: Any) -> KVTransfer:
            return KVTransfer(kv, tier, "ab" * 32, chunk_tokens=8)

        return new_loop(
            ending,
            num_blocks=num_blocks,
            max_num_seqs=6,
            grammars=grammars(),
            make_store=None if tier is None else store,
            **options,
        )

    return loop


@pytest.fixture(scope="module")
def plain_run(make) -> Callable[..., Run]:
    """What the plain loop makes of requests, with room for all of them; once a seed."""
    runs: dict[int, Run] = {}

    def run(seed: int, requests: Sequence[AddRequest]) -> Run:
        if seed not in runs:
            runs[seed] = Run(make(), [list(requests)])
        return runs[seed]

    return run


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("pool", "seed"), [("large", 0), ("small", 1), ("stored", 2)])
def test_every_way_to_loop_gives_the_same_answers(make, plain_run, mode, seed, pool):
    rng = random.Random(seed)
    requests = random_requests(rng, 14)
    plain = plain_run(seed, requests)
    assert {"stop", "length"} <= set(plain.reasons.values())
    sizes = {"large": {"cached": True}, "small": {"num_blocks": 18, "cached": True}, "stored": {"num_blocks": 18}}
    options = {**sizes[pool], "tier": MemoryTier(1 << 22) if pool == "stored" else None}
    num_steps, overlapped = mode
    run = Run(make(**options, num_scheduler_steps=num_steps), spread(rng, requests), overlapped)
    assert run.tokens == plain.tokens
    assert run.reasons == plain.reasons
    assert run.prompt_logprobs == plain.prompt_logprobs
    assert run.embeddings.keys() == plain.embeddings.keys() == {"3", "10"}
    for name, embedding in plain.embeddings.items():
        ours, theirs = (np.frombuffer(each, np.float32) for each in (run.embeddings[name], embedding))
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for name, entries in plain.logprobs.items():
        assert [entry.token_id for entry in run.logprobs[name]] == [entry.token_id for entry in entries]
        logprobs = [entry.logprob for entry in entries]
        assert [entry.logprob for entry in run.logprobs[name]] == pytest.approx(logprobs, abs=1e-3)
    assert (run.scheduler.num_preemptions > 0) == (pool != "large")
    assert (run.scheduler.kv.num_restored_sequences > 0) == (pool == "stored")
    assert run.device.most_tokens >= num_steps
    assert (run.device.num_plans_ahead > 0) == bool(overlapped)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("seed", [10, 11])
def test_aborted_requests_have_the_beginning_of_their_answer_and_disturb_nobody(make, plain_run, mode, seed):
    rng = random.Random(seed)
    requests = random_requests(rng, 12)
    plain = plain_run(seed, requests)
    loop = make(num_blocks=18, cached=True, num_scheduler_steps=mode[0])
    run = Run(loop, spread(rng, requests, num_aborts=6), mode[1])
    assert "abort" in run.reasons.values()
    for name, reason in run.reasons.items():
        if reason == "abort":
            assert run.tokens[name] == plain.tokens[name][: len(run.tokens[name])]
        else:
            assert (run.tokens[name], reason) == (plain.tokens[name], plain.reasons[name])
