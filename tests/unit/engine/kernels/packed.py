"""Requests as the CPU's sampler knows them, packed into the tensors that the sampling kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline_engine.core.outputs import AdmittedRequest
from paceline_engine.kernels.cuts import SamplingRows
from paceline_engine.kernels.rules import Rules, count_output, count_prompt
from paceline_engine.messages import SamplingParams
from paceline_engine.sampling.row import Row

# The grammar of these tests: the numbers mod 3 of successive tokens count down.
MODULUS = 3


def bit_words(bits: np.ndarray) -> np.ndarray:
    """int32 words of bools, padded with False."""
    padded = np.pad(bits, (0, -len(bits) % 32))
    return np.packbits(padded, bitorder="little").view(np.int32)


class CountingDown:
    """A matcher: after a token t comes one that is t - 1 modulo MODULUS, whatever came before it at first."""

    error = None

    def __init__(self, vocab_size: int) -> None:
        self.path: list[int] = []
        self._vocab_size = vocab_size

    def allowed(self) -> np.ndarray:
        ids = np.arange(self._vocab_size)
        return np.full(len(ids), True) if not self.path else ids % MODULUS == (self.path[-1] - 1) % MODULUS

    def mask(self) -> np.ndarray:
        return bit_words(self.allowed())

    def push(self, token_id: int) -> bool:
        if self.path and token_id % MODULUS != (self.path[-1] - 1) % MODULUS:
            return False
        self.path.append(token_id)
        return True

    def pop(self, count: int) -> None:
        del self.path[len(self.path) - count :]

    def restrict(self, values: np.ndarray) -> None:
        values[~self.allowed()] = -np.inf

    def forced_tokens(self, limit: int) -> list[int]:
        return []


def make_row(
    vocab_size: int, prompt: Sequence[int], output: Sequence[int], grammar: bool = False, **sampling: Any
) -> Row:
    """A running request; an end-of-sequence token of 2."""
    matcher = CountingDown(vocab_size) if grammar else None
    if matcher is not None:
        matcher.path = list(output[-1:])
    params = SamplingParams(max_tokens=100, **sampling)
    request = AdmittedRequest(
        request_id="", token_ids=(*prompt, *output), num_prompt_tokens=len(prompt), sampling=params
    )
    return Row(request, vocab_size, (2,), matcher)


def sampling_rows(rows: Sequence[Row], positions: Sequence[int]) -> SamplingRows:
    """How each row is drawn; cuts that none has are None."""
    params = [row.sampling for row in rows]

    def column(name: str, off: float, dtype: torch.dtype) -> torch.Tensor | None:
        values = [getattr(each, name) for each in params]
        return None if all(value == off for value in values) else torch.tensor(values, dtype=dtype)

    return SamplingRows(
        temperature=torch.tensor([each.temperature for each in params], dtype=torch.float32),
        seeds=torch.tensor([each.seed for each in params], dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
    )


def biases(row: Row) -> dict[int, float]:
    """Added to the logits of tokens; -inf where a word is bad or the output may not end yet."""
    sampling, output = row.sampling, row.token_ids[row.num_prompt_tokens :]
    result = dict(sampling.logit_bias)
    banned = [words[-1] for words in sampling.bad_words if tuple(output[len(output) - len(words) + 1 :]) == words[:-1]]
    if len(output) < sampling.min_tokens:
        banned += [2, *sampling.stop_token_ids]
    return result | dict.fromkeys(banned, float("-inf"))


def packed_mask(row: Row, vocab_size: int) -> list[int] | None:
    """int32 words whose bits are the tokens that allowed_token_ids and the grammar leave; None where both leave all."""
    bits = np.full(-(-vocab_size // 32) * 32, True)
    if row.sampling.allowed_token_ids:
        bits[:] = np.isin(np.arange(len(bits)), row.sampling.allowed_token_ids)
    if isinstance(row.matcher, CountingDown):
        bits[:vocab_size] &= row.matcher.allowed()
    return None if bits.all() else bit_words(bits).tolist()


def pack_rules(rows: Sequence[Row], pushed: Sequence[Sequence[int]], vocab_size: int) -> Rules:
    """Rules of each row after `pushed` tokens were pushed on it; rows are left as they were."""
    counts = torch.full((len(rows) + 1, vocab_size), 99, dtype=torch.int32)
    slots, penalties, masks, mask_rows = [], [], [], []
    begins, ids, values = [0], [], []
    for row, tokens in zip(rows, pushed, strict=True):
        sampling, slot = row.sampling, -1
        penalties.append([sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty])
        if penalties[-1] != [1.0, 0.0, 0.0]:
            slot = len(rows) - len(slots)
            prompt = row.token_ids[: row.num_prompt_tokens] if sampling.repetition_penalty != 1.0 else []
            count_prompt(counts, slot, torch.tensor(prompt, dtype=torch.int64))
            output = torch.tensor([*row.token_ids[row.num_prompt_tokens :], -1])
            count_output(counts, torch.full_like(output, slot), output)
        slots.append(slot)
        number = sum(row.push(token) for token in tokens)
        for token_id, value in sorted(biases(row).items()):
            ids.append(token_id)
            values.append(value)
        begins.append(len(ids))
        words = packed_mask(row, vocab_size)
        row.pop(number)
        mask_rows.append(-1 if words is None else len(masks))
        masks += [] if words is None else [words]
    pushed_begins = np.cumsum([0, *map(len, pushed)])
    return Rules(
        bias_begins=torch.tensor(begins, dtype=torch.int32),
        bias_ids=torch.tensor(ids, dtype=torch.int32),
        bias_values=torch.tensor(values, dtype=torch.float32),
        penalties=torch.tensor(penalties, dtype=torch.float32),
        counts=counts,
        count_slots=torch.tensor(slots, dtype=torch.int32),
        pushed_begins=torch.tensor(pushed_begins, dtype=torch.int32),
        pushed_ids=torch.tensor([token for tokens in pushed for token in tokens], dtype=torch.int32),
        masks=torch.tensor(masks, dtype=torch.int32).reshape(-1, -(-vocab_size // 32)),
        mask_rows=torch.tensor(mask_rows, dtype=torch.int32),
    )
