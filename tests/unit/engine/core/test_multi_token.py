"""Steps that yield several tokens: where outputs end, what counts as computed, what the client is told."""

from __future__ import annotations

import pytest
from driver import EOS, Script, add, finish_all, make, shares, step

from paceline_engine.core.outputs import ScheduledRequest, StepResult
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.messages import RequestOutput, TokenLogprobs

DRAFT = SpeculationConfig(method="draft", num_tokens=4)
PROMPT = [1, 2, 3, 4, 5]


def speculating(text: list[int], *, max_tokens: int = 40, guesses: int = 4, **options) -> tuple[Scheduler, Script]:
    """A scheduler with one request whose continuation is `text`, its prefill and first token done."""
    scheduler = make(speculation=DRAFT, chunk=options.pop("chunk", 16), max_len=options.pop("max_len", 64))
    add(scheduler, "a", PROMPT, max_tokens, **options)
    device = Script(PROMPT + text, guesses)
    step(scheduler, device)
    return scheduler, device


def only(outputs: list[RequestOutput]) -> RequestOutput:
    (output,) = outputs
    return output


def test_kept_guesses_arrive_at_once_with_one_token_more():
    scheduler, device = speculating(list(range(10, 60)))
    plan, outputs = step(scheduler, device)
    assert plan.scheduled[0].token_ids == [10, 11, 12, 13, 14]
    assert plan.scheduled[0].num_draft_tokens == 4
    output = only(outputs)
    assert output.new_token_ids == (11, 12, 13, 14, 15)
    assert (output.num_draft_tokens, output.num_accepted_tokens) == (4, 4)
    assert step(scheduler, device)[0].scheduled[0].start == 10


@pytest.mark.parametrize("kept", range(5))
def test_rejected_guesses_are_computed_over(kept):
    scheduler, device = speculating(list(range(10, 60)))
    device.wrong_from = kept
    step(scheduler, device)  # Its guesses were right; those it returns are wrong from `kept` on.
    plan, outputs = step(scheduler, device)
    output = only(outputs)
    assert output.new_token_ids == tuple(range(16, 16 + kept + 1))
    assert (output.num_draft_tokens, output.num_accepted_tokens) == (4, kept)
    assert output.rejected_token_ids == tuple(plan.scheduled[0].token_ids[1 + kept :])
    assert len(output.rejected_token_ids) == 4 - kept
    start = plan.scheduled[0].start
    assert step(scheduler, device)[0].scheduled[0].start == start + 1 + kept


@pytest.mark.parametrize(
    ("text", "sampling", "tokens", "accepted", "reason"),
    [
        ([10, 11, EOS, 13, 14, 15], {}, (11, EOS), 2, "stop"),
        ([10, 11, 12, 13, 14, EOS], {}, (11, 12, 13, 14, EOS), 4, "stop"),
        ([10, EOS, 12, 13, 14, 15], {"ignore_eos": True}, (EOS, 12, 13, 14, 15), 4, None),
        ([10, 11, 12, 13, 14, 15], {"stop_token_ids": (12, 13)}, (11, 12), 2, "stop"),
        ([10, 11, EOS, 13, 14, 15], {"min_tokens": 2}, (11, EOS), 2, "stop"),
        ([10, 11, EOS, 13, EOS, 15], {"min_tokens": 3}, (11, EOS, 13, EOS), 4, "stop"),
        ([10, 11, EOS, 13, 14, 15], {"min_tokens": 40}, (11, EOS, 13, 14, 15), 4, None),
    ],
)
def test_an_output_ends_inside_the_tokens_of_a_step(text, sampling, tokens, accepted, reason):
    scheduler, device = speculating(text + [50] * 20, **sampling)
    output = only(step(scheduler, device)[1])
    assert (output.new_token_ids, output.finish_reason) == (tokens, reason)
    assert output.num_accepted_tokens == accepted
    assert output.rejected_token_ids == ()  # What stood behind the end was never wrong.
    assert scheduler.has_work is (reason is None)


def test_a_guess_that_ends_the_output_on_the_device_is_not_reported_as_rejected():
    """The sampler stops at an ending token, so its answer has no token behind that guess."""
    scheduler, _ = speculating([10, 11, EOS, 13, 14, 15])
    plan = scheduler.schedule()
    assert plan.scheduled[0].token_ids == [10, 11, EOS, 13, 14]
    output = only(scheduler.update(plan, [StepResult(plan.scheduled[0].request_id, (11, EOS))]))
    assert (output.new_token_ids, output.finish_reason) == ((11, EOS), "stop")
    assert output.rejected_token_ids == ()


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_guesses_never_outrun_max_tokens(max_tokens):
    scheduler, device = speculating(list(range(10, 60)), max_tokens=max_tokens)
    tokens = 1
    while scheduler.has_work:
        plan, outputs = step(scheduler, device)
        assert plan.scheduled[0].num_draft_tokens <= max_tokens - tokens - 1
        tokens += len(only(outputs).new_token_ids)
    assert tokens == max_tokens


