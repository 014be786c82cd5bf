"""What rank 0 tells the other ranks of a spread model: the inputs of each step, sleep, wake, the end.

Only rank 0 has a runner and draws tokens, so that all ranks go on with the same ones whatever rounding does. Messages
go between the hosts' memories, a header of fixed size and then the arrays' bytes; every rank reads each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from paceline_engine.backends.triton.inputs import StepInputs

if TYPE_CHECKING:
    from paceline_engine.backends.triton.staging import Array


class Kind(IntEnum):
    """What a message is."""

    STOP = 0
    STEP = 1
    SLEEP = 2
    WAKE = 3


@dataclass(frozen=True, slots=True)
class Message:
    """inputs: of a step; has_unknown: some of its tokens follow, from device to device."""

    kind: Kind
    inputs: StepInputs | None = None
    has_unknown: bool = False


# kind, tokens, sequences, blocks, rows of logits, longest share, segments, flags.
_HEADER = 8
_IS_DECODE, _HAS_UNKNOWN = 1, 2


class Ranks:
    """One end of the channel; rank 0's sends, the others' receive. group: of host memory (gloo)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def send(self, kind: Kind) -> None:
        """Tell every rank something without inputs."""
        self._broadcast(torch.tensor([kind] + [0] * (_HEADER - 1), dtype=torch.int64))

    def send_step(self, inputs: StepInputs, *, has_unknown: bool) -> None:
        """Have every rank make a step."""
        layout = _layout_of(inputs)
        flags = _IS_DECODE * inputs.is_decode + _HAS_UNKNOWN * has_unknown
        header = [Kind.STEP, *layout, inputs.max_query_len, inputs.num_segments, flags]
        self._broadcast(torch.tensor(header, dtype=torch.int64))
        parts = [np.ascontiguousarray(inputs.arrays[name]).reshape(-1).view(np.uint8) for name in _fields(*layout)]
        self._broadcast(torch.from_numpy(np.concatenate(parts)))

    def receive(self) -> Message:
        """Wait for the next message."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        self._broadcast(header)
        kind, tokens, sequences, blocks, rows, longest, segments, flags = header.tolist()
        if kind != Kind.STEP:
            return Message(Kind(kind))
        fields = _fields(tokens, sequences, blocks, rows)
        sizes = {name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (shape, dtype) in fields.items()}
        payload = torch.empty(sum(sizes.values()), dtype=torch.uint8)
        self._broadcast(payload)
        content, begin = payload.numpy(), 0
        arrays: dict[str, Array] = {}
        for name, (shape, dtype) in fields.items():
            arrays[name] = content[begin : begin + sizes[name]].view(dtype).reshape(shape)
            begin += sizes[name]
        inputs = StepInputs(
            arrays=arrays, max_query_len=longest, num_segments=segments, is_decode=bool(flags & _IS_DECODE)
        )
        return Message(Kind.STEP, inputs, bool(flags & _HAS_UNKNOWN))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0, group=self._group)


def _layout_of(inputs: StepInputs) -> tuple[int, int, int, int]:
    """Tokens, sequences, blocks and rows of logits."""
    arrays = inputs.arrays
    return (
        len(arrays["token_ids"]),
        len(arrays["context_lens"]),
        arrays["block_tables"].shape[1],
        len(arrays["logits_rows"]),
    )


def _fields(tokens: int, sequences: int, blocks: int, rows: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and type of each array, the wider ones first, so that all are aligned."""
    return {
        "token_ids": ((tokens,), np.int64),
        "positions": ((tokens,), np.int64),
        "slots": ((tokens,), np.int64),
        "logits_rows": ((rows,), np.int64),
        "begins": ((sequences + 1,), np.int32),
        "context_lens": ((sequences,), np.int32),
        "block_tables": ((sequences, blocks), np.int32),
    }
