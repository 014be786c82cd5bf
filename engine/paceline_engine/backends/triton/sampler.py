"""A step's tokens sampled on the device, in two halves: all work is queued, then the results are waited for.

The same tokens as `paceline_engine.sampling.sampler.Sampler` draws. What is sampled stays on the device too, so that
the next step may begin before the host has seen it. Kernels that no row needs aren't launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline_engine.backends.triton.penalty_counts import Counted, PenaltyCounts
from paceline_engine.backends.triton.reports import pack_reports, queue_reports, records
from paceline_engine.backends.triton.request_rules import RequestRules
from paceline_engine.backends.triton.sampling_table import SamplingTable
from paceline_engine.backends.triton.shares import Shares
from paceline_engine.backends.triton.staging import Array, Download, upload
from paceline_engine.backends.triton.step_guesses import pack_guesses
from paceline_engine.backends.triton.step_rules import pack_rules
from paceline_engine.core.outputs import ScheduledRequest, StepResult
from paceline_engine.kernels.common import num_processors_of
from paceline_engine.kernels.cuts import SamplingRows, find_cuts
from paceline_engine.kernels.rejection import Guesses, verify
from paceline_engine.kernels.rules import Rules, apply_rules
from paceline_engine.kernels.sampling import NOTHING_ALLOWED, choose_num_splits, draw
from paceline_engine.messages import TokenLogprobs
from paceline_engine.sampling.row import Row, RowError
from paceline_engine.sampling.sampler import NOT_FINITE
from paceline_engine.sampling.sampler import NOTHING_ALLOWED as NOTHING_ALLOWED_TEXT

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Request:
    """A running request. counted: None without penalties."""

    row: Row
    rules: RequestRules
    counted: Counted | None


class TritonSampler:
    """Holds what of a request's state is on the device. lenience: as in the CPU's sampler.

    last_tokens [max_num_seqs + 1] int64 on the device: the latest token of the request in each slot, as the launches so
    far leave it; the last entry is nobody's.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device, lenience: float = 1.0) -> None:
        if not 0.0 < lenience <= 1.0:
            raise ValueError(f"lenience must be above 0 and at most 1, not {lenience}")
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size
        self._device = device
        self._lenience = lenience
        self._table = SamplingTable(max_num_seqs)
        self._requests: dict[str, _Request] = {}
        self._counts = PenaltyCounts(max_num_seqs, vocab_size, device)
        self._num_processors = num_processors_of(device)

    def admit(self, row: Row) -> None:
        """A request begins to run, anew after a preemption: its row holds the output so far."""
        self.release(row.request_id)
        rules = RequestRules(row, self._vocab_size)
        slot = self._table.add(row, rules)
        self._requests[row.request_id] = _Request(row, rules, Counted(slot, row) if row.has_penalties else None)

    def release(self, request_id: str) -> None:
        """A request doesn't run any more; it may never have."""
        if self._requests.pop(request_id, None) is not None:
            self._table.remove(request_id)

    def slot(self, request_id: str) -> int:
        """Where in `last_tokens` an admitted request is."""
        return self._table.slot(request_id)

    def needs_tokens(self, row: Row) -> bool:
        """Whether a launch needs all of the row's tokens on the host: for a grammar, or bad words of several tokens."""
        return self._requests[row.request_id].rules.needs_tokens

    def sample(self, logits: torch.Tensor, items: Sequence[ScheduledRequest], rows: Sequence[Row]) -> list[StepResult]:
        """`launch`, and its results."""
        return self.launch(logits, items, rows)()

    @torch.inference_mode()
    def launch(
        self, logits: torch.Tensor, items: Sequence[ScheduledRequest], rows: Sequence[Row]
    ) -> Callable[[], list[StepResult]]:
        """Queue all work on logits [positions, vocab] (float32, then overwritten, or bfloat16), as `Sampler.sample`.

        May be launched before the results of the last one are waited for, if none of the rows needs its tokens. Results
        are waited for once each, in the order of the launches.
        """
        if not items:
            return list
        shares = Shares.of(items, rows, self._table)
        errors = [row.error for row in rows]
        requests = [self._requests[item.request_id] for item in items]
        staged = upload(self._pack(shares, requests, np.array([error is None for error in errors])), self._device)
        # Following a guess may have taken a grammar too long.
        errors = [row.error for row in rows]
        num_top = int(self._table.num_alternatives[shares.slots].max())
        out = self._sample(logits, shares, staged, num_top)
        return _Pending(items, shares, requests, errors, self._table.num_alternatives[shares.slots], out).results

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Log probabilities of a token of each row of logits [rows, vocab], and of the row's likeliest; waited for."""
        if not token_ids:
            return []
        tokens = upload({"token_ids": np.array(token_ids, dtype=np.int64)}, self._device)["token_ids"]
        arrived = Download(queue_reports(logits, tokens, max(num_top))).wait()
        return list(records(arrived, range(len(token_ids)), token_ids, num_top))

    def _pack(self, shares: Shares, requests: Sequence[_Request], is_live: np.ndarray) -> dict[str, Array]:
        """All that the device must be told."""
        table, row_slots = self._table, shares.row_slots
        arrays: dict[str, Array] = {
            "slots": shares.slots,
            "temperature": table.temperature[row_slots],
            "seeds": table.seeds[row_slots],
            "positions": shares.positions,
        }
        if table.has_cuts[shares.slots].any():
            arrays |= {
                "top_k": table.top_k[row_slots],
                "top_p": table.top_p[row_slots],
                "min_p": table.min_p[row_slots],
            }
        arrays |= pack_guesses(shares, table, self._lenience)
        arrays |= pack_reports(shares, table)
        rules = [request.rules for request in requests]
        arrays |= pack_rules(shares, rules, table, is_live, -(-self._vocab_size // 32))
        if "penalties" in arrays:
            is_counted = is_live & table.has_penalties[shares.slots]
            counted = [(requests[at].counted, int(shares.num_output[at])) for at in np.flatnonzero(is_counted).tolist()]
            arrays |= self._counts.pack([(each, number) for each, number in counted if each is not None])
            arrays["counted_slots"] = np.where(is_counted, shares.slots, -1)
        return arrays

    def _sample(self, logits: torch.Tensor, shares: Shares, staged: Tensors, num_top: int) -> Download:
        """Queue the work; tokens [requests, guesses of any + 1] and reports."""
        reported = None
        if "reported_rows" in staged:
            # Before rules change them.
            reported = logits.index_select(0, staged["reported_rows"])
        if "bias_begins" in staged:
            logits = self._restricted(logits, staged)
        tokens = self._tokens(logits, shares, staged)
        self._keep(tokens, staged)
        wanted = {"tokens": tokens}
        if reported is not None:
            own = tokens.flatten().index_select(0, staged["reported_places"])
            wanted |= queue_reports(reported, own, num_top)
        return Download(wanted)

    def _restricted(self, logits: torch.Tensor, staged: Tensors) -> torch.Tensor:
        counts = self._counts.update(staged) if "penalties" in staged else None
        rules = Rules(
            bias_begins=staged["bias_begins"],
            bias_ids=staged["bias_ids"],
            bias_values=staged["bias_values"],
            masks=staged["masks"],
            mask_rows=staged["mask_rows"],
            penalties=staged.get("penalties"),
            counts=counts,
            count_slots=staged.get("count_slots"),
            pushed_begins=staged.get("pushed_begins"),
            pushed_ids=staged.get("pushed_ids"),
        )
        return apply_rules(logits, rules)

    def _tokens(self, logits: torch.Tensor, shares: Shares, staged: Tensors) -> torch.Tensor:
        rows, vocab_size = logits.shape
        sampling = SamplingRows(
            temperature=staged["temperature"],
            seeds=staged["seeds"],
            positions=staged["positions"],
            top_k=staged.get("top_k"),
            top_p=staged.get("top_p"),
            min_p=staged.get("min_p"),
        )
        cuts = find_cuts(logits, sampling)
        num_splits = choose_num_splits(rows, vocab_size, self._num_processors)
        drawn = draw(logits, sampling, cuts, skip=staged.get("skip"), num_splits=num_splits)
        if "guesses" not in staged:
            return drawn[:, None]
        guesses = Guesses(
            begins=staged["begins"],
            token_ids=staged["guesses"],
            most=shares.most_guesses,
            by_ratio=staged["by_ratio"],
            draft_probabilities=staged.get("draft_probabilities"),
            draft_rows=staged.get("draft_rows"),
        )
        return verify(logits, guesses, drawn, sampling, cuts, lenience=self._lenience)

    def _keep(self, tokens: torch.Tensor, staged: Tensors) -> None:
        """What the next step needs of the tokens [requests, any], of which negative ones are none."""
        last = tokens[:, 0]
        if tokens.shape[1] > 1:
            last = tokens.gather(1, ((tokens >= 0).sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]
        # A row that can't be sampled gets any token: what is computed of it isn't used.
        self.last_tokens.index_copy_(0, staged["slots"], last.clamp(min=0))
        if "counted_slots" in staged:
            self._counts.count(staged["counted_slots"], tokens)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A launch whose results are on their way. errors: of requests that couldn't be sampled to begin with."""

    items: Sequence[ScheduledRequest]
    shares: Shares
    requests: Sequence[_Request]
    errors: Sequence[RowError | None]
    num_alternatives: np.ndarray
    out: Download

    def results(self) -> list[StepResult]:
        """Wait for them."""
        arrived = self.out.wait()
        results: list[StepResult] = []
        num_reported = 0
        tokens: list[list[int]] = arrived["tokens"].tolist()
        for at, item in enumerate(self.items):
            request, number = self.requests[at], int(self.num_alternatives[at])
            own = [token_id for token_id in tokens[at] if token_id >= 0]
            if request.counted is not None:
                request.counted.output += own
            error = self.errors[at] or _error(tokens[at][0], request.row)
            if error is not None:
                results.append(StepResult(item.request_id, error=str(error), error_kind=error.kind))
            elif number < 0:
                results.append(StepResult(item.request_id, tuple(own)))
            else:
                reported = range(num_reported, num_reported + len(own))
                logprobs = records(arrived, reported, own, [number] * len(own))
                results.append(StepResult(item.request_id, tuple(own), logprobs=logprobs))
            if number >= 0:
                num_reported += item.num_draft_tokens + 1
        return results


def _error(first_token: int, row: Row) -> RowError | None:
    """Why there are no tokens, if the first of them says so."""
    if first_token >= 0:
        return None
    if first_token == NOTHING_ALLOWED and row.has_rules:
        return RowError(NOTHING_ALLOWED_TEXT, "invalid")
    return RowError(NOT_FINITE)