@pytest.mark.parametrize("max_len", range(7, 16))
def test_guesses_never_outrun_the_maximum_length(max_len):
    scheduler, device = speculating(list(range(10, 60)), max_len=max_len)
    while scheduler.has_work:
        plan, outputs = step(scheduler, device)
        assert plan.scheduled[0].end < max_len
    assert only(outputs).finish_reason == "length"


def test_guesses_share_the_step_with_everybody():
    scheduler = make(speculation=DRAFT, budget=6)
    for name in "ab":
        add(scheduler, name, PROMPT[:2], 20)
    device = Script([*PROMPT[:2], *range(10, 60)], 4)
    while scheduler.num_running != 1:  # Until one of them ended.
        plan, _ = step(scheduler, device)
        assert plan.num_tokens <= 6
        assert {item.request_id for item in plan.scheduled} == set("ab")


def test_guesses_preempt_nobody():
    """They take blocks only while every running request could still get one more."""
    scheduler = make(speculation=DRAFT, num_blocks=10, budget=64)
    for name in "abcd":
        add(scheduler, name, PROMPT, 4)
    assert finish_all(scheduler, device=Script([*PROMPT, *range(10, 60)], 4)) == dict.fromkeys("abcd", "length")
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("tokens", "message"),
    [((), "returned 0 tokens"), ((11, 12, 13, 14, 15, 16), "6 tokens for this request, not 1 to 5"), ((9, 12), "kept")],
)
def test_a_device_that_answers_nonsense_fails_that_request(tokens, message):
    scheduler, _ = speculating(list(range(10, 60)))
    output = only(step(scheduler, lambda item: StepResult(item.request_id, tokens))[1])
    assert (output.finish_reason, output.error_kind) == ("error", "internal")
    assert message in str(output.error)


def test_counters_tell_drafted_from_accepted_by_position():
    scheduler, device = speculating(list(range(10, 60)))
    device.wrong_from = 2
    for _ in range(3):
        step(scheduler, device)
    counters = scheduler.speculation.counters
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (3, 12, 8)
    assert counters.per_position == [3, 3, 1, 1]


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1)


def test_logprobs_end_with_the_tokens():
    scheduler, _ = speculating([10, 11])

    def device(item: ScheduledRequest) -> StepResult:
        tokens = (*item.token_ids[1:3], 77)
        return StepResult(item.request_id, tokens, logprobs=tuple(map(logprob, tokens)))

    scheduler._requests["a"].draft_token_ids = (5, EOS)
    output = only(step(scheduler, device)[1])
    assert [entry.token_id for entry in output.logprobs] == [5, EOS]


def with_prompt_logprobs(item: ScheduledRequest, prompt_len: int) -> StepResult:
    end = min(item.end, prompt_len - 1)
    predicted = tuple(logprob(position + 1) for position in range(item.start, end))
    return StepResult(item.request_id, (1,) if item.sample else (), prompt_logprobs=predicted)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_prompt_logprobs_come_once_with_the_first_token(chunk):
    scheduler = make(chunk=chunk)
    add(scheduler, "a", 10, 3, prompt_logprobs=0)
    seen: list[RequestOutput] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        seen += scheduler.update(plan, [with_prompt_logprobs(item, 10) for item in plan.scheduled])
    assert [entry and entry.token_id for entry in seen[0].prompt_logprobs] == [None, *range(1, 10)]
    assert [output.prompt_logprobs for output in seen[1:]] == [(), ()]


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt():
    scheduler = make(chunk=8, budget=16, num_blocks=10, seqs=4)
    add(scheduler, "a", 30, 3, prompt_logprobs=0, priority=5)
    seen: list[RequestOutput] = []
    count = 0
    while scheduler.has_work:
        if count == 1:
            add(scheduler, "urgent", 4, 30)
        plan = scheduler.schedule()
        answers = [with_prompt_logprobs(item, 30 if item.request_id == "a" else 1) for item in plan.scheduled]
        seen += [output for output in scheduler.update(plan, answers) if output.request_id == "a"]
        if count == 2:
            scheduler._preempt(scheduler._running.pop())  # As when "urgent" had needed the blocks just now.
        count += 1
    assert scheduler.num_preemptions == 1
    assert [entry and entry.token_id for entry in seen[0].prompt_logprobs] == [None, *range(1, 30)]


def test_too_few_prompt_logprobs_are_an_error():
    scheduler = make()
    add(scheduler, "a", 10, 3, prompt_logprobs=0)
    assert "0 prompt logprobs, not 9" in str(only(step(scheduler)[1]).error)


def test_an_error_in_the_middle_of_a_prefill_ends_the_request():
    scheduler = make(chunk=4)
    add(scheduler, "a", 10)
    outputs = scheduler.update(scheduler.schedule(), [StepResult("a", error="not finite")])
    assert only(outputs).error == "not finite"
    assert not scheduler.has_work


def test_long_prompts_leave_room_for_everybodys_next_token():
    scheduler = make(budget=16, chunk=16, max_len=200, num_blocks=200)
    add(scheduler, "short", 2, 20)
    step(scheduler)
    add(scheduler, "long", 100, 2, priority=-1)
    step(scheduler)
    assert [shares(step(scheduler)[0]) for _ in range(3)] == [{"long": 15, "short": 1}] * 3
