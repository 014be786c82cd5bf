"""Several steps in one round trip: when they are planned, how many, and what is booked."""

from __future__ import annotations

import pytest
from driver import EOS, add, finish_all, make, request, shares, step
from test_loop import PROMPT, Run, command

from paceline_engine.backends.simulated import SimulatedBackend
from paceline_engine.core.outputs import ScheduledRequest, StepPlan, StepResult
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.core.step_log import decoded, replay
from paceline_engine.rounds import in_rounds


def device(item: ScheduledRequest) -> StepResult:
    """As many tokens as steps: their positions."""
    first = item.num_known_tokens
    return StepResult(item.request_id, tuple(range(first, first + item.num_steps)))


def decoding(*max_tokens: int, **options) -> Scheduler:
    """A scheduler whose requests "0", "1", ... have prompts of 4 tokens, prefilled, and their first token."""
    scheduler = make(**{"num_scheduler_steps": 4, **options})
    for number, count in enumerate(max_tokens):
        add(scheduler, str(number), 4, count)
    step(scheduler, device)
    return scheduler


def steps(plan: StepPlan) -> dict[str, int]:
    return {item.request_id: item.num_steps for item in plan.scheduled}


def test_decodes_take_several_steps_with_the_blocks_for_them():
    scheduler = decoding(20)
    plan, outputs = step(scheduler, device)
    (item,) = plan.scheduled
    assert (item.num_tokens, item.num_steps, len(item.new_block_ids)) == (1, 4, 1)
    assert outputs[0].new_token_ids == (5, 6, 7, 8)
    assert (outputs[0].num_draft_tokens, outputs[0].num_accepted_tokens) == (0, 0)
    assert step(scheduler, device)[0].scheduled[0].start == 8
    assert scheduler.num_scheduled_tokens == 4 + 4 + 4


def test_a_device_may_make_fewer():
    scheduler = decoding(20)
    step(scheduler, lambda item: StepResult(item.request_id, (5, 6)))
    assert step(scheduler, device)[0].scheduled[0].start == 6


def test_more_tokens_than_steps_are_nonsense():
    scheduler = decoding(20)
    (output,) = step(scheduler, lambda item: StepResult(item.request_id, (5, 6, 7, 8, 9)))[1]
    assert "5 tokens for this request, not 1 to 4" in str(output.error)


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_step_is_planned_behind_the_last_token(max_tokens):
    scheduler = decoding(max_tokens, 11)
    while scheduler.has_work:
        plan, _ = step(scheduler, device)
        for item in plan.scheduled:
            assert item.start + 1 + item.num_steps <= 4 + {"0": max_tokens, "1": 11}[item.request_id]


def test_an_output_ends_within_the_steps():
    scheduler = decoding(20)
    (output,) = step(scheduler, lambda item: StepResult(item.request_id, (5, EOS, 7, 8)))[1]
    assert (output.new_token_ids, output.finish_reason) == ((5, EOS), "stop")


@pytest.mark.parametrize("newcomer", [1, 4])
def test_nobodys_first_token_waits_for_others_steps(newcomer):
    scheduler = decoding(20)
    add(scheduler, "new", newcomer, 9)
    assert steps(step(scheduler, device)[0]) == {"0": 1, "new": 1}
    assert steps(step(scheduler, device)[0]) == {"0": 4, "new": 4}


def test_guesses_are_verified_one_step_at_a_time():
    scheduler = decoding(20, 20, speculation=SpeculationConfig(method="draft", num_tokens=2))
    assert steps(step(scheduler, device)[0]) == {"0": 1, "1": 1}
    forced = decoding(20, 20)
    forced._requests["1"].draft_token_ids = (5,)
    assert steps(forced.schedule()) == {"0": 1, "1": 1}


def test_who_waits_for_a_place_gets_it_as_soon_as_one_is_free():
    scheduler = decoding(20, 4, seqs=2)
    add(scheduler, "2", 4, 4)
    assert steps(step(scheduler, device)[0]) == {"0": 3, "1": 3}
    assert shares(step(scheduler, device)[0]) == {"0": 1, "2": 4}


