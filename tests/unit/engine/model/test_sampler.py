"""Sampling: exact where it is deterministic, statistically right where it isn't, reproducible always."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline_engine.core.outputs import AdmittedRequest, ScheduledRequest, StepResult
from paceline_engine.messages import SamplingParams
from paceline_engine.sampling.cuts import kept_tokens, probabilities
from paceline_engine.sampling.logprobs import token_logprobs
from paceline_engine.sampling.row import Row, RowError
from paceline_engine.sampling.sampler import Sampler

EOS = 2
Item = tuple[ScheduledRequest, SamplingParams, tuple[int, ...], tuple[int, ...]]


def item(position: int = 5, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **sampling) -> Item:
    """A decode share whose token stands at `position`; prompt and output, where a rule looks at them."""
    if prompt or output:
        position = len(prompt) + len(output)
    share = ScheduledRequest(request_id="", token_ids=[1], start=position - 1, new_block_ids=[], sample=True)
    return share, SamplingParams(max_tokens=100, **sampling), prompt or (1,) * (position - len(output)), output


def make_row(prompt, output, sampling, vocab_size) -> Row:
    request = AdmittedRequest(
        request_id="", token_ids=(*prompt, *output), num_prompt_tokens=len(prompt), sampling=sampling
    )
    return Row(request, vocab_size, (EOS,))


def results(logits: torch.Tensor, items: list[Item]) -> list[StepResult]:
    rows = [make_row(prompt, output, sampling, logits.shape[-1]) for _, sampling, prompt, output in items]
    shares = [
        ScheduledRequest(request_id=str(i), token_ids=share.token_ids, start=share.start, new_block_ids=[], sample=True)
        for i, (share, *_) in enumerate(items)
    ]
    return Sampler(logits.shape[-1]).sample(logits.clone(), shares, rows)


def tokens(logits: torch.Tensor, items: list[Item]) -> list[int]:
    return [result.token_ids[0] for result in results(logits, items)]


def draw(logits: list[float], count: int, **sampling) -> list[int]:
    """`count` draws of one seeded request at successive positions."""
    items = [item(position, **{"seed": 11, **sampling}) for position in range(1, count + 1)]
    return tokens(torch.tensor([logits]).repeat(count, 1), items)


def after_rules(logits: list[float], prompt=(1,), output=(), **sampling) -> list[float]:
    values = np.array(logits, dtype=np.float32)
    make_row(prompt, output, SamplingParams(max_tokens=100, **sampling), len(logits)).restrict(values)
    return values.tolist()


def test_greedy_is_argmax_with_the_first_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert tokens(logits, [item(), item()]) == [1, 0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_tiny_temperatures_are_greedy(temperature):
    logits = torch.randn((4, 300), generator=torch.Generator().manual_seed(0)) * 30
    items = [item(position, temperature=temperature, seed=3) for position in range(1, 5)]
    assert tokens(logits, items) == logits.argmax(-1).tolist()


def test_top_k_of_one_is_greedy_at_any_temperature():
    assert set(draw([1.0, 1.5, 0.0], 50, temperature=5.0, top_k=1)) == {1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    logits = [0.0, 1.0, 2.0, -1.0]
    count = 5000
    drawn = torch.bincount(torch.tensor(draw(logits, count, temperature=temperature)), minlength=4) / count
    wanted = (torch.tensor(logits) / temperature).softmax(0)
    # 5 standard errors of a share.
    assert torch.all((drawn - wanted).abs() < 5 * torch.sqrt(wanted * (1 - wanted) / count))


def test_top_k_keeps_exactly_k_even_among_equals():
    assert len(set(draw([1.0] * 10, 400, temperature=1.0, top_k=3))) == 3


def test_top_p_keeps_the_smallest_set_with_the_mass():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(draw(logits, 1000, temperature=1.0, top_p=0.79)) == {0, 1}
    assert set(draw(logits, 1000, temperature=1.0, top_p=0.81)) == {0, 1, 2}
    assert set(draw(logits, 200, temperature=1.0, top_p=1e-9)) == {0}
    # top_p counts mass after top_k: 0.5 of the remaining 0.8 suffices.
    assert set(draw(logits, 1000, temperature=1.0, top_k=2, top_p=0.6)) == {0}


def test_min_p_is_relative_to_the_likeliest_and_comes_before_top_p():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(draw(logits, 1000, temperature=1.0, min_p=0.31)) == {0, 1}
    assert set(draw(logits, 1000, temperature=1.0, min_p=0.29)) == {0, 1, 2}
    # 0.5 of the remaining 0.8 is over 0.6 of it.
    assert set(draw(logits, 1000, temperature=1.0, min_p=0.31, top_p=0.6)) == {0}


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_cuts_equal_the_sorted_definition(scale):
    """Against the textbook: sort everything, cut by min_p, then k, then p."""
    rng = np.random.default_rng(3)
    for trial in range(60):
        logits = (rng.standard_normal(400) * scale).astype(np.float32)
        if trial % 3 == 0:
            logits[rng.integers(0, 400, 350)] = -np.inf
        sampling = SamplingParams(
            max_tokens=1,
            temperature=1.0,
            top_k=int(rng.choice([0, 2, 30, 500])),
            top_p=float(rng.choice([1.0, 0.999, 0.9, 0.3])),
            min_p=float(rng.choice([0.0, 0.05, 0.6])),
        )
        order = np.argsort(-logits.astype(np.float64), kind="stable")
        p = np.exp(logits[order].astype(np.float64) - logits.max())
        keep = (p > 0) & (logits[order] >= logits.max() + np.log(max(sampling.min_p, 1e-300)))
        if sampling.top_k:
            keep[sampling.top_k :] = False
        p = np.where(keep, p, 0.0)
        p /= p.sum()
        keep &= np.cumsum(p) - p < sampling.top_p
        assert kept_tokens(logits, sampling).tolist() == sorted(order[keep].tolist())
        assert np.isclose(probabilities(logits, sampling).sum(), 1.0)


def test_a_draw_depends_on_seed_and_position_only():
    logits = torch.randn((6, 1000), generator=torch.Generator().manual_seed(1))
    items = [item(position, temperature=1.0, seed=position * 7) for position in range(1, 7)]
    together = tokens(logits, items)
    order = [3, 0, 5, 1, 4, 2]
    assert tokens(logits[order], [items[i] for i in order]) == [together[i] for i in order]
    assert [tokens(logits[i : i + 1], [items[i]])[0] for i in range(6)] == together


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad):
    logits = torch.tensor([[1.0, bad, 0.0], [0.0, 2.0, 0.0], [-math.inf] * 3])
    answers = results(logits, [item(1), item(2, temperature=1e-9), item(3, temperature=1.0)])
    assert [answer.error is None for answer in answers] == [False, True, False]
    assert answers[1].token_ids == (1,)
    assert "isn't finite" in str(answers[0].error)


def test_masked_tokens_are_never_drawn():
    assert 1 not in draw([0.0, -math.inf, 0.5], 500, temperature=3.0)


def test_allowed_token_ids_leave_nothing_else():
    assert after_rules([5.0, 4.0, 3.0, 2.0], allowed_token_ids=(1, 3, 99)) == [-math.inf, 4.0, -math.inf, 2.0]


def test_bad_words_are_banned_where_their_beginning_stands_in_the_output():
    bad = {"bad_words": ((3,), (0, 1), (1, 0, 2))}
    logits = [0.0] * 4
    nothing, minus = [0.0, 0.0, 0.0, -math.inf], -math.inf
    assert after_rules(logits, prompt=(0,), **bad) == nothing  # The prompt isn't output.
    assert after_rules(logits, prompt=(0,), output=(0,), **bad) == [0.0, minus, 0.0, minus]
    assert after_rules(logits, prompt=(1,), output=(0,), **bad) == [0.0, minus, 0.0, minus]
    assert after_rules(logits, output=(1, 0), **bad) == [0.0, minus, minus, minus]
    assert after_rules(logits, output=(0, 1), **bad) == nothing


def test_min_tokens_keeps_every_ending_token_out_until_then():
    options = {"min_tokens": 2, "stop_token_ids": (3,)}
    minus = -math.inf
    assert after_rules([0.0] * 4, output=(0,), **options) == [0.0, 0.0, minus, minus]
    assert after_rules([0.0] * 4, output=(0, 0), **options) == [0.0] * 4
    # A request that ignores eos may have it as text at any time.
    assert after_rules([0.0] * 4, ignore_eos=True, **options) == [0.0, 0.0, 0.0, minus]


def test_penalties_follow_their_formulas():
    logits = [2.0, -2.0, 1.0, 1.0]
    counted = {"prompt": (3,), "output": (0, 1, 0)}
    assert after_rules(logits, frequency_penalty=0.5, **counted) == [1.0, -2.5, 1.0, 1.0]
    assert after_rules(logits, presence_penalty=0.5, **counted) == [1.5, -2.5, 1.0, 1.0]
    assert after_rules(logits, repetition_penalty=2.0, **counted) == [1.0, -4.0, 1.0, 0.5]
    both = after_rules(logits, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, **counted)
    assert both == [-0.25, -4.75, 1.0, 0.5]


def test_bias_comes_before_penalties():
    assert after_rules([1.0, 0.0], output=(0,), logit_bias=((0, 3.0),), repetition_penalty=2.0) == [2.0, 0.0]


@pytest.mark.parametrize("bias", [((7, 1.0),), ((-1, 1.0),)])
def test_a_bias_outside_the_vocabulary_is_one_requests_error(bias):
    with pytest.raises(RowError, match=f"logit_bias names token {bias[0][0]}; the model has tokens 0 to 3"):
        after_rules([0.0] * 4, logit_bias=bias)


def test_rules_that_leave_nothing_fail_one_request_with_the_reason():
    logits = torch.zeros((2, 4))
    answers = results(logits, [item(allowed_token_ids=(3,), bad_words=((3,),)), item()])
    assert "no token is allowed next" in str(answers[0].error)
    assert answers[1].token_ids == (0,)


def test_a_row_moves_over_guesses_and_back_without_a_trace():
    rng = np.random.default_rng(5)
    sampling = SamplingParams(
        max_tokens=9,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        bad_words=((4, 5), (1,), (6, 6, 7)),
        min_tokens=6,
    )
    logits = rng.standard_normal(12).astype(np.float32)
    for _ in range(50):
        prompt, output, guesses = (rng.integers(0, 12, size).tolist() for size in (4, 5, 3))
        row = make_row(prompt, output, sampling, 12)
        for index in range(len(guesses) + 1):
            moved, fresh = logits.copy(), logits.copy()
            row.restrict(moved)
            make_row(prompt, output + guesses[:index], sampling, 12).restrict(fresh)
            assert moved.tolist() == fresh.tolist()
            if index < len(guesses):
                assert row.push(guesses[index])
        row.pop(len(guesses))
        again, fresh = logits.copy(), logits.copy()
        row.restrict(again)
        make_row(prompt, output, sampling, 12).restrict(fresh)
        assert again.tolist() == fresh.tolist()


def test_logprobs_describe_the_model_before_rules_and_temperature():
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(4))
    items = [
        item(logprobs=3, temperature=0.5, seed=1, logit_bias=((7, 100.0),)),
        item(),
        item(logprobs=0, temperature=2.0, seed=2),
    ]
    biased, silent, own = results(logits, items)
    assert silent.logprobs == ()
    wanted = logits.log_softmax(-1)
    assert biased.token_ids == (7,)
    [entry] = biased.logprobs
    assert entry.token_id == 7
    assert entry.logprob == pytest.approx(float(wanted[0, 7]), abs=1e-6)
    assert entry.rank == int((wanted[0] > wanted[0, 7]).sum()) + 1
    values, ids = wanted[0].topk(3)
    assert [token for token, _ in entry.top] == ids.tolist()
    assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-6)
    assert own.logprobs[0].token_id == own.token_ids[0]
    assert own.logprobs[0].top == ()


def test_alternatives_of_a_large_vocabulary_are_the_likeliest():
    logits = torch.randn((7, 5000), generator=torch.Generator().manual_seed(9))
    logits[0, -1] = 9.0  # In the odd end of the row.
    logits[1, 128:132] = 9.0  # Many in one stretch.
    entries = token_logprobs(logits, [0] * 7, [5] * 7)
    values, ids = logits.log_softmax(-1).topk(5)
    found = [value for entry in entries for _, value in entry.top]
    assert found == pytest.approx(values.flatten().tolist(), abs=1e-5)
    assert [sorted(token for token, _ in entry.top) for entry in entries] == ids.sort().values.tolist()
