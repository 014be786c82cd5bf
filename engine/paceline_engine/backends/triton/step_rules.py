"""All rules of a step in the arrays that the rules' kernel takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline_engine.backends.triton.request_rules import RequestRules
from paceline_engine.backends.triton.sampling_table import SamplingTable
from paceline_engine.backends.triton.shares import Shares
from paceline_engine.backends.triton.staging import Array
from paceline_engine.sampling.noise import Float32Array
from paceline_engine.sampling.row import MaskWords

Flags = npt.NDArray[np.bool_]


def pack_rules(
    shares: Shares, rules: Sequence[RequestRules], table: SamplingTable, is_live: Flags, num_words: int
) -> dict[str, Array]:
    """Fields of `kernels.rules.Rules` but for the counts; none where nothing happens to any row.

    rules: of each request. is_live [requests]: others have no rules. num_words: of a mask.
    """
    is_ruled = is_live & (table.has_rules[shares.slots] | (shares.num_output < table.held_until[shares.slots]))
    is_penalised = is_live & table.has_penalties[shares.slots]
    if not is_ruled.any() and not is_penalised.any():
        return {}
    packed = _Packed(shares.num_rows)
    for request in np.flatnonzero(is_ruled).tolist():
        packed.add(shares, request, rules[request])
    arrays = packed.arrays(num_words)
    return arrays | _penalties(shares, table, is_penalised) if is_penalised.any() else arrays


class _Packed:
    """Biases and masks of rows in the making. A mask that holds for one row after the other is there once."""

    def __init__(self, num_rows: int) -> None:
        self._lengths = np.zeros(num_rows + 1, dtype=np.int32)
        self._ids: list[npt.NDArray[np.int32]] = []
        self._values: list[Float32Array] = []
        self._masks: list[MaskWords] = []
        self._mask_rows = np.full(num_rows, -1, dtype=np.int32)

    def add(self, shares: Shares, request: int, rules: RequestRules) -> None:
        found = rules.verified(int(shares.num_output[request]), shares.guesses[request])
        for at, position in enumerate(found, int(shares.begins[request])):
            biases = position.biases
            if len(biases.ids) > 0:
                self._lengths[at + 1] = len(biases.ids)
                self._ids.append(biases.ids)
                self._values.append(biases.values)
            if position.mask is not None:
                if not self._masks or self._masks[-1] is not position.mask:
                    self._masks.append(position.mask)
                self._mask_rows[at] = len(self._masks) - 1

    def arrays(self, num_words: int) -> dict[str, Array]:
        # Also where there are none: each combination of rules would be a kernel of its own, compiled when it comes up.
        no_ids, no_values = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
        return {
            "bias_begins": self._lengths.cumsum(dtype=np.int32),
            "bias_ids": np.concatenate([no_ids, *self._ids]),
            "bias_values": np.concatenate([no_values, *self._values]),
            "masks": np.stack(self._masks) if self._masks else np.empty((0, num_words), dtype=np.int32),
            "mask_rows": self._mask_rows,
        }


def _penalties(shares: Shares, table: SamplingTable, is_penalised: Flags) -> dict[str, Array]:
    of_row = is_penalised[shares.request_of]
    pushed = [
        np.array(shares.guesses[request][:count], dtype=np.int32)
        for request in np.flatnonzero(is_penalised).tolist()
        for count in range(1, len(shares.guesses[request]) + 1)
    ]
    lengths = np.where(of_row, shares.offsets, 0)
    return {
        "penalties": table.penalties[shares.row_slots],
        "count_slots": np.where(of_row, shares.row_slots, -1).astype(np.int32),
        "pushed_begins": np.concatenate((np.zeros(1, dtype=np.int64), lengths.cumsum())).astype(np.int32),
        "pushed_ids": np.concatenate([np.empty(0, dtype=np.int32), *pushed]),
    }
