"""The SLO judge: one function that decides whether a request was good.

Router, load tool and simulator judge with this function, so that a tenant's attainment, the autoscaler's input and a
benchmark's goodput are the same number. Definitions (times in seconds, from the router's accept):

    TTFT = t_first - t_accept
    TPOT = (t_last - t_first) / (output_tokens - 1), undefined for fewer than two tokens
    E2E  = t_last - t_accept
    good = finished, correct where a check exists, and every stated limit met

An undefined TPOT meets its limit. An answer that is sent whole has no first token that its client could see; it is
good if it arrived by the time a stream that met both limits would have ended, E2E <= TTFT limit + (output_tokens - 1)
* TPOT limit, and within the E2E limit if there is one. Quota refusals, client errors and cancels before the TTFT
limit are excluded: a tenant over its quota neither burns its budget nor scales the fleet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DEFAULT_SHARE = 0.99


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
    """Latency limits in seconds, None for no limit, and the share of valid requests that must be good."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    share: float = DEFAULT_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What was measured of one request. Times in seconds on one monotonic clock; None if it never happened.

    `end_s` is when the request ended in any way. `correct` is None where no correctness check exists. `streamed` says
    whether the client saw tokens as they came.
    """

    accept_s: float
    first_token_s: float | None
    end_s: float
    output_tokens: int
    end: End
    correct: bool | None = None
    streamed: bool = True

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
    if not request.streamed:
        targets = _whole_answer(targets, request)
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


def _whole_answer(targets: Targets, request: RequestRecord) -> Targets:
    """One limit on the end, see the module docstring. A client that leaves waited too long after the E2E limit."""
    if request.end is End.CANCELLED:
        return Targets(ttft_s=targets.e2e_s)
    limits = [] if targets.e2e_s is None else [targets.e2e_s]
    if targets.ttft_s is not None and (targets.tpot_s is not None or request.output_tokens < 2):
        limits.append(targets.ttft_s + max(0, request.output_tokens - 1) * (targets.tpot_s or 0.0))
    return Targets(e2e_s=min(limits, default=None))


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
