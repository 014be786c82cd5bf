"""The scheduler's rules, one behaviour a test. Tokens are sampled by the test: no model, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from driver import EOS, add, finish_all, make, shares, step

from paceline_engine.core.block_pool import BlockPoolError
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.core.scheduler import Scheduler


class FakeStore:
    """Remembers which requests were saved; gives back up to `keep` tokens of each."""

    def __init__(self, keep: int = 10**6) -> None:
        self.keep = keep
        self.saved: dict[str, int] = {}
        self.dropped: list[str] = []

    def save(self, request) -> int:
        assert request.block_ids, "KV must be copied before the blocks are given back"
        self.saved[request.request_id] = request.num_computed_tokens
        return request.num_computed_tokens

    def load(self, request, num_tokens: int, start: int = 0) -> int:
        assert len(request.block_ids) > 0
        return min(self.keep, self.saved.pop(request.request_id), num_tokens)

    def drop(self, request) -> None:
        self.dropped.append(request.request_id)

    def clear(self) -> None:
        self.saved.clear()


def test_a_prompt_is_prefilled_in_chunks_and_then_decoded():
    scheduler = make(chunk=16)
    add(scheduler, "a", 40)
    assert [shares(step(scheduler)[0]) for _ in range(3)] == [{"a": 16}, {"a": 16}, {"a": 8}]
    plan, outputs = step(scheduler)
    assert shares(plan) == {"a": 1}
    assert plan.scheduled[0].start == 40
    assert outputs[0].new_token_ids == (1,)


def test_only_the_last_chunk_samples():
    scheduler = make(chunk=16)
    add(scheduler, "a", 20)
    assert [step(scheduler)[0].scheduled[0].sample for _ in range(3)] == [False, True, True]


def test_running_requests_come_before_waiting_ones_under_one_budget():
    scheduler = make(budget=20, chunk=16)
    add(scheduler, "a", 4)
    step(scheduler)
    add(scheduler, "b", 16)
    add(scheduler, "c", 16)
    assert shares(step(scheduler)[0]) == {"a": 1, "b": 16, "c": 3}


def test_max_num_seqs_bounds_running_requests():
    scheduler = make(seqs=2)
    for name in "abc":
        add(scheduler, name, 2)
    assert set(shares(step(scheduler)[0])) == {"a", "b"}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert finish_all(scheduler) == dict.fromkeys("abc", "length")


@pytest.mark.parametrize(
    ("sampling", "token_id", "reason"),
    [
        ({}, EOS, "stop"),
        ({"ignore_eos": True}, EOS, None),
        ({"stop_token_ids": (5,)}, 5, "stop"),
        ({"stop_token_ids": (5,), "ignore_eos": True}, 5, "stop"),
        ({}, 5, None),
        ({"max_tokens": 1}, 5, "length"),
        ({"max_tokens": 1}, EOS, "stop"),
    ],
)
def test_finish_reasons(sampling, token_id, reason):
    scheduler = make()
    add(scheduler, "a", 3, **sampling)
    outputs = step(scheduler, token_id)[1]
    assert [(o.new_token_ids, o.finish_reason) for o in outputs] == [((token_id,), reason)]
    assert scheduler.has_work is (reason is None)


def test_a_sequence_ends_at_the_maximum_length():
    scheduler = make(max_len=10)
    assert add(scheduler, "a", 9, max_tokens=1000) is None
    outputs = step(scheduler)[1]
    assert (outputs[0].new_token_ids, outputs[0].finish_reason) == ((1,), "length")


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "message"),
    [
        (0, 4, "no tokens"),
        (4, 0, "max_tokens must be at least 1"),
        (64, 4, "has 64 tokens; with a maximum length of 64 at most 63 fit"),
        (40, 20, "may need 15 KV blocks and the engine has 10"),
    ],
)
def test_what_can_never_run_is_refused_with_a_reason(prompt_len, max_tokens, message):
    scheduler = make(num_blocks=10)
    refused = add(scheduler, "a", prompt_len, max_tokens)
    assert refused is not None
    assert refused.finish_reason == "error"
    assert refused.error is not None
    assert message in refused.error
    assert not scheduler.has_work


def test_a_request_that_just_fits_in_the_pool_runs_alone_to_its_end():
    scheduler = make(num_blocks=10)
    assert add(scheduler, "a", 21, max_tokens=20) is None  # The last token's KV is never needed: 40 of 40 slots.
    assert finish_all(scheduler) == {"a": "length"}
    assert add(scheduler, "b", 22, max_tokens=20) is not None


def test_the_queue_is_bounded():
    scheduler = make(max_waiting=2)
    assert [add(scheduler, name, 2) for name in "ab"] == [None, None]
    refused = add(scheduler, "c", 2)
    assert refused is not None
    assert "queue is full (2 requests)" in str(refused.error)


def test_an_id_in_use_ends_once_with_an_error():
    scheduler = make()
    add(scheduler, "a", 3)
    step(scheduler)
    output = add(scheduler, "a", 3)
    assert output is not None
    assert "already in use" in str(output.error)
    assert not scheduler.has_work
    scheduler.check_integrity()


@pytest.mark.parametrize("steps", range(6))
def test_abort_frees_everything_in_each_state(steps):
    scheduler = make(chunk=4)
    add(scheduler, "a", 10)
    for _ in range(steps):
        step(scheduler)
    output = scheduler.abort("a")
    assert output is not None
    assert output.finish_reason == "abort"
    assert scheduler.abort("a") is None
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks
    assert "a" not in shares(step(scheduler)[0])


def test_abort_while_a_step_runs_drops_its_result():
    scheduler = make()
    add(scheduler, "a", 3)
    plan = scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.update(plan, [StepResult("a", (1,))]) == []
    scheduler.check_integrity()


def test_a_released_row_is_announced_once():
    scheduler = make()
    add(scheduler, "a", 3)
    step(scheduler)
    scheduler.abort("a")
    assert scheduler.schedule().released == ("a",)
    assert scheduler.schedule().released == ()


def test_an_error_of_one_request_ends_only_that_one():
    scheduler = make()
    add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    outputs = scheduler.update(scheduler.schedule(), [StepResult("a", error="not finite"), StepResult("b", (1,))])
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        ("a", "error", "not finite"),
        ("b", None, None),
    ]
    scheduler.check_integrity()


def test_a_missing_result_is_an_error_not_a_hang():
    scheduler = make()
    add(scheduler, "a", 3)
    outputs = scheduler.update(scheduler.schedule(), [])
    assert outputs[0].finish_reason == "error"


def run_until_preemption(scheduler: Scheduler, names: Sequence[str]) -> StepPlan:
    for name in names:
        add(scheduler, name, 8, max_tokens=16)
    for _ in range(40):
        plan = step(scheduler)[0]
        if scheduler.num_preemptions:
            return plan
    raise AssertionError("the pool never ran out")


def test_the_last_running_request_is_preempted_and_comes_back_first():
    scheduler = make(num_blocks=10)
    plan = run_until_preemption(scheduler, ["a", "b", "c", "d"])
    assert plan.released
    survivors = set(shares(plan))
    assert "a" in survivors
    assert plan.released[0] not in survivors
    reasons = finish_all(scheduler)
    assert reasons == dict.fromkeys("abcd", "length")


def test_a_preempted_request_goes_before_those_that_never_ran():
    scheduler = make(num_blocks=8, seqs=2)
    victim = run_until_preemption(scheduler, ["a", "b", "c"]).released[0]
    assert victim == "b"
    admitted: list[str] = []
    while scheduler.has_work:
        admitted += [item.request_id for item in step(scheduler)[0].admitted]
    assert admitted[:2] == ["b", "c"]


def test_a_prefill_under_way_keeps_the_blocks_it_will_need():
    """Else the second prompt would take them in between and be thrown out again."""
    scheduler = make(num_blocks=10, chunk=4)
    add(scheduler, "a", 32, max_tokens=2)
    add(scheduler, "b", 16, max_tokens=2)
    assert finish_all(scheduler) == {"a": "length", "b": "length"}
    assert scheduler.num_preemptions == 0


def test_prompts_admitted_in_one_step_are_counted_together():
    scheduler = make(num_blocks=10, chunk=4)
    add(scheduler, "a", 24, max_tokens=2)
    add(scheduler, "b", 24, max_tokens=2)
    assert set(shares(step(scheduler)[0])) == {"a"}
    assert finish_all(scheduler) == {"a": "length", "b": "length"}
    assert scheduler.num_preemptions == 0


def test_a_newcomer_leaves_room_for_the_next_block_of_those_who_run():
    scheduler = make(num_blocks=10)
    add(scheduler, "a", 21, max_tokens=8)
    step(scheduler)
    add(scheduler, "b", 16, max_tokens=8)
    assert finish_all(scheduler) == {"a": "length", "b": "length"}
    assert scheduler.num_preemptions == 0


def test_without_a_store_preempted_tokens_are_recomputed():
    scheduler = make(num_blocks=8, seqs=2)
    victim = run_until_preemption(scheduler, ["a", "b"]).released[0]
    for _ in range(40):
        plan = step(scheduler)[0]
        item = next((item for item in plan.scheduled if item.request_id == victim), None)
        if item is not None:
            assert item.start == 0
            assert [admitted.request_id for admitted in plan.admitted] == [victim]
            assert item.num_tokens > 8  # Prompt and the tokens it had sampled.
            return
    raise AssertionError("the victim never came back")


@pytest.mark.parametrize("keep", [10**6, 8, 0])
def test_with_a_store_only_what_it_forgot_is_recomputed(keep):
    store = FakeStore(keep)
    scheduler = make(num_blocks=8, seqs=2, store=store)
    victim = run_until_preemption(scheduler, ["a", "b"]).released[0]
    saved = store.saved[victim]
    while victim not in shares(plan := step(scheduler)[0]):
        pass
    item = next(item for item in plan.scheduled if item.request_id == victim)
    assert item.start == min(keep, saved)
    assert len(item.new_block_ids) * scheduler.kv.block_size >= item.end
    assert scheduler.kv.num_offloaded_sequences == 1
    assert scheduler.kv.num_restored_sequences == (keep > 0)
    finish_all(scheduler)


def test_abort_of_a_preempted_request_drops_its_stored_kv():
    store = FakeStore()
    scheduler = make(num_blocks=8, seqs=2, store=store)
    victim = run_until_preemption(scheduler, ["a", "b"]).released[0]
    scheduler.abort(victim)
    assert store.dropped == [victim]
    scheduler.check_integrity()


def test_a_store_that_claims_too_much_is_caught():
    class Boastful(FakeStore):
        def load(self, request, num_tokens: int, start: int = 0) -> int:
            return num_tokens + 1

    scheduler = make(num_blocks=8, seqs=2, store=Boastful())
    run_until_preemption(scheduler, ["a", "b"])
    with pytest.raises(BlockPoolError, match="the store returned"):
        finish_all(scheduler)


def test_nobody_is_let_in_in_a_step_that_preempts():
    scheduler = make(num_blocks=10, seqs=4)
    plan = run_until_preemption(scheduler, ["a", "b", "c", "d"])
    assert not plan.admitted


def test_preemptions_per_finished_request_are_bounded():
    scheduler = make(num_blocks=20, seqs=8, budget=64)
    for index in range(24):
        add(scheduler, str(index), 8, max_tokens=40)
    reasons = finish_all(scheduler, max_steps=2000)
    assert len(reasons) == 24
    assert scheduler.num_preemptions <= 3 * len(reasons)


@pytest.mark.parametrize("field", ["seqs", "budget", "chunk", "max_waiting"])
def test_bounds_below_one_are_refused(field):
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        make(**{field: 0})
