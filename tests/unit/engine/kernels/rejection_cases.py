"""Verification of the guesses of many requests in one batch beside the CPU's sampler: the same tokens.

On torch's default device.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from packed import MODULUS, make_row, pack_rules, sampling_rows
from pairwise import pairwise

from paceline_engine.core.outputs import ScheduledRequest, StepResult
from paceline_engine.kernels.cuts import CutsTiling, find_cuts
from paceline_engine.kernels.rejection import Guesses, verify
from paceline_engine.kernels.rules import apply_rules
from paceline_engine.kernels.sampling import NO_TOKEN, NOT_FINITE, draw
from paceline_engine.sampling.row import Row
from paceline_engine.sampling.sampler import Sampler, distribution
from paceline_engine.sampling.speculation import Drafts

# every: step through the requests.
CASES = [
    {"vocab_size": 517, "lenience": 1.0, "dtype": torch.float32, "every": 1},
    {"vocab_size": 300, "lenience": 1.0, "dtype": torch.bfloat16, "every": -3},
    {"vocab_size": 300, "lenience": 0.5, "dtype": torch.float32, "every": -3},
]
REQUESTS = pairwise(
    {
        "temperature": [0.0, 0.6, 1.5],
        "top_k": [0, 1, 30],
        "top_p": [1.0, 0.8],
        "repetition_penalty": [1.0, 1.4],
        "grammar": [False, True],
        "num_guesses": [0, 1, 4],
        # What is known of the guesses: nothing, another model's distribution, the target's own before rules.
        "drafter": [None, None, "near", "same"],
        "broken_row": [None, None, None, 0, 2],
    },
    seed=3,
)
PLAIN = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "grammar": False, "num_guesses": 4}
REQUESTS += [
    {**PLAIN, "temperature": temperature, "drafter": drafter, "broken_row": None}
    for temperature, drafter in ((0.0, None), (0.6, None), (0.6, "same"), (1.5, "near"))
]


def build(case: dict[str, Any], logits: torch.Tensor, index: int, chosen: random.Random) -> tuple[Row, list[int]]:
    """A request whose guesses were drawn as the case says, for logits [guesses + 1, vocab]."""
    vocab_size = logits.shape[1]
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "grammar")
    prompt = [chosen.randrange(vocab_size) for _ in range(10)]
    row = make_row(vocab_size, prompt, [5], seed=index * 7919, ignore_eos=True, **{name: case[name] for name in names})
    values = logits.numpy()
    guesses: list[int] = []
    probabilities = np.zeros((case["num_guesses"], vocab_size), dtype=np.float32)
    rng = np.random.default_rng(index)
    sampler = Sampler(vocab_size)
    for at in range(case["num_guesses"]):
        seen = values[at] + (rng.normal(size=vocab_size).astype(np.float32) if case["drafter"] == "near" else 0)
        if case["grammar"] and chosen.random() < 0.8:
            seen = np.where(np.arange(vocab_size) % MODULUS == (5 - at - 1) % MODULUS, seen, -np.inf).astype(np.float32)
        if row.greedy:
            guesses.append(int(seen.argmax()))
        elif case["drafter"] is None:
            guesses.append(sampler.draw(row, seen, index + 1 + at))
        else:
            probabilities[at] = distribution(row, seen)
            guesses.append(int(rng.choice(vocab_size, p=probabilities[at] / probabilities[at].sum(dtype=np.float64))))
    if case["drafter"] is not None and not row.greedy:
        row.drafts = Drafts(position=index + 1, token_ids=tuple(guesses), probabilities=probabilities)
    return row, guesses


def on_the_cpu(logits: torch.Tensor, rows: list[Row], guesses: list[list[int]], lenience: float) -> list[StepResult]:
    shares = [
        ScheduledRequest(
            request_id=str(index),
            token_ids=[1, *tokens],
            start=index,
            new_block_ids=[],
            sample=True,
            num_draft_tokens=len(tokens),
        )
        for index, tokens in enumerate(guesses)
    ]
    with torch.device("cpu"):
        return Sampler(logits.shape[1], lenience).sample(logits.float().clone(), shares, rows)


def on_the_device(
    logits: torch.Tensor, rows: list[Row], guesses: list[list[int]], lenience: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results, and which rows went by the ratio of p and q."""
    vocab_size = logits.shape[1]
    spread = [row for row, tokens in zip(rows, guesses, strict=True) for _ in range(len(tokens) + 1)]
    pushed = [tokens[:count] for tokens in guesses for count in range(len(tokens) + 1)]
    positions = [index + 1 + at for index, tokens in enumerate(guesses) for at in range(len(tokens) + 1)]
    draft_rows, drafts = [], []
    for row, tokens in zip(rows, guesses, strict=True):
        known = None if row.drafts is None else row.drafts.probabilities
        for at in range(len(tokens)):
            draft_rows.append(-1 if known is None else len(drafts))
            drafts += [] if known is None else [known[at]]
        draft_rows.append(-1)
    by_ratio = [
        not row.greedy and at < len(tokens) and (row.drafts is not None or lenience < 1.0)
        for row, tokens in zip(rows, guesses, strict=True)
        for at in range(len(tokens) + 1)
    ]
    packed = Guesses(
        by_ratio=torch.tensor(by_ratio),
        begins=torch.tensor(np.cumsum([0, *(len(tokens) + 1 for tokens in guesses)]), dtype=torch.int32),
        token_ids=torch.tensor([token for tokens in guesses for token in [*tokens, NO_TOKEN]]),
        most=max(map(len, guesses)),
        draft_probabilities=torch.tensor(np.array(drafts)) if drafts else None,
        draft_rows=torch.tensor(draft_rows, dtype=torch.int32) if drafts else None,
    )
    sampling = sampling_rows(spread, positions)
    after = apply_rules(logits, pack_rules(spread, pushed, vocab_size))
    cuts = find_cuts(after, sampling, CutsTiling(tile=1024, capacity=512))
    drawn = draw(after, sampling, cuts, skip=packed.by_ratio, tile=256)
    return verify(after, packed, drawn, sampling, cuts, lenience=lenience, tile=256), packed.by_ratio


def check(case: dict[str, Any]) -> float:
    """0: the very same tokens. Raises AssertionError."""
    vocab_size, lenience, dtype = case["vocab_size"], case["lenience"], case["dtype"]
    chosen = random.Random(0)
    torch.manual_seed(0)
    rows, guesses, parts = [], [], []
    for index, request in enumerate(REQUESTS[:: case["every"]]):
        part = (torch.randn(request["num_guesses"] + 1, vocab_size) * 3).to(dtype).float().cpu()
        row, tokens = build(request, part, index, chosen)
        if request["broken_row"] is not None and request["broken_row"] < len(part):
            part[request["broken_row"], 7] = torch.nan if index % 2 else torch.inf
        rows.append(row)
        guesses.append(tokens)
        parts.append(part)
    logits = torch.cat(parts)
    results = on_the_cpu(logits, rows, guesses, lenience)
    got, by_ratio = on_the_device(logits.to(torch.get_default_device(), dtype), rows, guesses, lenience)
    lengths = [len(result.token_ids) for result in results]
    expected = [[NOT_FINITE] if result.error is not None else list(result.token_ids) for result in results]
    assert got.tolist() == [tokens + [NO_TOKEN] * (got.shape[1] - len(tokens)) for tokens in expected]
    # All of them occur: every guess kept, none kept; decided by ratio and by draw.
    assert {1, 5} < set(lengths)
    assert 0 < int(by_ratio.sum()) < len(by_ratio) - len(rows)
    return 0.0
