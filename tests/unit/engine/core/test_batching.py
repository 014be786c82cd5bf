"""When waiting requests join: continuous, static and dynamic batching; order, priorities, and how often one is thrown
out; what a waiting request is told."""

from __future__ import annotations

import pytest
from driver import add, finish_all, make, shares, step

from paceline_engine.core.scheduler import Scheduler


def steps_to_finish(batching: str) -> int:
    """Steps that four requests of unequal length take on two places."""
    scheduler = make(seqs=2, batching=batching)
    for number, max_tokens in enumerate((2, 12, 2, 12)):
        add(scheduler, str(number), 4, max_tokens)
    count = 0
    while scheduler.has_work:
        step(scheduler, now=count * 1.0)
        count += 1
    return count


def test_static_batching_waits_for_the_longest_continuous_does_not():
    assert steps_to_finish("static") == 24
    assert steps_to_finish("dynamic") == 24
    assert steps_to_finish("continuous") == 16


def test_a_static_batch_is_what_waited_when_it_began():
    scheduler = make(seqs=4, batching="static")
    add(scheduler, "a", 4, 5)
    step(scheduler)
    add(scheduler, "b", 4, 2)
    assert shares(step(scheduler)[0]) == {"a": 1}
    while "b" not in shares(plan := step(scheduler)[0]):
        pass
    assert shares(plan) == {"b": 4}


def test_a_static_batch_that_one_steps_budget_cannot_prefill_is_still_one_batch():
    scheduler = make(seqs=4, batching="static", budget=16, chunk=16)
    for name in "abc":
        add(scheduler, name, 10, 5)
    step(scheduler)
    step(scheduler)
    assert set(shares(step(scheduler)[0])) == set("abc")


def test_a_static_batch_takes_its_preempted_members_back():
    scheduler = make(seqs=4, batching="static", num_blocks=8)
    for name in "abc":
        add(scheduler, name, 8, 12)
    add(scheduler, "d", 4, 1)
    assert finish_all(scheduler) == dict.fromkeys("abcd", "length")
    assert scheduler.num_preemptions > 0


def test_a_dynamic_batch_is_given_a_short_time_to_fill():
    scheduler = make(seqs=2, batching="dynamic", batch_wait_s=0.5)
    add(scheduler, "a", 4, 5, now=10.0)
    assert not scheduler.schedule(10.1).scheduled
    assert scheduler.seconds_to_wait(10.1) == pytest.approx(0.4)
    assert scheduler.waiting_reasons() == {"batch": 1}
    add(scheduler, "b", 4, 5, now=10.2)
    assert scheduler.seconds_to_wait(10.2) == 0
    assert set(shares(step(scheduler, now=10.2)[0])) == {"a", "b"}


def test_a_dynamic_batch_begins_unfilled_when_its_time_is_over():
    scheduler = make(seqs=2, batching="dynamic", batch_wait_s=0.5)
    add(scheduler, "a", 4, 5, now=10.0)
    assert set(shares(step(scheduler, now=10.5)[0])) == {"a"}


def test_a_lower_priority_number_runs_first():
    scheduler = make(seqs=1)
    for name, priority in (("a", 3), ("b", 1), ("c", 2), ("d", 1)):
        add(scheduler, name, 4, 1, priority=priority)
    assert list(finish_all(scheduler)) == ["b", "d", "c", "a"]


def test_fcfs_ignores_priorities():
    scheduler = make(seqs=1, scheduling_policy="fcfs")
    for name, priority in (("a", 3), ("b", 1), ("c", 2)):
        add(scheduler, name, 4, 1, priority=priority)
    assert list(finish_all(scheduler)) == ["a", "b", "c"]


def test_the_worst_ranked_loses_its_blocks_whoever_came_last():
    scheduler = make(num_blocks=8, seqs=3)
    add(scheduler, "worst", 8, 16, priority=9)
    step(scheduler)
    add(scheduler, "best", 8, 16, priority=0)
    for _ in range(20):
        plan, _ = step(scheduler)
        if scheduler.num_preemptions:
            assert plan.released == ("worst",)
            return
    raise AssertionError("the pool never ran out")


def thrash(max_preemptions: int) -> tuple[Scheduler, dict[str, int]]:
    """A low-priority request that is joined, whenever it runs alone, by an urgent one that needs most of the pool."""
    scheduler = make(num_blocks=10, seqs=4, max_preemptions=max_preemptions)
    add(scheduler, "patient", 8, 24, priority=9)
    preempted: dict[str, int] = {}
    for number in range(400):
        if (scheduler.num_running, scheduler.num_waiting) == (1, 0):
            add(scheduler, str(number), 8, 28)
        plan, _ = step(scheduler)
        for request_id in plan.released:
            request = scheduler._requests.get(request_id)
            if request is not None:
                preempted[request_id] = request.num_preemptions
        if "patient" not in scheduler._requests:
            break
    return scheduler, preempted


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_nobody_is_preempted_more_often_than_the_limit(limit):
    scheduler, preempted = thrash(limit)
    assert max(preempted.values(), default=0) <= limit
    assert thrash(50)[1].get("patient", 0) > limit
    assert set(finish_all(scheduler).values()) <= {"length"}


