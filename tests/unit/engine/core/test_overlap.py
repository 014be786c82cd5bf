"""A step planned while the device makes the last: the same answers, and results first where they are needed."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
from driver import EOS, Script, add, make, request, step
from test_loop import PROMPT, Adapters, Run, command

from paceline_engine.backends.simulated import SimulatedBackend
from paceline_engine.core.outputs import UNKNOWN, StepPlan, StepResult
from paceline_engine.core.request import Request
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.core.step_log import Planned, StepLog, decoded, replay
from paceline_engine.messages import AbortRequest

PATIENCE = 60.0


class Watched(SimulatedBackend):
    """A simulated device that keeps the plans it was given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(vocab_size=30, seed=1, alpha_ms=1.0, beta_ms=0.1, sleep=lambda _: None, **options)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        return super().execute(plan)

    @property
    def num_ahead(self) -> int:
        return sum(any(UNKNOWN in item.token_ids for item in plan.scheduled) for plan in self.plans)


@pytest.mark.parametrize("cache", [None, "radix"])
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_the_tokens_are_those_of_the_plain_loop(cache, num_blocks):
    messages = [request(str(n), PROMPT[n % 3 :], (24, 1, 2, 24, 24)[n], logprobs=0) for n in range(5)]
    plain = Run(make(seqs=1), [messages])
    device = Watched()
    run = Run(make(num_blocks=num_blocks, cache=cache, seqs=4, chunk=5), [messages], device, overlapped=True)
    for name in map(str, range(5)):
        assert run.tokens(name) == plain.tokens(name)
    assert [len(output.logprobs) for output in run.outputs] == [len(output.new_token_ids) for output in run.outputs]
    assert device.num_ahead > 5
    stats = run.sent[-1].stats
    assert (stats.num_preemptions > 0) == (num_blocks == 14)
    assert (stats.prefix_hit_tokens > 0) == (cache is not None)
    assert stats.num_free_blocks == stats.num_blocks


def test_the_next_step_is_planned_while_the_device_makes_the_last():
    scheduler = make()
    planned = [threading.Event() for _ in range(40)]
    schedule, count = scheduler.schedule, iter(planned)

    def noted(now: float = 0.0, after: StepPlan | None = None) -> StepPlan:
        plan = schedule(now, after)
        next(count).set()
        return plan

    class Waits(Watched):
        def execute(self, plan: StepPlan) -> Any:
            if plan.scheduled:
                assert planned[len(self.plans) + 1].wait(PATIENCE), "nobody planned the next step meanwhile"
            return super().execute(plan)

    scheduler.schedule = noted  # type: ignore[method-assign]
    device = Waits()
    run = Run(scheduler, [[request("a", PROMPT, 20)]], device, overlapped=True)
    assert len(run.tokens("a")) == 20
    assert device.num_ahead == 19


def test_equal_prompts_are_still_computed_once():
    """The second one finds the blocks although the first one's results come a step later."""
    messages = [request(name, [*PROMPT, *PROMPT], 4) for name in "ab"]
    device = Watched()
    run = Run(make(cache="hash", chunk=32, budget=64), [messages], device, overlapped=True)
    assert run.sent[-1].stats.prefix_hit_tokens == 20
    assert run.tokens("a") == run.tokens("b")


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_guesses_need_results_first(method):
    device = Watched()
    speculation = SpeculationConfig(method=method, min_n=1)
    run = Run(make(speculation=speculation), [[request("a", PROMPT, 24)]], device, overlapped=True)
    assert run.tokens("a") == Run(make(), [[request("a", PROMPT, 24)]]).tokens("a")
    assert device.num_ahead == 0
    assert run.sent[-1].stats.spec_draft_tokens > 0


def test_several_steps_need_results_first():
    device = Watched()
    run = Run(make(num_scheduler_steps=4), [[request("a", PROMPT, 24)]], device, overlapped=True)
    assert run.tokens("a") == Run(make(), [[request("a", PROMPT, 24)]]).tokens("a")
    assert device.num_ahead == 0


def test_what_a_grammar_may_force_needs_results_first():
    scheduler = make()
    add(scheduler, "free", 4, 9)
    step(scheduler)
    assert scheduler.can_plan_ahead()
    add(scheduler, "bound", 4, 9, grammar_id=7)
    step(scheduler)
    assert not scheduler.can_plan_ahead()


def test_a_step_that_might_take_somebodys_blocks_needs_results_first():
    scheduler = make(num_blocks=5)
    for name in "ab":
        add(scheduler, name, 7, 9)
    plan = scheduler.schedule()
    assert scheduler.can_plan_ahead()  # Each has two blocks; the eighth token still fits.
    scheduler.update(plan, [StepResult(name, (1,)) for name in "ab"])
    plan = scheduler.schedule()
    assert not scheduler.can_plan_ahead()


class Keeps:
    """A store that forgets nothing."""

    def save(self, request: Request) -> int:
        return request.num_computed_tokens

    def load(self, request: Request, num_tokens: int, start: int = 0) -> int:
        return num_tokens

    def drop(self, request: Request) -> None:
        pass

    def clear(self) -> None:
        pass


