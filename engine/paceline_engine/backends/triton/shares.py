"""Which rows of a step's logits are whose. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_engine.backends.triton.sampling_table import SamplingTable
from paceline_engine.core.outputs import ScheduledRequest
from paceline_engine.sampling.row import Row

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shares:
    """Request r has rows begins[r] to begins[r + 1] of the logits: of its last known token and of each guess.

    slots, num_known (tokens, guesses not counted), num_output (of those) are [requests]. request_of and offsets are
    [rows]: whose each is, and how many guesses are before it. guesses: of each request.
    """

    rows: Sequence[Row]
    guesses: list[list[int]]
    slots: Integers
    num_known: Integers
    num_output: Integers
    begins: Integers
    request_of: Integers
    offsets: Integers

    @classmethod
    def of(cls, items: Sequence[ScheduledRequest], rows: Sequence[Row], table: SamplingTable) -> Shares:
        """Raises KeyError for a request without a slot."""
        slots = table.slots([item.request_id for item in items])
        num_known = np.array([item.num_known_tokens for item in items], dtype=np.int64)
        guesses = [item.token_ids[item.num_tokens - item.num_draft_tokens :] for item in items]
        sizes = np.array([item.num_draft_tokens + 1 for item in items], dtype=np.int64)
        begins = np.concatenate((np.zeros(1, dtype=np.int64), sizes.cumsum()))
        request_of = np.repeat(np.arange(len(items)), sizes)
        return cls(
            rows=rows,
            guesses=guesses,
            slots=slots,
            num_known=num_known,
            num_output=num_known - table.num_prompt_tokens[slots],
            begins=begins,
            request_of=request_of,
            offsets=np.arange(len(request_of)) - begins[request_of],
        )

    @property
    def num_rows(self) -> int:
        """Of the logits."""
        return len(self.request_of)

    @property
    def most_guesses(self) -> int:
        """Of any request."""
        return int(self.offsets.max(initial=0))

    @property
    def row_slots(self) -> Integers:
        """[rows] the slot of each one's request."""
        return self.slots[self.request_of]

    @property
    def positions(self) -> Integers:
        """[rows] of the token that each yields."""
        return self.num_known[self.request_of] + self.offsets