def test_a_waiting_request_is_told_what_is_missing_and_how_much():
    scheduler = make(num_blocks=10, seqs=2)
    add(scheduler, "a", 24, 4)
    step(scheduler)
    add(scheduler, "b", 20, 4, now=1.0)
    add(scheduler, "c", 4, 4, now=2.0)
    step(scheduler)
    first, second = scheduler.why_waiting(now=5.0)
    # "b" needs 5 blocks; of 10 "a" has 6, and one stays free for its next.
    assert (first.request_id, first.reason, first.missing, first.waited_s) == ("b", "blocks", 2, 4.0)
    assert "2 KV blocks" in first.message
    assert (second.request_id, second.position, second.reason) == ("c", 1, "blocks")
    assert "1 requests are ahead" in second.message
    assert scheduler.waiting_reasons() == {"blocks": 2}


@pytest.mark.parametrize(
    ("options", "reason"), [({"seqs": 1}, "seqs"), ({"budget": 8}, "budget"), ({"batching": "static"}, "batch")]
)
def test_other_reasons_to_wait(options, reason):
    scheduler = make(**options)
    add(scheduler, "a", 30, 4)
    step(scheduler)
    add(scheduler, "b", 4, 4)
    step(scheduler)
    assert [entry.reason for entry in scheduler.why_waiting()] == [reason]


def test_cancelling_a_hundred_requests_leaves_nothing_behind():
    scheduler = make(num_blocks=40, seqs=8, cache="hash", max_waiting=200)
    for number in range(100):
        add(scheduler, str(number), 8 + number % 20, 20, e2e_s=100.0)
        if number % 10 == 0:
            step(scheduler)
    assert len(scheduler.abort_all()) == 100
    plan = scheduler.schedule()
    assert not plan.scheduled
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.has_work) == (0, 0, False)
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks
    scheduler.check_integrity()


def test_an_id_can_be_used_again_at_once():
    scheduler = make()
    add(scheduler, "a", 4, 9)
    step(scheduler)
    scheduler.abort("a")
    add(scheduler, "a", 6, 2)
    plan, _ = step(scheduler)
    assert plan.released == ("a",)
    assert [(item.request_id, item.start) for item in plan.scheduled] == [("a", 0)]
    assert [item.num_prompt_tokens for item in plan.admitted] == [6]
    assert finish_all(scheduler) == {"a": "length"}


def test_a_sleeping_engine_refuses_and_wakes_cold():
    scheduler = make(cache="hash")
    add(scheduler, "warm", 20, 1)
    finish_all(scheduler)
    add(scheduler, "cut", 20, 10)
    step(scheduler)
    assert [(o.request_id, o.finish_reason) for o in scheduler.sleep()] == [("cut", "abort")]
    refused = add(scheduler, "a", 20)
    assert refused is not None
    assert refused.error_kind == "asleep"
    scheduler.wake()
    assert add(scheduler, "b", 20, 1) is None
    assert step(scheduler)[0].scheduled[0].start == 0


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        ({"prompt": 0}, "invalid"),
        ({"prompt": 5, "max_tokens": 0}, "invalid"),
        ({"prompt": 64}, "invalid"),
        ({"prompt": 5, "adapter": "nobody"}, "invalid"),
    ],
)
def test_refusals_say_of_which_kind_they_are(problem, kind):
    scheduler = make()
    refused = add(scheduler, "a", **problem)
    assert refused is not None
    assert (refused.finish_reason, refused.error_kind) == ("error", kind)


def test_a_full_queue_is_told_apart():
    scheduler = make(max_waiting=1)
    add(scheduler, "a", 4)
    refused = add(scheduler, "b", 4)
    assert refused is not None
    assert refused.error_kind == "queue_full"
    assert scheduler.arrivals.num_queue_refusals == 1


def test_an_adapter_in_use_is_not_taken_away():
    scheduler = make()
    scheduler.arrivals.set_adapter("style", "digest")
    add(scheduler, "a", 4, adapter="style")
    with pytest.raises(ValueError, match="1 requests use the adapter"):
        scheduler.arrivals.remove_adapter("style")
    finish_all(scheduler)
    scheduler.arrivals.remove_adapter("style")
    assert add(scheduler, "b", 4, adapter="style") is not None
