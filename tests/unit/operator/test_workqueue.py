"""The workqueue: no key twice, none lost, failures back off, nothing grows without bound. Time is a number here."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_samples import wait_until

from paceline_operator.workqueue import Backoff, Schedule, WorkQueue


def schedule(**options) -> Schedule[str]:
    return Schedule(lambda: 1.0, **options)


def test_a_key_added_twice_is_taken_once():
    queue = schedule()
    assert queue.add("a")
    assert queue.add("a")
    assert queue.take(0.0) == "a"
    assert queue.take(0.0) is None


def test_a_key_added_while_worked_on_waits_for_the_worker_and_then_runs_again():
    queue = schedule()
    queue.add("a")
    assert queue.take(0.0) == "a"
    queue.add("a")
    assert queue.take(0.0) is None, "two workers would have the same key"
    queue.done("a")
    assert queue.take(0.0) == "a"
    queue.done("a")
    assert queue.take(0.0) is None


def test_keys_are_taken_in_the_order_they_came():
    queue = schedule()
    for key in "cab":
        queue.add(key)
    assert [queue.take(0.0) for _ in range(3)] == ["c", "a", "b"]


def test_failures_back_off_exponentially_up_to_the_cap_and_success_resets():
    queue = schedule(backoff=Backoff(base_s=1.0, cap_s=5.0))
    assert [queue.retry("a", 0.0) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    queue.forget("a")
    assert queue.retry("a", 0.0) == 1.0


def test_backoff_does_not_overflow_after_weeks_of_failures():
    assert Backoff(base_s=0.2, cap_s=60.0).delay_s(100_000, 1.0) == 60.0


def test_jitter_takes_away_at_most_half():
    assert Backoff(base_s=2.0).delay_s(1, 0.0) == 1.0
    assert Backoff(base_s=2.0).delay_s(1, 1.0) == 2.0


def test_a_delayed_key_is_due_at_its_time_and_the_earliest_time_wins():
    queue = schedule()
    queue.add_after("a", 10.0, now=0.0)
    queue.add_after("a", 5.0, now=0.0)
    queue.add_after("a", 20.0, now=0.0)
    assert queue.next_due(1.0) == 4.0
    assert queue.take(4.9) is None
    assert queue.take(5.0) == "a"
    queue.done("a")
    assert queue.take(100.0) is None, "a superseded time came up again"


def test_a_full_queue_refuses_and_counts():
    queue = schedule(keys_max=2)
    assert queue.add("a")
    assert queue.add("b")
    assert not queue.add("c")
    assert queue.refused == 1


def test_rescheduling_one_key_for_ever_keeps_the_heap_small():
    queue = schedule()
    for step in range(10_000):
        queue.add_after("a", 1_000_000.0 - step, now=0.0)
    assert len(queue._heap) < 200


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "after", "take", "done", "retry"]), st.integers(0, 4)), max_size=60))
def test_whatever_happens_no_key_is_lost_or_with_two_workers(steps):
    queue = schedule()
    now, working, wanted = 0.0, [], set()
    for name, number in steps:
        now += 1.0
        if name == "add":
            queue.add(str(number))
            wanted.add(str(number))
        elif name == "after":
            queue.add_after(str(number), float(number), now)
            wanted.add(str(number))
        elif name == "take":
            key = queue.take(now)
            if key is not None:
                assert key not in working
                working.append(key)
                wanted.discard(key)
        elif working:
            key = working.pop()
            if name == "retry":
                queue.retry(key, now)
                wanted.add(key)
            queue.done(key)
        queue.check_integrity()
    for key in working:
        queue.done(key)
    left = set()
    while (key := queue.take(now + 1e9)) is not None:
        left.add(key)
        queue.done(key)
    assert wanted <= left


def test_get_waits_for_a_key_of_another_thread_and_close_wakes_everyone():
    import time

    queue = WorkQueue(schedule(), time.monotonic)
    taken: list[str | None] = []
    threads = [threading.Thread(target=lambda: taken.append(queue.get(10.0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    queue.add("a")
    wait_until("one worker has the key", lambda: taken == ["a"])
    queue.close()
    for thread in threads:
        thread.join(5.0)
    assert taken == ["a", None]


def test_get_gives_up_after_its_timeout():
    times = iter([0.0, 0.0, 2.0, 2.0])
    queue = WorkQueue(schedule(), lambda: next(times))
    assert queue.get(1.0) is None


def test_integrity_check_names_the_numbers():
    queue = schedule()
    queue.add("a")
    queue._working.add("a")
    with pytest.raises(RuntimeError, match="1 keys wait while a worker has them"):
        queue.check_integrity()
