"""Requests that run on the CPU's sampler and on the device's beside each other, from the same logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from paceline_engine.backends.triton.sampler import TritonSampler
from paceline_engine.core.outputs import AdmittedRequest, ScheduledRequest, StepResult
from paceline_engine.messages import SamplingParams, TokenLogprobs
from paceline_engine.sampling.row import Matcher, Row
from paceline_engine.sampling.sampler import Sampler
from paceline_engine.sampling.speculation import Drafts

# End-of-sequence token.
EOS = 2
CPU = torch.device("cpu")


@dataclass
class Request:
    """What the scheduler knows of it: `known` tokens, and its row on either device. matcher: after some output."""

    prompt: list[int]
    known: list[int]
    matcher: Callable[[list[int]], Matcher] | None
    sampling: SamplingParams
    rows: list[Row]

    @property
    def has_ended(self) -> bool:
        return len(self.known) > len(self.prompt) and self.known[-1] in self.rows[0].ending_ids


class Twins:
    def __init__(self, vocab_size: int, max_num_seqs: int, lenience: float = 1.0) -> None:
        self.vocab_size = vocab_size
        self.cpu = Sampler(vocab_size, lenience)
        self.device = TritonSampler(vocab_size, max_num_seqs, CPU, lenience)
        self.requests: dict[str, Request] = {}

    def admit(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        matcher: Callable[[list[int]], Matcher] | None = None,
        **sampling: Any,
    ) -> Request:
        params = SamplingParams(max_tokens=100, **sampling)
        self.requests[request_id] = Request(list(prompt), list(prompt), matcher, params, [])
        self._begin(request_id)
        return self.requests[request_id]

    def release(self, request_id: str) -> None:
        del self.requests[request_id]
        self.device.release(request_id)

    def preempt(self, request_ids: Sequence[str]) -> None:
        """Stop them all, then begin them anew with what is known of their output, in the order given."""
        for request_id in request_ids:
            self.device.release(request_id)
        for request_id in request_ids:
            self._begin(request_id)

    def _begin(self, request_id: str) -> None:
        request = self.requests[request_id]
        request.rows = [self._make_row(request_id, request) for _ in range(2)]
        self.device.admit(request.rows[1])

    def _make_row(self, request_id: str, request: Request) -> Row:
        matcher = request.matcher and request.matcher(request.known[len(request.prompt) :])
        admitted = AdmittedRequest(
            request_id=request_id,
            token_ids=tuple(request.known),
            num_prompt_tokens=len(request.prompt),
            sampling=request.sampling,
        )
        return Row(admitted, self.vocab_size, (EOS,), matcher)

    def draft(self, request_id: str, guesses: Sequence[int], probabilities: Any) -> None:
        """The guesses for the next step, and what they were drawn from."""
        request = self.requests[request_id]
        for row in request.rows:
            row.drafts = Drafts(position=len(request.known), token_ids=tuple(guesses), probabilities=probabilities)

    def step(
        self, logits: torch.Tensor, guesses: Mapping[str, Sequence[int]], request_ids: Sequence[str] | None = None
    ) -> list[StepResult]:
        """One step of the requests, all unless named; the results of both, after checking that they are the same."""
        request_ids = list(self.requests) if request_ids is None else request_ids
        items = [self._item(request_id, guesses.get(request_id, ())) for request_id in request_ids]
        cpu_rows, device_rows = zip(*(self.requests[request_id].rows for request_id in request_ids), strict=True)
        for item, *rows in zip(items, cpu_rows, device_rows, strict=True):
            for row in rows:
                row.resume_at(item.num_known_tokens)
        results = self.cpu.sample(logits.float().clone(), items, cpu_rows)
        # numpy, which stands in for the GPU, warns of infinity less infinity.
        with np.errstate(invalid="ignore"):
            launched = self.device.launch(logits.clone(), items, device_rows)
        latest = [int(self.device.last_tokens[self.device.slot(request_id)]) for request_id in request_ids]
        assert_same(launched(), results)
        for result, token_id, *rows in zip(results, latest, cpu_rows, device_rows, strict=True):
            assert result.error is not None or token_id == result.token_ids[-1]
            for row in rows:
                assert all(row.push(token_id) for token_id in result.token_ids)
        return results

    def _item(self, request_id: str, guesses: Sequence[int]) -> ScheduledRequest:
        known = self.requests[request_id].known
        return ScheduledRequest(
            request_id=request_id,
            token_ids=[known[-1], *guesses],
            start=len(known) - 1,
            new_block_ids=[],
            sample=True,
            num_draft_tokens=len(guesses),
        )

    def take(self, result: StepResult, count: int | None = None) -> None:
        """The scheduler takes the first tokens of a result, all unless told how many."""
        self.requests[result.request_id].known += result.token_ids[:count]


def assert_same(got: Sequence[StepResult], expected: Sequence[StepResult]) -> None:
    """Log probabilities up to float32's rounding of a sum."""
    for one, other in zip(got, expected, strict=True):
        assert (one.request_id, one.token_ids, one.error, one.error_kind) == (
            other.request_id,
            other.token_ids,
            other.error,
            other.error_kind,
        )
        assert_same_logprobs(one.logprobs, other.logprobs)


def assert_same_logprobs(got: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5, nan_ok=True)
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx(
            [value for _, value in other.top], abs=1e-5, nan_ok=True
        )
