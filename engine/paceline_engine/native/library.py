"""The compiled library's functions and structs for Python: ctypes only, which releases the GIL during each call.

The structs mirror src/decoder.h field by field. Pointers are addresses of arrays that the caller keeps alive. Imports
no torch.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

# Packed formats, as in src/kernels.h.
FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
PANEL = 32
# Query heads of one KV head that an attention task can hold.
MAX_GROUP = 96
ISA_VARIABLE = "PACELINE_CPU_ISA"

_address = ctypes.c_void_p
_i64 = ctypes.c_int64


class LayerStruct(ctypes.Structure):
    """`Layer` of src/decoder.h."""

    _fields_ = (
        ("input_norm", _address),
        ("qkv", _address),
        ("qkv_bias", _address),
        ("q_norm", _address),
        ("k_norm", _address),
        ("output", _address),
        ("output_bias", _address),
        ("post_norm", _address),
        ("gate_up", _address),
        ("gate_up_bias", _address),
        ("down", _address),
        ("down_bias", _address),
        ("cosines", _address),
        ("sines", _address),
        ("window", _i64),
        ("qkv_format", _i64),
        ("output_format", _i64),
        ("gate_up_format", _i64),
        ("down_format", _i64),
    )


class ModelStruct(ctypes.Structure):
    """`Model` of src/decoder.h."""

    _fields_ = (
        ("vocab", _i64),
        ("hidden", _i64),
        ("inner", _i64),
        ("layers", _i64),
        ("heads", _i64),
        ("kv_heads", _i64),
        ("head_dim", _i64),
        ("head_format", _i64),
        ("integer", _i64),
        ("half_embedding", _i64),
        ("epsilon", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("embedding", _address),
        ("norm", _address),
        ("head", _address),
        ("layer", ctypes.POINTER(LayerStruct)),
    )


class BatchStruct(ctypes.Structure):
    """`Batch` of src/decoder.h."""

    _fields_ = (
        ("tokens", _i64),
        ("sequences", _i64),
        ("logits_rows", _i64),
        ("layers", _i64),
        ("token_ids", _address),
        ("positions", _address),
        ("slots", _address),
        ("sequence_begins", _address),
        ("block_tables", _address),
        ("table_stride", _i64),
        ("logits", _address),
        ("out", _address),
        ("kv", _address),
        ("num_blocks", _i64),
        ("block_size", _i64),
        ("half_kv", _i64),
        ("states", _i64),
        ("state_rows", _address),
        ("state_out", _address),
    )


@cache
def load_library(path: Path) -> ctypes.CDLL:
    """The library with its functions' types declared. Raises OSError."""
    library = ctypes.CDLL(str(path))
    signatures = {
        "paceline_isa": (ctypes.c_char_p, [ctypes.c_char_p]),
        "paceline_packed_bytes": (_i64, [ctypes.c_int32, _i64, _i64]),
        "paceline_pack": (None, [ctypes.c_int32, _address, _address, _i64, _i64, _address, ctypes.c_int32]),
        "paceline_holds": (ctypes.c_int32, [ctypes.c_int32, _address, _address, _i64, _i64, ctypes.c_int32]),
        "paceline_create": (_address, [ctypes.POINTER(ModelStruct), ctypes.c_char_p, ctypes.c_int32]),
        "paceline_destroy": (None, [_address]),
        "paceline_step": (ctypes.c_int32, [_address, ctypes.POINTER(BatchStruct)]),
        "paceline_read_roof": (ctypes.c_double, [_address, _i64, ctypes.c_int32]),
        "paceline_multiply_add_roof": (ctypes.c_double, [_i64, ctypes.c_int32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def chosen_isa(library: ctypes.CDLL) -> str:
    """The instruction set that will be used: the widest, or $PACELINE_CPU_ISA. Raises ValueError."""
    wanted = os.environ.get(ISA_VARIABLE, "")
    name = library.paceline_isa(wanted.encode())
    if name is None:
        raise ValueError(
            f"${ISA_VARIABLE} is {wanted!r}; this CPU's kernels are avx512, avx2 and generic, as it has them"
        )
    return name.decode()
