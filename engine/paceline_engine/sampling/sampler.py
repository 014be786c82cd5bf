"""One step's tokens: verified guesses and one token more for each request that samples.

Rows without rules cost an argmax each over one shared tensor, or one draw; Python work is proportional to requests, and
to positions only where guesses are verified. Trouble in one row is that request's error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline_engine.core.outputs import ScheduledRequest, StepResult
from paceline_engine.messages import TokenLogprobs
from paceline_engine.sampling.cuts import kept_tokens, probabilities
from paceline_engine.sampling.logprobs import token_logprobs
from paceline_engine.sampling.noise import Float32Array, FloatArray, GumbelDraw, Stream, gumbel_at, row_keys, uniforms
from paceline_engine.sampling.row import Row, RowError, restrict_verified
from paceline_engine.sampling.speculation import accepts, residual

NOT_FINITE = "the model's output for this request isn't finite (NaN or infinity); the request can't go on"
NOTHING_ALLOWED = (
    "no token is allowed next: the request's constraint, allowed_token_ids, bad_words and min_tokens exclude each other"
)


@dataclass(frozen=True, slots=True)
class _Share:
    """One request's part of the logits: rows [begin, begin + guesses + 1)."""

    item: ScheduledRequest
    row: Row
    begin: int

    @property
    def guesses(self) -> list[int]:
        count = self.item.num_draft_tokens
        return self.item.token_ids[len(self.item.token_ids) - count :]

    @property
    def end(self) -> int:
        return self.begin + self.item.num_draft_tokens + 1


class SampleError(RowError):
    """This request can't go on; the message is its error."""


class Sampler:
    """Holds scratch memory and the acceptance rule; a request's state is in its row.

    lenience: 1 is exact; below, more guesses are kept and outputs no longer follow the model's distribution.
    """

    def __init__(self, vocab_size: int, lenience: float = 1.0) -> None:
        if not 0.0 < lenience <= 1.0:
            raise ValueError(f"lenience must be above 0 and at most 1, not {lenience}")
        self._lenience = lenience
        self._gumbel_draw = GumbelDraw(vocab_size)

    def admit(self, row: Row) -> None:
        """All of a request's state is in its row."""

    def release(self, request_id: str) -> None:
        """See `admit`."""

    def needs_tokens(self, row: Row) -> bool:
        """Every row does: tokens are drawn on the host."""
        return True

    def launch(
        self, logits: torch.Tensor, items: Sequence[ScheduledRequest], rows: Sequence[Row]
    ) -> Callable[[], list[StepResult]]:
        """Sample at once."""
        results = self.sample(logits, items, rows)
        return lambda: results

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """See `sampling.logprobs.token_logprobs`."""
        return token_logprobs(logits, token_ids, num_top)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, items: Sequence[ScheduledRequest], rows: Sequence[Row]) -> list[StepResult]:
        """Results in the order of `items`, from logits [positions, vocab] float32, which are overwritten.

        Each item has num_draft_tokens + 1 rows of logits: of its last known token and of each guess. Rows' states are
        left as they were; `Row.push` moves them over what is returned.
        """
        shares: list[_Share] = []
        begin = 0
        for item, row in zip(items, rows, strict=True):
            shares.append(_Share(item, row, begin))
            begin += item.num_draft_tokens + 1
        raw = _raw_logits(logits, shares)
        values = logits.numpy()
        for share in shares:
            if share.row.has_rules and share.row.error is None:
                restrict_verified(share.row, values[share.begin : share.end], share.guesses)
        likeliest = values.argmax(-1)
        # argmax stops at the first NaN, so a row that holds one has it as its best.
        best = values[np.arange(len(values)), likeliest].tolist()
        chosen: list[int] = likeliest.tolist()
        outcomes: list[list[int] | SampleError] = []
        for share in shares:
            try:
                outcomes.append(self._tokens(share, values, best, chosen))
            except SampleError as error:
                outcomes.append(error)
        return _results(shares, outcomes, raw)

    def _tokens(
        self, share: _Share, values: Float32Array, best: Sequence[float], likeliest: Sequence[int]
    ) -> list[int]:
        """The share's guesses that stand, then one token more; nothing follows a token that ends the output."""
        row, guesses, position = share.row, share.guesses, share.item.num_known_tokens
        if row.error is not None:
            raise SampleError(str(row.error), row.error.kind)
        drawn_from = row.draft_probabilities(position, guesses)
        tokens: list[int] = []
        for index in range(len(guesses) + 1):
            at = share.begin + index
            _check(best[at], row)
            guess = guesses[index] if index < len(guesses) else None
            if row.greedy:
                token = self._greedy(values[at], best[at], likeliest[at], guess)
            elif guess is not None and (drawn_from is not None or self._lenience < 1.0):
                q = None if drawn_from is None else drawn_from[index]
                token = self._verified(row, values[at], position + index, guess, q)
            else:
                # Without a q a guess stands if it is what is drawn anyway: speculation then leaves even the path alone.
                token = self.draw(row, values[at], position + index)
            tokens.append(token)
            if token != guess or token in row.ending_ids:
                break
        return tokens

    def _greedy(self, values: Float32Array, best: float, likeliest: int, guess: int | None) -> int:
        if guess is not None and self._lenience < 1.0 and values[guess] >= best + math.log(self._lenience):
            return guess
        return likeliest

    def draw(self, row: Row, values: Float32Array, position: int, stream: Stream = Stream.TOKEN) -> int:
        """One token from logits [vocab] after rules, under the row's temperature and cuts."""
        scaled = values / np.float32(row.sampling.temperature)
        key = row_keys([row.sampling.seed], [position], stream)[0]
        if not row.has_cuts:
            return self._gumbel_draw(scaled, key)
        ids = kept_tokens(scaled, row.sampling)
        return int(ids[(scaled[ids] + gumbel_at(key, ids)).argmax()])

    def _verified(
        self, row: Row, values: Float32Array, position: int, guess: int, drawn_from: Float32Array | None
    ) -> int:
        """The guess, if min(1, p / q) has it stand, or its replacement; without a q all of q is on the guess."""
        p = distribution(row, values)
        q: FloatArray = np.zeros_like(p)
        if drawn_from is None:
            q[guess] = 1.0
        else:
            q[:] = drawn_from
        seed = row.sampling.seed
        uniform = uniforms(row_keys([seed], [position], Stream.ACCEPT))
        if accepts(p[guess], q[guess], uniform, self._lenience)[0]:
            return guess
        rest = residual(p, q)
        ids = np.flatnonzero(rest)
        key = row_keys([seed], [position], Stream.RESIDUAL)[0]
        return int(ids[(np.log(rest[ids]) + gumbel_at(key, ids)).argmax()])


