"""The check of greedy equality: a differing token passes at a tie alone, is listed, and there can't be many."""

from __future__ import annotations

from dataclasses import replace

import pytest
from greedy import find_ties, most_ties

PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def parted(tiny):
    """(transformers' tokens, those that take the second likeliest at position 2, how much less likely that is)."""
    expected = tiny.reference_tokens(PROMPT, 6)
    gaps = {token: tiny.reference_gap([*PROMPT, *expected[:2]], token) for token in range(tiny.config.vocab_size)}
    assert gaps.pop(expected[2]) == 0.0
    second = min(gaps, key=lambda token: gaps[token])
    head = [*expected[:2], second]
    return expected, head + tiny.reference_tokens([*PROMPT, *head], 3), gaps[second]


def test_equal_tokens_have_no_ties(tiny, parted):
    assert find_ties(tiny, {"a": PROMPT}, {"a": parted[0]}, {"a": parted[0]}) == []


def test_a_differing_token_passes_within_the_margin_alone(tiny, parted):
    expected, ours, gap = parted
    assert gap > 0
    (tie,) = find_ties(tiny, {"a": PROMPT}, {"a": ours}, {"a": expected}, margin=gap * 1.01)
    assert (tie.name, tie.position, tie.ours, tie.theirs, tie.gap) == ("a", 2, ours[2], expected[2], gap)
    with pytest.raises(AssertionError, match="no tie: request a, token 2"):
        find_ties(tiny, {"a": PROMPT}, {"a": ours}, {"a": expected}, margin=gap * 0.99)


def test_behind_a_tie_the_continuation_is_still_transformers(tiny, parted):
    expected, ours, gap = parted
    wrong = [*ours[:4], (ours[4] + 1) % tiny.config.vocab_size, ours[5]]
    with pytest.raises(AssertionError, match="no tie: request a, token 4"):
        find_ties(tiny, {"a": PROMPT}, {"a": wrong}, {"a": expected}, margin=gap * 1.01)
    with pytest.raises(AssertionError, match="has 5 tokens"):
        find_ties(tiny, {"a": PROMPT}, {"a": ours[:5]}, {"a": expected}, margin=gap * 1.01)


def test_many_ties_are_no_ties(tiny, parted):
    expected, ours, gap = parted
    names = [str(number) for number in range(20)]
    prompts, wanted = dict.fromkeys(names, PROMPT), dict.fromkeys(names, expected)
    assert most_ties(20) == 2
    few = wanted | dict.fromkeys(names[:2], ours)
    assert len(find_ties(tiny, prompts, few, wanted, margin=gap * 1.01)) == 2
    with pytest.raises(AssertionError, match="too many ties"):
        find_ties(tiny, prompts, wanted | dict.fromkeys(names[:3], ours), wanted, margin=gap * 1.01)


def test_a_tie_is_listed_beside_the_test(tiny, parted, equals_greedy, request):
    expected, ours, _ = parted
    first, second = expected[2], ours[2]
    tied = replace(tiny)
    tied.reference_gap = lambda prefix, token: 1e-5 if token == second else tiny.reference_gap(prefix, token)
    equals_greedy(tied, {"a": PROMPT}, {"a": ours}, {"a": expected})
    recorded = [value for name, value in request.node.user_properties if name == "greedy tie"]
    assert recorded == [f"request a, token 2: {second} for {first}, whose logit is 1e-05 higher (margin 0.0005)"]
    request.node.user_properties.clear()
