"""The SLO judge: one function that decides whether a request was good.

Router, load tool and simulator judge with this function, so that a tenant's attainment, the autoscaler's input and a
benchmark's goodput are the same number. Definitions (times in seconds, from the router's accept):

    TTFT = t_first - t_accept
    TPOT = (t_last - t_first) / (output_tokens - 1), undefined for fewer than two tokens
    E2E  = t_last - t_accept
    good = finished, correct where a check exists, and every stated limit met

An undefined TPOT meets its limit. Quota refusals, client errors and cancels before the TTFT limit are excluded: a
tenant over its quota neither burns its budget nor scales the fleet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class End(StrEnum):
    """How a request ended, as its client saw it. UNFINISHED: still running when the window closed."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED_CAPACITY = "rejected_capacity"
    REJECTED_QUOTA = "rejected_quota"
    CLIENT_ERROR = "client_error"
    UNFINISHED = "unfinished"


class Verdict(StrEnum):
    """Outcome label of `paceline_router_slo_requests_total`. GOOD / (all but EXCLUDED) is attainment."""

    GOOD = "good"
    BAD_TTFT = "bad_ttft"
    BAD_TPOT = "bad_tpot"
    BAD_E2E = "bad_e2e"
    BAD_CONTENT = "bad_content"
    ERROR = "error"
    REJECTED = "rejected"
    UNFINISHED = "unfinished"
    EXCLUDED = "excluded"

    @property
    def valid(self) -> bool:
        """Counts in the denominator of attainment."""
        return self is not Verdict.EXCLUDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Latency limits in seconds; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What was measured of one request. Times in seconds on one monotonic clock; None if it never happened.

    `end_s` is when the request ended in any way. `correct` is None where no correctness check exists.
    """

    accept_s: float
    first_token_s: float | None
    end_s: float
    output_tokens: int
    end: End
    correct: bool | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.accept_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.accept_s


def judge(request: RequestRecord, targets: Targets) -> Verdict:
    """The verdict on one request. The first limit missed, in the order TTFT, TPOT, E2E, names it."""
    match request.end:
        case End.REJECTED_QUOTA | End.CLIENT_ERROR:
            return Verdict.EXCLUDED
        case End.REJECTED_CAPACITY:
            return Verdict.REJECTED
        case End.FAILED:
            return Verdict.ERROR
        case End.UNFINISHED:
            return Verdict.UNFINISHED
        case End.CANCELLED:
            return _judge_cancelled(request, targets)
        case End.FINISHED:
            return _judge_finished(request, targets)


def _over(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _judge_cancelled(request: RequestRecord, targets: Targets) -> Verdict:
    """A client that leaves before its first token was due says nothing about us; one that waited longer does."""
    waited_s = request.e2e_s if request.ttft_s is None else request.ttft_s
    return Verdict.BAD_TTFT if _over(waited_s, targets.ttft_s) else Verdict.EXCLUDED


def _judge_finished(request: RequestRecord, targets: Targets) -> Verdict:
    if request.correct is False:
        return Verdict.BAD_CONTENT
    # A finished request without a single token has no first token: its end is when the client knew.
    ttft_s = request.e2e_s if request.ttft_s is None else request.ttft_s
    if _over(ttft_s, targets.ttft_s):
        return Verdict.BAD_TTFT
    if _over(request.tpot_s, targets.tpot_s):
        return Verdict.BAD_TPOT
    if _over(request.e2e_s, targets.e2e_s):
        return Verdict.BAD_E2E
    return Verdict.GOOD
