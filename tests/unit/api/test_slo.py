"""The SLO judge against worked examples and its own definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_api.slo import End, RequestRecord, Targets, Verdict, judge


def record(
    *,
    accept: float = 0.0,
    first: float | None = None,
    end: float = 1.0,
    tokens: int = 10,
    how: End = End.FINISHED,
    correct: bool | None = None,
    streamed: bool = True,
) -> RequestRecord:
    return RequestRecord(
        accept_s=accept,
        first_token_s=first,
        end_s=end,
        output_tokens=tokens,
        end=how,
        correct=correct,
        streamed=streamed,
    )


def test_the_fixed_load_example_gives_goodput_of_a_fifth() -> None:
    # Submitted at 0, 1, 2, 3, 4 s; window [0, 10] s; correct, TTFT <= .5, end to end <= 2 s.
    targets = Targets(ttft_s=0.5, e2e_s=2.0)
    requests = [
        record(accept=0, first=0.2, end=1.0, correct=True),
        record(accept=1, first=1.4, end=2.5, correct=True),
        record(accept=2, end=2.0, tokens=0, how=End.REJECTED_CAPACITY),
        record(accept=3, first=3.8, end=6.0, correct=True),
        record(accept=4, first=None, end=10.0, tokens=0, how=End.UNFINISHED),
    ]
    verdicts = [judge(request, targets) for request in requests]
    assert verdicts == [Verdict.GOOD, Verdict.GOOD, Verdict.REJECTED, Verdict.BAD_TTFT, Verdict.UNFINISHED]
    good = verdicts.count(Verdict.GOOD)
    finished = sum(request.end is End.FINISHED for request in requests)
    assert (finished / 10, good / 10) == (0.3, 0.2)
    assert good / sum(verdict.valid for verdict in verdicts) == 0.4


@pytest.mark.parametrize(
    ("request_", "verdict"),
    [
        (record(first=0.6, end=0.7), Verdict.BAD_TTFT),
        (record(first=0.1, end=1.9, tokens=10), Verdict.BAD_TPOT),
        (record(first=0.1, end=2.5, tokens=1), Verdict.BAD_E2E),
        (record(first=0.1, end=0.5, tokens=1), Verdict.GOOD),
        (record(first=0.1, end=0.5, correct=False), Verdict.BAD_CONTENT),
        (record(first=None, end=0.4, tokens=0), Verdict.GOOD),
        (record(first=None, end=0.9, tokens=0), Verdict.BAD_TTFT),
        (record(how=End.FAILED), Verdict.ERROR),
        (record(how=End.REJECTED_QUOTA), Verdict.EXCLUDED),
        (record(how=End.CLIENT_ERROR), Verdict.EXCLUDED),
        (record(first=0.1, end=0.2, how=End.CANCELLED), Verdict.EXCLUDED),
        (record(first=None, end=0.4, how=End.CANCELLED), Verdict.EXCLUDED),
        (record(first=None, end=0.6, how=End.CANCELLED), Verdict.BAD_TTFT),
        (record(first=0.6, end=0.7, how=End.CANCELLED), Verdict.BAD_TTFT),
    ],
)
def test_each_way_to_end(request_: RequestRecord, verdict: Verdict) -> None:
    assert judge(request_, Targets(ttft_s=0.5, tpot_s=0.1, e2e_s=2.0)) is verdict


def test_without_limits_every_finished_request_is_good() -> None:
    assert judge(record(first=100.0, end=1000.0), Targets()) is Verdict.GOOD


def test_tpot_is_undefined_for_one_token() -> None:
    assert record(first=0.1, end=5.0, tokens=1).tpot_s is None
    assert record(first=1.0, end=3.0, tokens=5).tpot_s == 0.5


@given(st.integers(0, 50), st.floats(0.1, 2), st.floats(0.01, 1), st.none() | st.floats(0.1, 9))
def test_a_whole_answer_has_one_limit_and_it_is_the_tightest(
    tokens: int, ttft: float, tpot: float, e2e: float | None
) -> None:
    limit = min(ttft + max(0, tokens - 1) * tpot, e2e or 1e9)
    targets = Targets(ttft_s=ttft, tpot_s=tpot, e2e_s=e2e)
    assert judge(record(end=limit * 0.99, tokens=tokens, streamed=False), targets) is Verdict.GOOD
    assert judge(record(end=limit * 1.01, tokens=tokens, streamed=False), targets) is Verdict.BAD_E2E


def test_a_whole_answer_of_unlimited_tpot_has_only_the_e2e_limit() -> None:
    assert judge(record(end=100.0, tokens=5, streamed=False), Targets(ttft_s=1.0)) is Verdict.GOOD
    assert judge(record(end=1.1, tokens=1, streamed=False), Targets(ttft_s=1.0)) is Verdict.BAD_E2E


def test_leaving_before_a_whole_answer_was_due_is_excluded() -> None:
    targets = Targets(ttft_s=0.1, e2e_s=2.0)
    assert judge(record(end=1.9, how=End.CANCELLED, streamed=False), targets) is Verdict.EXCLUDED
    assert judge(record(end=2.1, how=End.CANCELLED, streamed=False), targets) is Verdict.BAD_TTFT


@given(
    first=st.floats(0, 10), decode=st.floats(0, 10), tokens=st.integers(1, 100), limit=st.floats(0.01, 10),
    looser=st.floats(0, 10),
)  # fmt: skip
def test_loosening_a_limit_never_makes_a_good_request_bad(
    first: float, decode: float, tokens: int, limit: float, looser: float
) -> None:
    request = record(first=first, end=first + decode, tokens=tokens)
    tight = Targets(ttft_s=limit, tpot_s=limit, e2e_s=limit)
    loose = Targets(ttft_s=limit + looser, tpot_s=limit + looser, e2e_s=limit + looser)
    if judge(request, tight) is Verdict.GOOD:
        assert judge(request, loose) is Verdict.GOOD