def test_more_steps_preempt_nobody_and_leave_a_block_for_each():
    scheduler = decoding(20, 20, 20, num_blocks=8, num_scheduler_steps=8)  # 3 hold a full block each.
    plan = scheduler.schedule()
    assert sorted(steps(plan).values()) == [4, 4, 4]
    assert scheduler.kv.pool.num_free_blocks == 2
    tight = decoding(8, 8, 8, 8, num_blocks=12, num_scheduler_steps=8)
    assert finish_all(tight, device=device) == dict.fromkeys("0123", "length")
    assert tight.num_preemptions == 0


def test_a_deadline_cuts_as_early_as_with_single_steps():
    scheduler = make(num_scheduler_steps=8)
    add(scheduler, "a", 4, 30, e2e_s=10.0)
    add(scheduler, "b", 4, 30)
    now, plans = 0.0, []
    while scheduler.has_work:
        plan = scheduler.schedule(now)
        plans.append(max([0, *steps(plan).values()]))
        begin, now = now, now + max(plans[-1], 1)
        results = [device(item) for item in plan.scheduled]
        for output in scheduler.update(plan, results, now, now - begin):
            if output.request_id == "a" and output.finish_reason is not None:
                assert (output.finish_reason, begin) == ("deadline", 11.0)
    assert plans == [1, 8, 1, 1, 8, 8, 3]


def test_speed_is_that_of_one_step():
    scheduler = decoding(40, 40)
    for _ in range(4):
        step(scheduler, device, seconds=0.4)
    assert scheduler.speed.step_seconds(2) == pytest.approx(0.1)


def simulated(**options) -> SimulatedBackend:
    return SimulatedBackend(vocab_size=30, seed=1, alpha_ms=10.0, beta_ms=1.0, **options)


def test_rows_leave_the_round_trip_when_they_end():
    """The simulated device sleeps for each step, of as many tokens as rows are left in it."""
    sleeps: list[float] = []
    backend = simulated(eos_token_ids=range(0, 30, 5), sleep=sleeps.append)
    scheduler = make(num_scheduler_steps=8, max_len=200)
    for number in range(3):
        add(scheduler, str(number), [number, 2, 3], 90, ignore_eos=number == 0)
    scheduler.update(plan := scheduler.schedule(), backend.execute(plan))
    sleeps.clear()
    plan = scheduler.schedule()
    lengths = [len(result.token_ids) for result in backend.execute(plan)]
    assert lengths[0] == 8 > min(lengths)
    rows_left = [sum(length > index for length in lengths) for index in range(8)]
    assert sleeps == pytest.approx([0.010 + 0.001 * rows for rows in rows_left])


@pytest.mark.parametrize("num_steps", [2, 3, 8])
def test_the_loop_makes_the_same_tokens_in_fewer_round_trips(num_steps):
    messages = [request(str(n), PROMPT[n % 3 :], 24, logprobs=0) for n in range(5)]
    plain = Run(make(seqs=4), [messages])
    run = Run(make(seqs=4, num_scheduler_steps=num_steps), [messages, *[[]] * 3, [command("explain", "x", log="true")]])
    for name in map(str, range(5)):
        assert run.tokens(name) == plain.tokens(name)
    assert sum(len(output.logprobs) for output in run.outputs) == 5 * 24
    (last, plain_last) = run.sent[-1].stats, plain.sent[-1].stats
    assert last.num_scheduled_tokens == plain_last.num_scheduled_tokens
    assert last.num_steps < plain_last.num_steps * (0.2 + 1 / num_steps)
    (segment,) = decoded(run.results["x"].values["log"])
    assert len(segment.entries) > 5
    assert replay(segment) is None


def test_what_goes_wrong_in_a_further_step_is_left_to_the_next_plan():
    item = ScheduledRequest(request_id="a", token_ids=[1], start=0, new_block_ids=[0], sample=True, num_steps=4)
    seen: list[list[int]] = []

    def one_step(plan: StepPlan) -> list[StepResult]:
        (share,) = plan.scheduled
        seen.append(share.token_ids)
        if share.start == 2:
            return [StepResult("a", error="not finite")]
        return [StepResult("a", (share.start + 10,), draft_token_ids=(share.start,))]

    (result,) = in_rounds(StepPlan(scheduled=(item,)), one_step, lambda _: False)
    assert (result.token_ids, result.error, result.draft_token_ids) == ((10, 11), None, (1,))
    assert seen == [[1], [10], [11]]
