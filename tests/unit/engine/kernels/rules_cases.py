"""Rows in which any two rules meet, beside the CPU's: equal to the last bit; on torch's default device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from packed import MODULUS, make_row, pack_rules
from pairwise import pairwise

from paceline_engine.kernels.rules import apply_rules
from paceline_engine.sampling.row import Row

CASES = [
    {"vocab_size": 517, "dtype": torch.float32, "tile": 256},
    {"vocab_size": 1000, "dtype": torch.bfloat16, "tile": 1024},
]
# One row each: any two settings of any two rules meet in the batch.
ROWS = pairwise(
    {
        "bias": ["none", "few", "many"],
        "bad_words": [(), ((3,), (4, 5), (7, 8, 9))],
        "min_tokens": [0, 50],
        "allowed": [False, True],
        "repetition_penalty": [1.0, 1.3, 0.7],
        "frequency_penalty": [0.0, 0.5],
        "presence_penalty": [0.0, -1.5],
        "grammar": [False, True],
        "output": [(), (4,), (7, 8), (1, 1, 1, 6)],
        "pushed": [0, 2],
        "special": [None, float("nan"), float("inf")],
    }
)


def build(case: dict[str, Any], vocab_size: int, draw: random.Random) -> tuple[Row, list[int]]:
    """A request with these rules, and the guesses pushed on it."""
    size = {"none": 0, "few": 3, "many": 40}[case["bias"]]
    names = ("bad_words", "min_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty")
    row = make_row(
        vocab_size,
        [draw.randrange(40) for _ in range(20)],
        case["output"],
        case["grammar"],
        logit_bias=tuple((i, draw.uniform(-9, 9)) for i in draw.sample(range(vocab_size), size)),
        allowed_token_ids=tuple(draw.sample(range(vocab_size), 100)) if case["allowed"] else (),
        stop_token_ids=(17,),
        **{name: case[name] for name in names},
    )
    last = row.token_ids[-1]
    return row, [(last - 1) % MODULUS, (last - 2) % MODULUS][: case["pushed"]]


def check(case: dict[str, Any]) -> float:
    """0: the very same bits. Raises AssertionError."""
    vocab_size, dtype, tile = case["vocab_size"], case["dtype"], case["tile"]
    draw = random.Random(0)
    rows, pushed = zip(*(build(case, vocab_size, draw) for case in ROWS), strict=True)
    torch.manual_seed(0)
    logits = (torch.randn(len(rows), vocab_size) * 4).to(dtype)
    for index, case in enumerate(ROWS):
        if case["special"] is not None:
            # At a bad word, an ending token and others.
            logits[index, [3, 17, 100]] = case["special"]
    expected = logits.float().cpu().clone().numpy()
    for row, tokens, values in zip(rows, pushed, expected, strict=True):
        number = sum(row.push(token) for token in tokens)
        assert number == len(tokens)
        row.restrict(values)
        row.pop(number)
    got = apply_rules(logits, pack_rules(rows, pushed, vocab_size), tile=tile)
    assert (got is logits) == (dtype == torch.float32)
    np.testing.assert_array_equal(got.numpy(force=True), expected)
    return 0.0
