"""Log probabilities of sampled tokens, for the requests that report them: taken on the device, told on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from paceline_engine.backends.triton.sampling_table import SamplingTable
from paceline_engine.backends.triton.shares import Shares
from paceline_engine.backends.triton.staging import Array
from paceline_engine.kernels.logprobs import token_logprobs
from paceline_engine.messages import TokenLogprobs


def pack_reports(shares: Shares, table: SamplingTable) -> dict[str, Array]:
    """reported_rows: of the logits; reported_places: of their tokens in [requests, guesses of any + 1]; or none."""
    rows = np.flatnonzero(table.num_alternatives[shares.row_slots] >= 0)
    if len(rows) == 0:
        return {}
    width = shares.most_guesses + 1
    return {"reported_rows": rows, "reported_places": shares.request_of[rows] * width + shares.offsets[rows]}


def queue_reports(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> dict[str, torch.Tensor]:
    """For `records`: of rows of logits [rows, vocab] and a token of each; a negative one stands for none."""
    found = token_logprobs(logits, token_ids.clamp(min=0), num_top)
    return {
        "logprobs": found.logprobs,
        "ranks": found.ranks,
        "top_ids": found.top_ids,
        "top_logprobs": found.top_logprobs,
    }


def records(
    arrived: Mapping[str, Array], rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    """One for each of the reports' rows, with its token and number of alternatives."""
    logprobs, ranks = arrived["logprobs"], arrived["ranks"]
    records: list[TokenLogprobs] = []
    for row, token_id, count in zip(rows, token_ids, num_top, strict=True):
        ids, values = arrived["top_ids"][row, :count].tolist(), arrived["top_logprobs"][row, :count].tolist()
        top = tuple(zip(ids, values, strict=True))
        records.append(TokenLogprobs(token_id, float(logprobs[row]), int(ranks[row]), top))
    return tuple(records)
