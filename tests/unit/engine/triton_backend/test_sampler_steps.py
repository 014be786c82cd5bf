"""What overlapped steps need of the device's sampler, and what a launch costs; through the interpreter."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from packed import make_row
from tiny_grammars import Compiler
from triton.runtime import interpreter
from twins import CPU, EOS, Twins, assert_same, assert_same_logprobs

from paceline_engine.backends.triton.sampler import TritonSampler
from paceline_engine.core.outputs import UNKNOWN, ScheduledRequest
from paceline_engine.sampling.logprobs import token_logprobs
from paceline_engine.sampling.row import RowError
from paceline_engine.sampling.sampler import NOT_FINITE, NOTHING_ALLOWED

VOCAB_SIZE = 61
# Of few tokens, so that penalties tell.
PENALTIES = {"repetition_penalty": 1.7, "frequency_penalty": 0.8, "presence_penalty": 0.3}


def share(request_id: str, token_id: int, start: int) -> ScheduledRequest:
    return ScheduledRequest(request_id=request_id, token_ids=[token_id], start=start, new_block_ids=[], sample=True)


def logits_of(steps: int, rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(steps, rows, VOCAB_SIZE, generator=generator)
    logits[:, :, :6] += 3
    return list(logits)


OVERLAPPED: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": ([1, 4], {"ignore_eos": True, "logprobs": 2, **PENALTIES}),
    "drawn": ([1, 5, 5], {"temperature": 0.9, "seed": 7, "ignore_eos": True, **PENALTIES}),
    # The rule ends with a token that isn't known yet.
    "held": ([3], {"min_tokens": 3, "stop_token_ids": (0, 1, 3, 4), "logit_bias": ((5, -9.0), (EOS, 9.0))}),
    "plain": ([4], {"temperature": 1.0, "seed": 1, "bad_words": ((EOS,),)}),
}


def test_a_launch_on_top_of_one_that_nobody_waited_for_gives_what_it_would_have_given_later():
    twins, ahead = Twins(VOCAB_SIZE, max_num_seqs=4), Twins(VOCAB_SIZE, max_num_seqs=4)
    for request_id, (prompt, sampling) in OVERLAPPED.items():
        twins.admit(request_id, prompt, **sampling)
        ahead.admit(request_id, prompt, **sampling)
    steps = logits_of(6, len(OVERLAPPED))
    expected = []
    for logits in steps:
        expected.append(twins.step(logits, {}))
        for result in expected[-1]:
            twins.take(result)
    assert [result[2].token_ids == (EOS,) for result in expected[:4]] == [False, False, False, True]

    rows = [request.rows[1] for request in ahead.requests.values()]
    assert not any(ahead.device.needs_tokens(row) for row in rows)
    waiting = []
    for index, logits in enumerate(steps):
        items = [
            share(request_id, UNKNOWN if index else prompt[-1], len(prompt) + index - 1)
            for request_id, (prompt, _) in OVERLAPPED.items()
        ]
        waiting.append(ahead.device.launch(logits.clone(), items, rows))
        if index > 0:
            results = waiting[index - 1]()
            assert_same(results, expected[index - 1])
            for row, result in zip(rows, results, strict=True):
                row.push(result.token_ids[0])
    assert_same(waiting[-1](), expected[-1])


def test_guesses_that_the_scheduler_does_not_take_are_not_counted():
    """Three guesses stand, one of them is taken; penalties of the next step are those of what was taken."""
    twins = Twins(VOCAB_SIZE, max_num_seqs=1)
    twins.admit("a", [1], ignore_eos=True, frequency_penalty=1.0)
    logits = torch.zeros(4, VOCAB_SIZE)
    for at, token_id in enumerate((7, 8, 9, 10)):
        logits[at, token_id] = 5.0
    result = twins.step(logits, {"a": [7, 8, 9]})[0]
    assert result.token_ids == (7, 8, 9, 10)
    twins.take(result, 2)
    close = torch.zeros(1, VOCAB_SIZE)
    # Each is chosen unless it was counted.
    close[0, [7, 8, 9, 10]] = torch.tensor([2.2, 2.1, 1.9, 1.8])
    assert twins.step(close, {})[0].token_ids == (9,)


def test_output_from_before_a_preemption_is_counted_like_any():
    twins = Twins(VOCAB_SIZE, max_num_seqs=1)
    request = twins.admit("a", [1, 7, 7], ignore_eos=True, repetition_penalty=1.1, frequency_penalty=1.0)
    request.known += [8, 8, 9]
    twins.preempt("a")
    logits = torch.zeros(1, VOCAB_SIZE)
    # 2.0 after the penalties: twice in the output, once in the output, in the prompt alone.
    logits[0, [8, 9, 7]] = torch.tensor([4.4, 3.3, 2.2])
    for token_id in (7, 8, 9):
        likely = logits.clone()
        likely[0, token_id] += 0.01
        assert twins.step(likely, {})[0].token_ids == (token_id,)


def test_a_guess_counts_for_the_positions_behind_it():
    twins = Twins(VOCAB_SIZE, max_num_seqs=2)
    twins.admit("a", [1], ignore_eos=True, frequency_penalty=1.0)
    twins.admit("b", [1], ignore_eos=True)
    logits = torch.zeros(2, 3, VOCAB_SIZE)
    logits[:, :, [7, 8]] = torch.tensor([2.0, 1.5])
    results = twins.step(logits.flatten(0, 1), {"a": [7, 8], "b": [7, 8]})
    assert [result.token_ids for result in results] == [(7, 8, 7), (7, 7)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_follows_a_guess_that_ends_the_output(temperature):
    """Not even an error of the logits behind it. At a temperature the guess is decided by p and q."""
    twins = Twins(VOCAB_SIZE, max_num_seqs=1)
    twins.admit("a", [1], temperature=temperature)
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[0, 7] = logits[1, EOS] = 30.0
    logits[2:, 5] = torch.nan
    if temperature > 0.0:
        twins.draft("a", [7, EOS, 9], torch.softmax(logits[[0, 1, 0]], -1).numpy())
    assert twins.step(logits, {"a": [7, EOS, 9]})[0].token_ids == (7, EOS)


def test_a_grammars_own_masks_and_forced_tokens():
    """xgrammar's, with guesses in it and with one that it refuses."""
    compiler = Compiler(199)
    grammar = compiler.regex("(ab|ac)*true")
    twins = Twins(199, max_num_seqs=2)
    for request_id in ("a", "b"):
        matcher = partial(compiler.matcher, grammar, [])
        twins.admit(request_id, [1], matcher=matcher, temperature=1.5, stop_token_ids=(1,))
    guesses = {"a": compiler.ids("abac"), "b": compiler.ids("a+b")}
    texts = {"a": "", "b": ""}
    generator = torch.Generator().manual_seed(2)
    while twins.requests:
        logits = torch.randn(sum(len(guesses[each]) + 1 for each in twins.requests), 199, generator=generator)
        for result in twins.step(logits, guesses):
            twins.take(result)
            texts[result.request_id] += compiler.text(result.token_ids)
            request = twins.requests[result.request_id]
            guesses[result.request_id] = request.rows[0].matcher.forced_tokens(4)
            if request.has_ended:
                twins.release(result.request_id)
    assert all(re.fullmatch("(ab|ac)*true(</s>|<.end.>)", text) for text in texts.values()), texts


