"""All guesses of a step in the arrays that their verification takes."""

from __future__ import annotations

import numpy as np

from paceline_engine.backends.triton.sampling_table import SamplingTable
from paceline_engine.backends.triton.shares import Shares
from paceline_engine.backends.triton.staging import Array
from paceline_engine.sampling.noise import Float32Array

_NO_TOKEN = -1


def pack_guesses(shares: Shares, table: SamplingTable, lenience: float) -> dict[str, Array]:
    """Fields of `kernels.rejection.Guesses` but for `most`, and rows to skip for the draw; none without any guess."""
    if shares.most_guesses == 0:
        return {}
    token_ids = np.full(shares.num_rows, _NO_TOKEN, dtype=np.int64)
    draft_rows = np.full(shares.num_rows, -1, dtype=np.int32)
    skip = np.zeros(shares.num_rows, dtype=np.int32)
    drafts: list[Float32Array] = []
    num_drafts = 0
    for request, guesses in enumerate(shares.guesses):
        if not guesses:
            continue
        row, begin, end = shares.rows[request], int(shares.begins[request]), int(shares.begins[request + 1])
        ending = next((index for index, token_id in enumerate(guesses) if token_id in row.ending_ids), None)
        count = len(guesses) if ending is None else ending + 1
        token_ids[begin : begin + count] = guesses[:count]
        # Nothing follows a guess that ends the output.
        skip[begin + count : end] = ending is not None
        drawn_from = row.draft_probabilities(int(shares.num_known[request]), guesses)
        if drawn_from is not None:
            draft_rows[begin : begin + count] = np.arange(num_drafts, num_drafts + count)
            drafts.append(drawn_from[:count])
            num_drafts += count
    is_drawn = table.temperature[shares.row_slots] > 0.0
    by_ratio = ((token_ids >= 0) & is_drawn & ((draft_rows >= 0) | (lenience < 1.0))).astype(np.int32)
    arrays: dict[str, Array] = {
        "begins": shares.begins.astype(np.int32),
        "guesses": token_ids,
        "by_ratio": by_ratio,
        "skip": skip | by_ratio,
    }
    if drafts:
        arrays |= {"draft_probabilities": np.concatenate(drafts), "draft_rows": draft_rows}
    return arrays
