"""Log probabilities to report: before any rule, temperature or cut, so that they describe the model.

From logits of whole rows [vocab], without ever making a row of log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline_engine.messages import TokenLogprobs

_STRETCH = 128


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One record for each row of `logits` [rows, vocab] and its token, with the row's number of alternatives."""
    if not token_ids:
        return []
    totals = _log_sum_exp(logits).tolist()
    rows = logits.numpy()
    values, ids = _top(logits, max(num_top))
    records: list[TokenLogprobs] = []
    for index, (token_id, count, total) in enumerate(zip(token_ids, num_top, totals, strict=True)):
        row = rows[index]
        rank = int(np.count_nonzero(row > row[token_id])) + 1
        likely = zip(ids[index, :count].tolist(), (values[index, :count].double() - total).tolist(), strict=True)
        records.append(TokenLogprobs(token_id, float(row[token_id]) - total, rank, tuple(likely)))
    return records


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """[rows] float64: rounded to float32, the total of a row would shift all of its log probabilities alike."""
    largest = logits.amax(-1, keepdim=True)
    sums = (logits - largest).exp_().sum(-1, dtype=torch.float64)
    return sums.log() + largest[:, 0].double()


def _top(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row and their ids, largest first.

    They lie in the `count` stretches of the row with the largest maxima, so only those are sorted.
    """
    rows, vocab_size = logits.shape
    stretches = vocab_size // _STRETCH
    if count == 0 or count * 4 > stretches:
        return logits.topk(min(count, vocab_size), dim=-1)
    head = logits[:, : stretches * _STRETCH].view(rows, stretches, _STRETCH)
    chosen = head.amax(-1).topk(count, dim=-1).indices
    values = head.gather(1, chosen[:, :, None].expand(-1, -1, _STRETCH)).flatten(1)
    ids = (chosen[:, :, None] * _STRETCH + torch.arange(_STRETCH)).flatten(1)
    tail = torch.arange(stretches * _STRETCH, vocab_size).expand(rows, -1)
    best, at = torch.cat((values, logits[:, stretches * _STRETCH :]), -1).topk(count, dim=-1)
    return best, torch.cat((ids, tail), -1).gather(1, at)