def test_a_slot_has_nothing_left_of_the_request_before():
    twins = Twins(VOCAB_SIZE, max_num_seqs=1)
    for request_id in ("a", "b", "c"):
        twins.admit(request_id, [1], ignore_eos=True, **(PENALTIES if request_id != "b" else {}))
        for logits in logits_of(3, 1):
            twins.take(twins.step(logits, {})[0])
        twins.release(request_id)


def test_more_requests_than_slots_are_refused_by_name():
    sampler = TritonSampler(VOCAB_SIZE, 1, CPU)
    row = make_row(VOCAB_SIZE, [1], [])
    sampler.admit(row)
    sampler.admit(row)
    other = make_row(VOCAB_SIZE, [1], [])
    other.request_id = "late"
    with pytest.raises(ValueError, match=r"request late has no slot: all 1 are taken \(max_num_seqs\)"):
        sampler.admit(other)
    sampler.release("")
    sampler.admit(other)
    assert sampler.slot("late") == 0


@pytest.mark.parametrize(
    ("sampling", "needs"),
    [
        ({"bad_words": ((3,), (4,)), "min_tokens": 5, **PENALTIES}, False),
        ({"bad_words": ((3,), (4, 5))}, True),
        ({"grammar": True}, True),
    ],
)
def test_only_rules_on_the_tokens_themselves_need_them(sampling, needs):
    sampler = TritonSampler(VOCAB_SIZE, 1, CPU)
    row = make_row(VOCAB_SIZE, [1], [], **sampling)
    sampler.admit(row)
    assert sampler.needs_tokens(row) is needs