def test_a_request_whose_kv_comes_back_needs_results_first():
    """A plan in flight may still write into the blocks that it would get: those of one that ended meanwhile."""
    scheduler = make(store=Keeps())
    for name in "ab":
        add(scheduler, name, 7, 9)
    step(scheduler)
    assert scheduler.can_plan_ahead()
    scheduler._preempt(scheduler._running.pop())
    assert not scheduler.can_plan_ahead()
    step(scheduler)
    assert scheduler.kv.num_restored_sequences == 1
    assert scheduler.can_plan_ahead()


@pytest.mark.parametrize("ending", ["stop", "abort", "error"])
def test_what_was_planned_for_a_request_that_ended_is_ignored(ending):
    scheduler = make()
    add(scheduler, "a", 4, 9)
    script = Script([7] * 4 + [5, EOS if ending == "stop" else 6, 8, 9, 10])
    step(scheduler, script)
    first = scheduler.schedule()
    second = scheduler.schedule(0.0, first)
    assert second.scheduled[0].token_ids == [UNKNOWN]
    outputs = [scheduler.abort("a")] if ending == "abort" else []
    result = StepResult("a", error="not finite") if ending == "error" else script(first.scheduled[0])
    outputs += scheduler.update(first, [result], later=second)
    assert [output.finish_reason for output in outputs if output] == [ending]
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks
    third = scheduler.schedule(0.0, second)
    assert third.released == ("a",)
    assert scheduler.update(second, [script(second.scheduled[0])], later=third) == []
    assert not scheduler.has_work


def test_an_id_that_is_used_again_is_not_given_the_earlier_ones_token():
    scheduler = make()
    add(scheduler, "a", 4, 9)
    step(scheduler)
    first = scheduler.schedule()
    scheduler.abort("a")
    add(scheduler, "a", 4, 9)
    second = scheduler.schedule(0.0, first)
    assert [item.num_tokens for item in second.scheduled] == [4]
    assert scheduler.update(first, [StepResult("a", (66,))], later=second) == []
    (output,) = scheduler.update(second, [StepResult("a", (5,))])
    assert output.new_token_ids == (5,)


def test_nothing_is_planned_behind_the_last_token():
    scheduler = make()
    add(scheduler, "a", 4, 1)
    add(scheduler, "b", 4, 2)
    first = scheduler.schedule()
    second = scheduler.schedule(0.0, first)
    assert [item.request_id for item in second.scheduled] == ["b"]
    scheduler.update(first, [StepResult(name, (5,)) for name in "ab"], later=second)
    third = scheduler.schedule(0.0, second)
    assert third.scheduled == ()
    scheduler.update(second, [StepResult("b", (5,))], later=third)
    assert not scheduler.has_work


def test_commands_find_nothing_in_flight_and_the_log_replays():
    run = Run(
        make(cache="hash"),
        [
            [request("a", PROMPT, 30)],
            [],
            [],
            [command("sleep")],
            [command("sleep", "2", level="2"), command("wake", "3"), request("b", PROMPT, 9)],
            *[[]] * 4,
            [AbortRequest(request_id="b"), request("b", PROMPT, 5), command("explain", "4", log="true")],
        ],
        overlapped=True,
    )
    assert "1 requests are live" in str(run.results["1"].error)
    ends = [(output.request_id, output.finish_reason) for output in run.outputs if output.finish_reason]
    assert ends == [("a", "abort"), ("b", "abort"), ("b", "length")]
    (segment,) = decoded(run.results["4"].values["log"])
    assert [entry.ahead for entry in segment.entries if isinstance(entry, Planned)].count(True) > 3
    assert replay(segment) is None


def test_a_segment_of_the_log_begins_with_nothing_in_flight(monkeypatch):
    monkeypatch.setattr("paceline_engine.core_process.StepLog", partial(StepLog, max_weight=300))
    messages = [[request(str(n), PROMPT, 30) for n in range(3)], *[[]] * 20, [command("explain", log="true")]]
    run = Run(make(cache="hash"), messages, overlapped=True)
    segments = decoded(run.results["1"].values["log"])
    assert len(segments[-1].state.requests) == 3
    assert sum(isinstance(entry, Planned) and entry.ahead for segment in segments for entry in segment.entries) > 3
    assert [replay(segment) for segment in segments] == [None, None]


def test_adapters_change_with_nothing_in_flight():
    device = Adapters(vocab_size=30, seed=1, alpha_ms=0, beta_ms=0, sleep=lambda _: None)
    messages = [
        [command("load_adapter", "1", name="x", path="p"), request("a", PROMPT, 30, adapter="x")],
        [],
        [
            command("unload_adapter", "2", name="x"),
            AbortRequest(request_id="a"),
            command("unload_adapter", "3", name="x"),
        ],
    ]
    run = Run(make(), messages, device, overlapped=True)
    assert "1 requests use the adapter" in str(run.results["2"].error)
    assert run.results["3"].error is None


def test_a_device_that_fails_ends_the_loop():
    class Fails(Watched):
        def execute(self, plan: StepPlan) -> Any:
            if len(self.plans) == 3:
                raise RuntimeError("the device is gone")
            return super().execute(plan)

    with pytest.raises(RuntimeError, match="the device is gone"):
        Run(make(), [[request("a", PROMPT, 20)]], Fails(), overlapped=True)
