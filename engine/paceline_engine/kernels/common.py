"""What the launchers share: the types that Triton's dot takes, and where the interpreter differs from a GPU."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def is_interpreted() -> bool:
    """Whether kernels run through numpy on the CPU: TRITON_INTERPRET=1 when they were imported."""
    return bool(triton.knobs.runtime.interpret)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Type of the operands of a product whose inputs are `dtype`; numpy has no bfloat16 to multiply."""
    return tl.float32 if is_interpreted() and dtype == torch.bfloat16 else _TYPES[dtype]


def dot_precision(dtype: torch.dtype) -> str:
    """float32 is multiplied as such, not as TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


@cache
def num_processors_of(device: torch.device) -> int:
    """How many programs a device runs at a time at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
