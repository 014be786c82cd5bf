"""Sampling: exact where it is deterministic, statistically right where it isn't, reproducible always."""

from __future__ import annotations

import math

import pytest
import torch

from paceline_engine.core.outputs import ScheduledRequest, StepResult
from paceline_engine.messages import SamplingParams
from paceline_engine.sampler import _GOLDEN, _mix, gumbel_noise, sample

Item = tuple[ScheduledRequest, SamplingParams]


def item(position: int = 5, **sampling) -> Item:
    share = ScheduledRequest(request_id=str(position), token_ids=[1], start=position - 1, new_block_ids=[], sample=True)
    return share, SamplingParams(max_tokens=100, **sampling)


def results(logits: torch.Tensor, items: list[Item]) -> list[StepResult]:
    return sample(logits, [share for share, _ in items], [params for _, params in items])


def tokens(logits: torch.Tensor, items: list[Item]) -> list[int]:
    return [result.token_ids[0] for result in results(logits, items)]


def draw(logits: list[float], count: int, **sampling) -> list[int]:
    """`count` draws of one seeded request at successive positions."""
    items = [item(position, **{"seed": 11, **sampling}) for position in range(1, count + 1)]
    return tokens(torch.tensor([logits]).repeat(count, 1), items)


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


def test_a_draw_depends_on_seed_and_position_only():
    logits = torch.randn((6, 1000), generator=torch.Generator().manual_seed(1))
    items = [item(position, temperature=1.0, seed=position * 7) for position in range(1, 7)]
    together = tokens(logits, items)
    order = [3, 0, 5, 1, 4, 2]
    assert tokens(logits[order], [items[i] for i in order]) == [together[i] for i in order]
    assert [tokens(logits[i : i + 1], [items[i]])[0] for i in range(6)] == together


def test_noise_is_the_published_splitmix64():
    """The first output for seed 0 is the one that the generator's other implementations give."""

    def reference(seed: int) -> int:
        mask = (1 << 64) - 1
        z = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert reference(0) == 0xE220A8397B1DCDAF
    for seed in (0, 1, 2**63 - 1):
        assert int(_mix(torch.tensor(seed) + _GOLDEN)) & ((1 << 64) - 1) == reference(seed)


def test_noise_does_not_change_between_releases():
    """A user's seed should give the same text tomorrow."""
    noise = gumbel_noise([1234, -1, 2**64 - 1], [0, 10, 10], 3)
    known = torch.tensor([-0.12202897954674256, -0.24741313423954583, -0.19230361807603122], dtype=torch.float64)
    assert torch.allclose(noise[0], known, rtol=0, atol=1e-12)
    assert torch.equal(noise[1], noise[2])  # Seeds count modulo 2^64.


def test_noise_of_neighbouring_seeds_and_positions_is_unrelated():
    noise = gumbel_noise([5, 6, 5], [9, 9, 10], 20000)
    off_diagonal = torch.corrcoef(noise)[~torch.eye(3, dtype=torch.bool)]
    assert torch.all(off_diagonal.abs() < 0.03)
    assert torch.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.5772) < 0.03  # Euler's constant is the mean of a Gumbel variable.


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad):
    logits = torch.tensor([[1.0, bad, 0.0], [0.0, 2.0, 0.0], [-math.inf] * 3])
    answers = results(logits, [item(1), item(2, temperature=1e-9), item(3, temperature=1.0)])
    assert [answer.error is None for answer in answers] == [False, True, False]
    assert answers[1].token_ids == (1,)
    assert "isn't finite" in str(answers[0].error)


def test_masked_tokens_are_never_drawn():
    assert 1 not in draw([0.0, -math.inf, 0.5], 500, temperature=3.0)
