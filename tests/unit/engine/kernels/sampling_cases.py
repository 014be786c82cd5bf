"""Rows in which any two of rules and cuts meet, drawn in one batch beside the CPU's sampler: the same tokens.

On torch's default device.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from packed import make_row, pack_rules, sampling_rows
from pairwise import pairwise

from paceline_engine.core.outputs import ScheduledRequest
from paceline_engine.kernels.cuts import CutsTiling
from paceline_engine.kernels.rules import apply_rules
from paceline_engine.kernels.sampling import NOT_FINITE, NOTHING_ALLOWED, sample
from paceline_engine.sampling.sampler import NOT_FINITE as NOT_FINITE_MESSAGE
from paceline_engine.sampling.sampler import NOTHING_ALLOWED as NOTHING_ALLOWED_MESSAGE
from paceline_engine.sampling.sampler import Sampler

CASES = [{"vocab_size": 517, "num_splits": 1}, {"vocab_size": 1000, "num_splits": 3}]
ROWS = pairwise(
    {
        "temperature": [0.0, 1e-6, 0.2, 1.0, 1.7],
        "top_k": [0, 1, 20],
        "top_p": [1.0, 0.9],
        "min_p": [0.0, 0.1],
        "seed": [0, -1, 2**63 - 1, 12345678901],
        "position": [3, 100_000],
        "logit_bias": [(), ((0, 5.0), (9, -100.0))],
        "bad_words": [(), ((1,),)],
        "repetition_penalty": [1.0, 1.2],
        "presence_penalty": [0.0, 0.6],
        "min_tokens": [0, 9],
        "allowed_token_ids": [(), tuple(range(0, 300, 2))],
        "grammar": [False, True],
        "special": [None, None, "nan", "inf", "nothing"],
    }
)


def check(case: dict[str, Any]) -> float:
    """0: the very same tokens. Raises AssertionError."""
    vocab_size, num_splits = case["vocab_size"], case["num_splits"]
    chosen = random.Random(0)
    rows, shares = [], []
    torch.manual_seed(0)
    logits = torch.randn(len(ROWS), vocab_size) * 3
    for index, case in enumerate(ROWS):
        output = [chosen.randrange(vocab_size) for _ in range(3)]
        row = make_row(
            vocab_size,
            [chosen.randrange(vocab_size) for _ in range(10)],
            output,
            **{name: value for name, value in case.items() if name not in ("position", "special")},
        )
        rows.append(row)
        start = case["position"]
        shares.append(
            ScheduledRequest(request_id=str(index), token_ids=[1], start=start, new_block_ids=[], sample=True)
        )
        if case["special"] == "nothing":
            logits[index] = -torch.inf
        elif case["special"] is not None:
            logits[index, 4] = float(case["special"])
    with torch.device("cpu"):
        results = Sampler(vocab_size).sample(logits.cpu().clone(), shares, rows)
    expected = []
    for row, result in zip(rows, results, strict=True):
        if result.error is None:
            expected.append(result.token_ids[0])
        else:
            is_empty = result.error == NOTHING_ALLOWED_MESSAGE or (
                result.error == NOT_FINITE_MESSAGE and not row.has_rules
            )
            expected.append((NOT_FINITE, NOTHING_ALLOWED)[is_empty])
    after = apply_rules(logits, pack_rules(rows, [()] * len(rows), vocab_size))
    packed = sampling_rows(rows, [case["position"] + 1 for case in ROWS])
    got = sample(after, packed, num_splits=num_splits, tiling=CutsTiling(tile=512, capacity=512))
    assert got.tolist() == expected
    return 0.0
