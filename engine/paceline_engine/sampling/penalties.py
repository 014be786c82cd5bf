"""How often a request's tokens occurred, kept so that a step costs as much as it adds.

Penalties touch only tokens that occurred, so the counts are sparse: one slot for each distinct token. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from paceline_engine.messages import SamplingParams
from paceline_engine.sampling.noise import Float32Array, IntArray


class TokenCounts:
    """Counts of output tokens; prompt tokens are known too, with a count of 0, if `prompt` is given."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        self._slot_of: dict[int, int] = {}
        self._ids: IntArray = np.zeros(64, dtype=np.int64)
        self._counts: Float32Array = np.zeros(64, dtype=np.float32)
        for token_id in prompt:
            self._slot(token_id)
        self._num_prompt_slots = len(self._slot_of)
        for token_id in output:
            self.add(token_id)

    def _slot(self, token_id: int) -> int:
        slot = self._slot_of.get(token_id)
        if slot is None:
            slot = self._slot_of[token_id] = len(self._slot_of)
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token_id
        return slot

    def add(self, token_id: int) -> None:
        """One more occurrence in the output."""
        self._counts[self._slot(token_id)] += 1

    def remove(self, token_id: int) -> None:
        """Undo the latest `add`, which was of this token."""
        slot = self._slot_of[token_id]
        self._counts[slot] -= 1
        if self._counts[slot] == 0 and slot >= self._num_prompt_slots:
            # Slots are given in order of first occurrence and taken back in reverse, so this one is the last.
            del self._slot_of[token_id]

    def penalise(self, values: Float32Array, sampling: SamplingParams) -> None:
        """Change logits [vocab] in place: divide (or multiply, below 0) by repetition, then subtract the other two."""
        size = len(self._slot_of)
        ids, counts = self._ids[:size], self._counts[:size]
        touched = values[ids]
        if sampling.repetition_penalty != 1.0:
            factor = np.float32(sampling.repetition_penalty)
            touched = np.where(touched > 0, touched / factor, touched * factor)
        touched -= np.float32(sampling.frequency_penalty) * counts
        touched -= np.float32(sampling.presence_penalty) * (counts > 0)
        values[ids] = touched


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether `TokenCounts` are needed at all."""
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
