"""Deadlines: refused when they can't be met, cut when they were missed, and never both or twice."""

from __future__ import annotations

import pytest
from driver import add, finish_all, make, step

from paceline_engine.core.deadlines import DeadlineQueue
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.speed import StepSpeed


def measured(tokens_per_second: float = 100.0, **options) -> Scheduler:
    """A scheduler that has prefilled one prompt of 16 tokens at the given speed, and is idle again."""
    scheduler = make(chunk=16, num_blocks=200, max_len=400, **options)
    add(scheduler, "measure", [3] * 16, 1)
    step(scheduler, now=0.0, seconds=16 / tokens_per_second)
    assert not scheduler.has_work
    return scheduler


def test_a_deadline_that_prefill_cannot_meet_is_refused_on_arrival():
    scheduler = measured()
    refused = add(scheduler, "late", 200, now=10.0, ttft_s=1.5)
    assert refused is not None
    assert (refused.finish_reason, refused.error_kind) == ("error", "deadline")
    assert "would take 2 s (200 prompt tokens at 100 tokens/s) and the deadline allows 1.5 s" in str(refused.error)
    assert add(scheduler, "in time", 200, now=10.0, ttft_s=2.5) is None
    assert scheduler.arrivals.num_deadline_refusals == 1


def test_prompts_ahead_count_and_those_behind_do_not():
    scheduler = measured()
    assert add(scheduler, "ahead", 100, now=0.0) is None
    assert add(scheduler, "behind", 100, now=0.0, priority=5) is None
    assert add(scheduler, "in time", 100, now=0.0, ttft_s=2.1) is None
    assert add(scheduler, "late", 100, now=0.0, ttft_s=2.1) is not None


def test_cached_tokens_need_no_time():
    scheduler = measured(cache="hash")
    add(scheduler, "warm", 160, 1)
    finish_all(scheduler)
    assert add(scheduler, "cold", [9] * 160, ttft_s=1.0) is not None
    assert add(scheduler, "cached", 161, ttft_s=1.0) is None


def test_a_limit_on_the_last_token_is_one_on_the_first_too():
    assert add(measured(), "late", 200, e2e_s=1.5) is not None


def test_nothing_is_refused_before_anything_was_measured():
    assert add(make(), "a", 40, ttft_s=0.001) is None


def test_decoding_and_short_prompts_do_not_pose_as_the_speed_of_prefill():
    scheduler = measured()
    add(scheduler, "chat", 2, 30)
    for second in range(30):
        step(scheduler, now=float(second), seconds=0.9)
    assert add(scheduler, "in time", 200, now=50.0, ttft_s=2.5) is None


def test_the_first_token_too_late_cuts_the_request():
    scheduler = make()
    add(scheduler, "a", 4, 10, now=1.0, ttft_s=2.0)
    (output,) = step(scheduler, now=2.0, seconds=1.5)[1]
    assert (output.finish_reason, output.error_kind, output.new_token_ids) == ("deadline", "deadline", (1,))
    assert "2 s for the first token" in str(output.error)
    assert not scheduler.has_work


def test_a_complete_answer_is_worth_more_than_its_deadline():
    scheduler = make()
    add(scheduler, "a", 4, 1, now=0.0, ttft_s=1.0, e2e_s=1.0)
    (output,) = step(scheduler, now=0.5, seconds=2.0)[1]
    assert output.finish_reason == "length"


def test_a_waiting_request_is_cut_when_its_time_is_over():
    scheduler = make(seqs=1)
    add(scheduler, "long", 4, 30)
    add(scheduler, "waits", 4, 5, now=0.0, ttft_s=3.0)
    assert [o.request_id for o in step(scheduler, now=3.0)[1]] == ["long"]
    outputs = step(scheduler, now=3.1)[1]
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("waits", "deadline"), ("long", None)]
    assert (scheduler.num_waiting, scheduler.num_deadline_misses) == (0, 1)


def test_the_last_token_too_late_cuts_a_running_request_and_frees_its_blocks():
    scheduler = make()
    add(scheduler, "a", 4, 30, now=0.0, ttft_s=1.0, e2e_s=5.0)
    tokens = 0
    for second in range(20):
        for output in step(scheduler, now=float(second))[1]:
            tokens += len(output.new_token_ids)
            reason = output.finish_reason
    assert (tokens, reason) == (6, "deadline")
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks


def test_a_cut_request_is_answered_although_nothing_is_left_to_do():
    scheduler = make(seqs=1)
    add(scheduler, "a", 4, 30, now=0.0, e2e_s=1.0)
    plan = scheduler.schedule(2.0)
    assert not plan.scheduled
    assert scheduler.has_work
    assert [o.finish_reason for o in scheduler.update(plan, [], 2.0)] == ["deadline"]
    assert not scheduler.has_work


def test_a_new_request_under_an_old_id_has_its_own_deadline():
    scheduler = make()
    add(scheduler, "a", 4, 30, now=0.0, e2e_s=1.0)
    scheduler.abort("a")
    add(scheduler, "a", 4, 30, now=0.9, e2e_s=5.0)
    assert [o.finish_reason for o in step(scheduler, now=2.0)[1]] == [None]
    assert [o.finish_reason for o in step(scheduler, now=6.0)[1]] == ["deadline"]


def test_deadlines_of_requests_that_ended_early_do_not_pile_up():
    scheduler = make()
    for number in range(500):
        add(scheduler, str(number), 4, 1, now=float(number), e2e_s=1e6)
        step(scheduler, now=float(number))
    assert len(scheduler._deadlines) <= 70


def test_an_empty_queue_of_deadlines_is_cheap_to_ask():
    assert DeadlineQueue().expired(1e9, {}) == []


@pytest.mark.parametrize(("alpha", "beta"), [(0.02, 0.001), (0.0, 0.002), (0.05, 0.0)])
def test_step_time_is_fitted(alpha, beta):
    speed = StepSpeed()
    for number in range(200):
        tokens = 1 + number % 7 * 20
        speed.observe(tokens, 0, alpha + beta * tokens)
    assert speed.alpha == pytest.approx(alpha, abs=1e-9)
    assert speed.beta == pytest.approx(beta, abs=1e-9)
    assert speed.prefill_tokens_per_second == 0


def test_the_fit_follows_a_device_that_slows_down():
    speed = StepSpeed()
    for number in range(1000):
        tokens = 64 + number % 3 * 32
        speed.observe(tokens, tokens, (0.01 + 0.001 * tokens) * (1 if number < 500 else 3))
    assert speed.beta == pytest.approx(0.003, rel=0.01)
    assert speed.prefill_tokens_per_second == pytest.approx(96 / 0.318, rel=0.2)
