"""Prints each kernel's name and how often it would be compiled for prefill steps of many sizes.

Run without the interpreter; nothing is compiled. Triton compiles anew for an integer of 1 and for multiples of 16.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from paceline_engine.kernels.ahead_of_time import nothing_launched
from paceline_engine.kernels.attention import paged_attention
from paceline_engine.kernels.lora import add_lora, group_rows, stack_adapters
from paceline_engine.kernels.quantized_gemm import pack_matrix, quantized_gemm
from paceline_engine.kernels.rms_norm import rms_norm
from paceline_engine.kernels.rope_kv_write import rope_kv_write

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 2, 128, 256

found: defaultdict[str, set[str]] = defaultdict(set)


def record(self: Any, key: str, *_args: object) -> None:
    """Stands in for the compiler."""
    found[self.fn.__name__].add(key)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def attend(num_tokens: int, num_sequences: int, num_blocks: int) -> None:
    pool = zeros(4, 16, KV_HEADS, HEAD_DIM)
    paged_attention(
        *(zeros(num_tokens, HEADS, HEAD_DIM), pool, pool, torch.zeros(num_sequences, num_blocks, dtype=torch.int32)),
        *(torch.zeros(num_sequences + 1, dtype=torch.int32), torch.zeros(num_sequences, dtype=torch.int32)),
        max_query_len=200,
        scale=1.0,
    )


def steps() -> None:
    pool, table, matrix = zeros(4, 16, KV_HEADS, HEAD_DIM), torch.zeros(64, HEAD_DIM // 2), torch.ones(64, HIDDEN)
    packed = pack_matrix(matrix, "int8")
    adapters = [stack_adapters([[(zeros(16, HIDDEN), zeros(64, 16))]] * count, (64,)) for count in (3, 4)]
    for num_tokens in (272, 300, 301):
        for num_sequences in (1, 2, 16):
            for num_blocks in (1, 2, 32):
                attend(num_tokens, num_sequences, num_blocks)
        x, places = zeros(num_tokens, HIDDEN), torch.zeros(num_tokens, dtype=torch.int64)
        qkv = zeros(num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        rope_kv_write(qkv, places, places, pool, pool, cos=table, sin=table)
        rms_norm(x, zeros(HIDDEN), 1e-5, residual=zeros(num_tokens, HIDDEN))
        quantized_gemm(x, packed)
        for stacked in adapters:
            add_lora(zeros(num_tokens, 64), x, stacked, group_rows(places, stacked.a.shape[0]))


def main() -> None:
    JITFunction._do_compile = record
    with nothing_launched(90, []):
        steps()
    for name, keys in found.items():
        sys.stdout.write(f"{name} {len(keys)}\n")


if __name__ == "__main__":
    main()
