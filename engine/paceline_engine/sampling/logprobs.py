"""Log probabilities to report: before any rule, temperature or cut, so that they describe the model.

On the device's tensors, since it is a matter of whole rows [vocab].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline_engine.messages import TokenLogprobs

_STRETCH = 128


def token_logprobs(logprobs: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One record for each row of `logprobs` [rows, vocab] and its token, with the row's number of alternatives."""
    if not token_ids:
        return []
    chosen = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64)[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    values, ids = _top(logprobs, max(num_top))
    top = [list(zip(*columns, strict=True)) for columns in zip(ids.tolist(), values.tolist(), strict=True)]
    columns = zip(token_ids, chosen[:, 0].tolist(), ranks.tolist(), num_top, strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(top[row][:count]))
        for row, (token_id, logprob, rank, count) in enumerate(columns)
    ]


def _top(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row and their ids, largest first.

    They lie in the `count` stretches of the row with the largest maxima, so only those are sorted.
    """
    rows, vocab_size = logprobs.shape
    stretches = vocab_size // _STRETCH
    if count == 0 or count * 4 > stretches:
        return logprobs.topk(min(count, vocab_size), dim=-1)
    head = logprobs[:, : stretches * _STRETCH].view(rows, stretches, _STRETCH)
    chosen = head.amax(-1).topk(count, dim=-1).indices
    values = head.gather(1, chosen[:, :, None].expand(-1, -1, _STRETCH)).flatten(1)
    ids = (chosen[:, :, None] * _STRETCH + torch.arange(_STRETCH)).flatten(1)
    tail = torch.arange(stretches * _STRETCH, vocab_size).expand(rows, -1)
    best, at = torch.cat((values, logprobs[:, stretches * _STRETCH :]), -1).topk(count, dim=-1)
    return best, torch.cat((ids, tail), -1).gather(1, at)
