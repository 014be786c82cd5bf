"""How often running requests' tokens occurred, on the device: a launch counts what it samples, seen by the host or not.

Only what was accepted stays counted: tokens that the scheduler didn't take are taken back with the next launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from paceline_engine.backends.triton.staging import Array
from paceline_engine.kernels.rules import count_output
from paceline_engine.sampling.row import Row


class Counted:
    """What the device has counted of one request, as far as the host knows: tokens of launches that it waited for."""

    def __init__(self, slot: int, row: Row) -> None:
        self.slot = slot
        # Only the repetition penalty looks at the prompt.
        self.prompt = row.token_ids[: row.num_prompt_tokens] if row.sampling.repetition_penalty != 1.0 else []
        self.output = row.token_ids[row.num_prompt_tokens :]
        self.is_new = True

    def changes(self, num_output: int, vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None:
        """(places in the flat table, what to add there) before a launch behind `num_output` output tokens, if any."""
        untaken = self.output[num_output:]
        if not self.is_new and not untaken:
            return None
        del self.output[num_output:]
        if not self.is_new:
            return _places(self.slot, untaken, vocab_size), np.full(len(untaken), -2, dtype=np.int32)
        self.is_new = False
        prompt = np.unique(_places(self.slot, self.prompt, vocab_size))
        self.prompt = []
        output = _places(self.slot, self.output, vocab_size)
        steps = np.repeat(np.array([1, 2], dtype=np.int32), [len(prompt), len(output)])
        return np.concatenate((prompt, output)), steps


def _places(slot: int, token_ids: list[int], vocab_size: int) -> npt.NDArray[np.int64]:
    return slot * vocab_size + np.array(token_ids, dtype=np.int64)


class PenaltyCounts:
    """table [slots, vocab] int32 as the rules' kernel has it: 2 for each output token, 1 if it occurs in the prompt.

    Memory for it is taken when the first request with penalties is launched.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.table: torch.Tensor | None = None
        self._shape = max_num_seqs, vocab_size
        self._device = device

    def pack(self, launched: Iterable[tuple[Counted, int]]) -> dict[str, Array]:
        """For `update`: what must change before penalised requests are launched behind so many output tokens."""
        new: list[int] = []
        changes: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]] = []
        for counted, num_output in launched:
            if counted.is_new:
                new.append(counted.slot)
            change = counted.changes(num_output, self._shape[1])
            if change is not None:
                changes.append(change)
        arrays: dict[str, Array] = {}
        if new:
            arrays["new_slots"] = np.array(new, dtype=np.int64)
        if changes:
            places, steps = zip(*changes, strict=True)
            arrays |= {"count_places": np.concatenate(places), "count_steps": np.concatenate(steps)}
        return arrays

    def update(self, staged: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Queue the changes; the table."""
        if self.table is None:
            self.table = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        if "new_slots" in staged:
            self.table.index_fill_(0, staged["new_slots"], 0)
        if "count_places" in staged:
            self.table.view(-1).index_add_(0, staged["count_places"], staged["count_steps"])
        return self.table

    def count(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Queue one occurrence more of tokens [requests, any] in the requests' slots; negative ones don't count."""
        if self.table is not None:
            count_output(self.table, slots[:, None].expand_as(tokens), tokens)
