"""How each running request is sampled, as columns by slot, so that a step's arrays are gathered and not looped over.

Imports no torch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline_engine.backends.triton.request_rules import RequestRules
from paceline_engine.sampling.row import Row

_MASK = (1 << 64) - 1


class SamplingTable:
    """Slots 0 to max_num_seqs - 1, and the columns that say what the request in each wants.

    Greedy requests have a temperature of 0 and no cuts, whatever else they ask for. penalties: repetition, frequency,
    presence. has_rules: others than penalties; held_until: output tokens before which there are some anyway.
    num_alternatives: to report beside each token; -1 reports nothing.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._slots: dict[str, int] = {}
        self._free = list(reversed(range(max_num_seqs)))
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.has_cuts = np.zeros(max_num_seqs, dtype=np.bool_)
        self.penalties = np.zeros((max_num_seqs, 3), dtype=np.float32)
        self.has_penalties = np.zeros(max_num_seqs, dtype=np.bool_)
        self.has_rules = np.zeros(max_num_seqs, dtype=np.bool_)
        self.held_until = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_alternatives = np.full(max_num_seqs, -1, dtype=np.int64)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def slot(self, request_id: str) -> int:
        """Where a request is. Raises KeyError for one that isn't there."""
        return self._slots[request_id]

    def slots(self, request_ids: list[str]) -> npt.NDArray[np.int64]:
        """[requests] where they are."""
        return np.array([self._slots[request_id] for request_id in request_ids], dtype=np.int64)

    def add(self, row: Row, rules: RequestRules) -> int:
        """Give a request a slot. Raises ValueError if none is free."""
        if not self._free:
            raise ValueError(f"request {row.request_id} has no slot: all {len(self._slots)} are taken (max_num_seqs)")
        slot = self._slots[row.request_id] = self._free.pop()
        sampling = row.sampling
        is_cut = row.has_cuts and not row.greedy
        self.temperature[slot] = 0.0 if row.greedy else sampling.temperature
        # The same 64 bits, as torch and Triton have them.
        self.seeds[slot] = np.uint64(sampling.seed & _MASK).astype(np.int64)
        self.top_k[slot] = min(sampling.top_k, np.iinfo(np.int32).max) if is_cut else 0
        self.top_p[slot] = sampling.top_p if is_cut else 1.0
        self.min_p[slot] = sampling.min_p if is_cut else 0.0
        self.has_cuts[slot] = is_cut
        self.penalties[slot] = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        self.has_penalties[slot] = row.has_penalties
        self.has_rules[slot] = not rules.are_empty
        self.held_until[slot] = rules.held_until
        self.num_prompt_tokens[slot] = row.num_prompt_tokens
        self.num_alternatives[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        return slot

    def remove(self, request_id: str) -> int:
        """Free a request's slot, and name it. Raises KeyError for one that isn't there."""
        slot = self._slots.pop(request_id)
        self._free.append(slot)
        return slot