def distribution(row: Row, values: Float32Array) -> FloatArray:
    """[vocab] what `Sampler.draw` draws from, for logits after rules."""
    return probabilities(values / np.float32(row.sampling.temperature), row.sampling)


def _check(best: float, row: Row) -> None:
    if -math.inf < best < math.inf:
        return
    if best == -math.inf and row.has_rules:
        raise SampleError(NOTHING_ALLOWED, "invalid")
    raise SampleError(NOT_FINITE)


@dataclass(frozen=True, slots=True)
class _RawLogits:
    """Logits before rules of the shares that report logprobs; offsets are rows, by request."""

    values: torch.Tensor
    offsets: dict[str, int]


def _raw_logits(logits: torch.Tensor, shares: Sequence[_Share]) -> _RawLogits | None:
    asking = [share for share in shares if share.row.sampling.logprobs is not None]
    if not asking:
        return None
    if not any(share.row.has_rules for share in asking):
        return _RawLogits(logits, {share.item.request_id: share.begin for share in asking})
    indices: list[int] = []
    offsets: dict[str, int] = {}
    for share in asking:
        offsets[share.item.request_id] = len(indices)
        indices.extend(range(share.begin, share.end))
    return _RawLogits(logits[indices], offsets)


def _results(
    shares: Sequence[_Share], outcomes: Sequence[list[int] | SampleError], raw: _RawLogits | None
) -> list[StepResult]:
    reports = _reports(shares, outcomes, raw)
    results: list[StepResult] = []
    for share, outcome in zip(shares, outcomes, strict=True):
        request_id = share.item.request_id
        if isinstance(outcome, SampleError):
            results.append(StepResult(request_id, error=str(outcome), error_kind=outcome.kind))
        else:
            results.append(StepResult(request_id, tuple(outcome), logprobs=reports.get(request_id, ())))
    return results


def _reports(
    shares: Sequence[_Share], outcomes: Sequence[list[int] | SampleError], raw: _RawLogits | None
) -> dict[str, tuple[TokenLogprobs, ...]]:
    """Logprobs of chosen tokens by request, where they were asked for; one pass over all of them."""
    if raw is None:
        return {}
    rows: list[int] = []
    chosen: list[int] = []
    num_top: list[int] = []
    spans: dict[str, tuple[int, int]] = {}
    for share, outcome in zip(shares, outcomes, strict=True):
        count = share.row.sampling.logprobs
        if count is None or isinstance(outcome, SampleError):
            continue
        offset = raw.offsets[share.item.request_id]
        spans[share.item.request_id] = (len(chosen), len(chosen) + len(outcome))
        rows.extend(range(offset, offset + len(outcome)))
        chosen.extend(outcome)
        num_top.extend([count] * len(outcome))
    reports = token_logprobs(raw.values[rows], chosen, num_top)
    return {request_id: tuple(reports[begin:end]) for request_id, (begin, end) in spans.items()}