def test_trouble_in_one_row_is_its_own():
    twins = Twins(VOCAB_SIZE, max_num_seqs=4)
    twins.admit("broken", [1], temperature=0.5)
    twins.admit("fine", [1])
    twins.admit("excluded", [1], allowed_token_ids=(5,), bad_words=((5,),))
    refused = twins.admit("refused", [1], logprobs=1)
    for row in refused.rows:
        row.refusal = RowError("the adapter isn't loaded", "invalid")
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[0, 9] = torch.nan
    logits[1, 9] = 1.0
    results = twins.step(logits, {})
    assert [(result.token_ids, result.error, result.error_kind) for result in results] == [
        ((), NOT_FINITE, "internal"),
        ((9,), None, "internal"),
        ((), NOTHING_ALLOWED, "invalid"),
        ((), "the adapter isn't loaded", "invalid"),
    ]


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Names of the kernels launched so far."""
    names: list[str] = []
    launch = interpreter.GridExecutor.__call__

    def record(executor: interpreter.GridExecutor, *args: Any, **options: Any) -> Any:
        names.append(executor.fn.__name__)
        return launch(executor, *args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", record)
    return names


# Cuts leave greedy requests their likeliest token.
GREEDY = [{}, {"top_p": 0.5}, {"temperature": 1.0, "top_k": 1}]


@pytest.mark.parametrize(
    ("requests", "guesses", "expected"),
    [
        (GREEDY, [], ["draw"]),
        ([*GREEDY, {"temperature": 1.0}], [], ["draw"]),
        ([{}, {"temperature": 1.0, "min_p": 0.1}], [], ["cuts", "draw"]),
        ([{}, {"presence_penalty": 1.0}], [], ["rules", "draw"]),
        ([{"logprobs": 0}], [], ["draw", "logprobs"]),
        (GREEDY, [5], ["draw", "decide", "resolve"]),
    ],
)
def test_rows_pay_only_for_what_one_of_them_needs(launched, requests, guesses, expected):
    twins = Twins(VOCAB_SIZE, max_num_seqs=len(requests))
    for index, sampling in enumerate(requests):
        twins.admit(str(index), [1], **sampling)
    twins.step(torch.randn(len(requests) + len(guesses), VOCAB_SIZE), {"0": guesses})
    assert launched == [f"{name}_kernel" for name in expected]


def test_a_rule_that_is_over_costs_nothing(launched):
    twins = Twins(VOCAB_SIZE, max_num_seqs=1)
    twins.admit("a", [1], min_tokens=1)
    for logits in logits_of(2, 1):
        twins.take(twins.step(logits, {})[0])
    assert launched == ["rules_kernel", "draw_kernel", "draw_kernel"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_given_tokens_are_the_cpus(dtype):
    logits = (torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    tokens, num_top = [3, 0, 60, 9, 9], [0, 3, 1, 2, 0]
    sampler = TritonSampler(VOCAB_SIZE, 1, CPU)
    assert_same_logprobs(sampler.score(logits, tokens, num_top), token_logprobs(logits.float(), tokens, num_top))
    assert sampler.score(logits[:0], [], []) == []


def test_logits_of_16_bits_give_what_their_float32_gives():
    twins = Twins(VOCAB_SIZE, max_num_seqs=3)
    twins.admit("a", [1], temperature=0.8, seed=3, logprobs=2, ignore_eos=True, **PENALTIES)
    twins.admit("b", [1], ignore_eos=True, logprobs=0)
    for logits in logits_of(3, 2):
        for result in twins.step(logits.bfloat16(), {}):
            twins.take(result)
