"""Guessing: the n-gram proposer against its definition, the cost model's numbers, and when guessing stops."""

from __future__ import annotations

import pytest
from driver import Script, add, finish_all, make, step
from hypothesis import given
from hypothesis import strategies as st

from paceline_engine.core.ngram import NgramIndex, propose_ngram
from paceline_engine.core.spec import SpeculationConfig, SpeculationPolicy, expected_tokens, speedup


def test_the_formula_of_the_paper():
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert speedup(0.8, 4, 0.2) == pytest.approx(1.8676, abs=1e-4)
    assert expected_tokens(1.0, 4) == 5.0
    assert expected_tokens(0.0, 4) == 1.0


@pytest.mark.parametrize(
    ("text", "guesses"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [3, 8, 1]),  # The earliest of two.
        ([5, 1, 2, 7, 8, 1, 2, 6, 8, 1, 2], [6, 8, 1]),  # The longest before the earliest.
        ([1, 2, 3, 4], []),
        ([1, 1, 1, 1], [1]),
        ([1], []),
        ([], []),
    ],
)
def test_ngrams_continue_the_longest_suffix_seen_before(text, guesses):
    assert propose_ngram(text, 2, 3, 3) == guesses
    assert NgramIndex(2, 3).propose(text, 3) == guesses


@given(
    text=st.lists(st.integers(0, 3), max_size=60),
    sizes=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    num_tokens=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_the_index_gives_what_reading_the_whole_text_gives(text, sizes, num_tokens, cuts):
    min_n, max_n = sizes[0], sizes[0] + sizes[1]
    index = NgramIndex(min_n, max_n)
    for cut in sorted(cut for cut in cuts if cut < len(text)):
        index.propose(text[:cut], num_tokens)
    assert index.propose(text, num_tokens) == propose_ngram(text, min_n, max_n, num_tokens)


def policy(**options) -> SpeculationPolicy:
    return SpeculationPolicy(SpeculationConfig(method="ngram", **options))


def observe(subject: SpeculationPolicy, kept: int, guesses: int = 4, times: int = 200, name: str = "") -> None:
    for _ in range(times):
        subject.observe(name, guesses, kept)


def test_length_follows_acceptance():
    good, bad = policy(), policy()
    for subject in (good, bad):
        subject.set_verification_cost(0.2)
    observe(good, kept=4)
    observe(bad, kept=0)
    assert good.num_wanted("") == 8
    assert bad.num_wanted("") == 0


def test_length_follows_the_cost_of_a_guess():
    lengths: list[int] = []
    for cost in (0.0, 0.1, 0.3, 0.6):
        subject = policy()
        observe(subject, kept=2, guesses=3)
        subject.set_verification_cost(cost)
        lengths.append(subject.num_wanted(""))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 8
    assert lengths[-1] < lengths[0]


def test_classes_are_switched_and_measured_apart():
    subject = policy(traffic_classes=(("batch", False),))
    subject.set_verification_cost(0.3)
    observe(subject, kept=0, name="chat")
    assert subject.num_wanted("batch") == 0
    assert subject.num_wanted("chat") == 0
    assert subject.num_wanted("code") > 0


def test_a_class_that_was_switched_off_by_its_gain_is_tried_again_and_comes_back():
    subject = policy()
    subject.set_verification_cost(0.3)
    observe(subject, kept=0)
    asked = 0
    while subject.num_wanted("") == 0:
        asked += 1
        assert asked < 1000, "never tried again"
    assert asked > 50, "tried again at once"
    for _ in range(3000):
        wanted = subject.num_wanted("")
        if wanted:
            subject.observe("", wanted, wanted)
    assert subject.num_wanted("") > 2


def test_a_fixed_number_stays():
    subject = policy(num_tokens=3)
    observe(subject, kept=0, guesses=3)
    assert subject.num_wanted("") == 3


def test_classes_are_bounded():
    subject = policy()
    for index in range(1000):
        subject.observe(str(index), 4, 0)
    assert len(subject._records) <= SpeculationPolicy.MAX_CLASSES + 1


@pytest.mark.parametrize("options", [{"num_tokens": 0}, {"num_tokens": 1000}, {"min_n": 0}, {"min_n": 4, "max_n": 3}])
def test_senseless_configurations_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        SpeculationConfig(**options)


def test_copied_text_needs_fewer_steps_and_gives_the_same_tokens():
    prompt = list(range(20, 40)) * 2
    text = prompt + list(range(20, 40))
    steps: dict[str, int] = {}
    for method in ("none", "ngram"):
        scheduler = make(speculation=SpeculationConfig(method=method), max_len=128, chunk=64, budget=64)
        add(scheduler, "a", prompt, 20)
        tokens: list[int] = []
        steps[method] = 0
        while scheduler.has_work:
            for output in step(scheduler, Script(text))[1]:
                tokens += output.new_token_ids
            steps[method] += 1
        assert tokens == text[len(prompt) :]
    assert steps["none"] == 20
    assert steps["ngram"] <= 5


def test_a_device_is_asked_for_guesses_only_where_they_are_wanted():
    config = SpeculationConfig(method="draft", num_tokens=3, traffic_classes=(("batch", False),))
    scheduler = make(speculation=config)
    for name in ("chat", "batch"):
        add(scheduler, name, 4, 8, traffic_class=name)
    wanted = {item.request_id: item.num_wanted_drafts for item in step(scheduler)[0].scheduled}
    assert wanted == {"chat": 3, "batch": 0}
    finish_all(scheduler)
