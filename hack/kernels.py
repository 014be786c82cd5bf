"""What the GPU kernels compile to, for cards that aren't here: writes docs/reference/kernels.md, or --check compares.

    python hack/kernels.py            # after a change of a kernel, or of Triton's version in constraints.txt
    python hack/kernels.py --check    # a test runs this

Each case is a launch as the engine makes it, in Llama 3.1 8B's shapes unless it says otherwise. Exit code 1: a kernel
doesn't compile, spills more than its budget or wants more shared memory than the card has; or the page is out of step.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

# Triton 3.10 changes the default; the page is about this one.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton

from paceline_engine.kernels.ahead_of_time import SHARED_LIMITS, Compiled, compile_launches
from paceline_engine.kernels.attention import paged_attention
from paceline_engine.kernels.block_copy import gather_blocks, scatter_blocks
from paceline_engine.kernels.cuts import SamplingRows
from paceline_engine.kernels.gated_mlp import gated_activation
from paceline_engine.kernels.logprobs import token_logprobs
from paceline_engine.kernels.lora import add_lora, group_rows, stack_adapters
from paceline_engine.kernels.quantized_gemm import pack_matrix, quantized_gemm
from paceline_engine.kernels.rejection import Guesses, verify
from paceline_engine.kernels.rms_norm import rms_norm
from paceline_engine.kernels.rope_kv_write import rope_kv_write
from paceline_engine.kernels.rules import Rules, apply_rules
from paceline_engine.kernels.sampling import sample

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "kernels.md"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, BLOCK_SIZE, VOCAB = 32, 8, 128, 4096, 16, 128_256
# Bytes of local memory a thread may use, by case; 0 elsewhere.
SPILL_BUDGET = {"int4 product, 64 rows": 24, "sampling": 8}
FP8_FROM = 90  # Triton converts float8_e4m3fn on 8.9 and later; of the two here, on 9.0.


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def attend(
    queries: int,
    segments: int = 1,
    kv: torch.dtype = torch.bfloat16,
    window: int | None = None,
    head_dim: int = HEAD_DIM,
) -> None:
    pool = torch.zeros(4, BLOCK_SIZE, KV_HEADS, head_dim, dtype=kv)
    scales = None if kv.itemsize > 1 else torch.zeros(4, BLOCK_SIZE, KV_HEADS)
    query = torch.zeros(queries, HEADS, head_dim, dtype=torch.float32 if kv == torch.float32 else torch.bfloat16)
    paged_attention(
        *(query, pool, pool, torch.zeros(1, 16, dtype=torch.int32)),
        *(torch.tensor([0, queries], dtype=torch.int32), torch.tensor([queries], dtype=torch.int32)),
        max_query_len=queries,
        scale=head_dim**-0.5,
        window=window,
        key_scale=scales,
        value_scale=scales,
        num_segments=segments,
    )


def rotate(tokens: int, kv: torch.dtype = torch.bfloat16) -> None:
    pool = torch.zeros(4, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=kv)
    scales = None if kv == torch.bfloat16 else torch.zeros(4, BLOCK_SIZE, KV_HEADS)
    table, places = torch.zeros(64, HEAD_DIM // 2), torch.zeros(tokens, dtype=torch.int64)
    qkv = bf16(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    rope_kv_write(qkv, places, places, pool, pool, cos=table, sin=table, key_scale=scales, value_scale=scales)


def copy() -> None:
    pool, staging, ids = bf16(1, 2, 4, BLOCK_SIZE, KV_HEADS, HEAD_DIM), bf16(1, 2, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), 2
    gather_blocks(pool, torch.arange(ids), staging)
    scatter_blocks(pool, torch.arange(ids), staging)


def multiply(rows: int, form: str) -> None:
    quantized_gemm(bf16(rows, HIDDEN), pack_matrix(torch.ones(256, HIDDEN), form))


def adapt(rows: int) -> None:
    sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    adapters = stack_adapters([[(bf16(16, HIDDEN), bf16(size, 16)) for size in sizes]] * 2, sizes)
    groups = group_rows(torch.zeros(rows, dtype=torch.int64), 2)
    add_lora(bf16(rows, sum(sizes)), bf16(rows, HIDDEN), adapters, groups)


def drawn(rows: int) -> SamplingRows:
    numbers = torch.zeros(rows, dtype=torch.int64)
    return SamplingRows(
        temperature=torch.ones(rows),
        seeds=numbers,
        positions=numbers,
        top_k=torch.full((rows,), 50, dtype=torch.int32),
        top_p=torch.full((rows,), 0.9),
        min_p=torch.zeros(rows),
    )


def rule() -> None:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    rules = Rules(
        bias_begins=numbers(3),
        bias_ids=numbers(1),
        bias_values=torch.zeros(1),
        penalties=torch.ones(2, 3),
        counts=numbers(2, VOCAB),
        count_slots=numbers(2),
        masks=numbers(1, -(-VOCAB // 32)),
        mask_rows=numbers(2),
    )
    apply_rules(torch.zeros(2, VOCAB), rules)


def check_guesses() -> None:
    guesses = Guesses(
        begins=torch.tensor([0, 2], dtype=torch.int32),
        token_ids=torch.tensor([3, -1]),
        most=1,
        by_ratio=torch.ones(2, dtype=torch.int32),
        draft_probabilities=torch.zeros(2, VOCAB),
        draft_rows=torch.tensor([0, -1], dtype=torch.int32),
    )
    verify(torch.zeros(2, VOCAB), guesses, torch.zeros(2, dtype=torch.int64), drawn(2))


CASES: dict[str, Callable[[], object]] = {
    "attention, decode": lambda: attend(1),
    "attention, decode in 8 segments": lambda: attend(1, segments=8),
    "attention, decode over int8": lambda: attend(1, kv=torch.int8),
    "attention, decode over fp8": lambda: attend(1, kv=torch.float8_e4m3fn),
    "attention, verification of 4": lambda: attend(5),
    "attention, prefill": lambda: attend(2048),
    "attention, prefill in a window": lambda: attend(2048, window=1024),
    "attention, prefill over int8": lambda: attend(2048, kv=torch.int8),
    "attention, prefill over fp8": lambda: attend(2048, kv=torch.float8_e4m3fn),
    "attention, decode in float32": lambda: attend(1, kv=torch.float32),
    "attention, prefill in float32": lambda: attend(2048, kv=torch.float32),
    "attention, decode, heads of 256": lambda: attend(1, head_dim=256),
    "attention, prefill, heads of 256": lambda: attend(2048, head_dim=256),
    "rotation and KV write, decode": lambda: rotate(64),
    "rotation and KV write, prefill": lambda: rotate(2048),
    "rotation and KV write to int8": lambda: rotate(64, kv=torch.int8),
    "RMSNorm with residual": lambda: rms_norm(bf16(64, HIDDEN), bf16(HIDDEN), 1e-5, residual=bf16(64, HIDDEN)),
    "SwiGLU": lambda: gated_activation(bf16(64, 2 * 14336), "silu"),
    "block copies": copy,
    "int8 product, 1 row": lambda: multiply(1, "int8"),
    "int8 product, 64 rows": lambda: multiply(64, "int8"),
    "int8 product, 2048 rows": lambda: multiply(2048, "int8"),
    "int4 product, 1 row": lambda: multiply(1, "int4"),
    "int4 product, 64 rows": lambda: multiply(64, "int4"),
    "int4 product, 2048 rows": lambda: multiply(2048, "int4"),
    "LoRA, decode": lambda: adapt(64),
    "LoRA, prefill": lambda: adapt(2048),
    "rules on logits": rule,
    "sampling": lambda: sample(torch.zeros(4, VOCAB), drawn(4)),
    "verification of guesses": check_guesses,
    "log probabilities": lambda: token_logprobs(torch.zeros(4, VOCAB), torch.zeros(4, dtype=torch.int64), 0),
}


def rows() -> list[tuple[str, int, Compiled]]:
    """(case, compute capability, what it compiled to), with a line of progress for each."""
    found: list[tuple[str, int, Compiled]] = []
    for number, (case, launch) in enumerate(CASES.items(), 1):
        sys.stderr.write(f"[{number}/{len(CASES)}] {case}\n")
        for arch in SHARED_LIMITS:
            if "fp8" not in case or arch >= FP8_FROM:
                found += [(case, arch, compiled) for compiled in compile_launches(launch, arch)]
    return found


def problems(found: list[tuple[str, int, Compiled]]) -> list[str]:
    """What no card could run well."""
    lines: list[str] = []
    for case, arch, compiled in found:
        if compiled.spilled > SPILL_BUDGET.get(case, 0):
            lines.append(f"{case}: {compiled.kernel} on sm_{arch} spills {compiled.spilled} bytes a thread")
        if compiled.shared > SHARED_LIMITS[arch]:
            lines.append(f"{case}: {compiled.kernel} on sm_{arch} wants {compiled.shared} bytes of shared memory")
        multiplies = compiled.kernel in ("paged_attention_kernel", "quantized_gemm_kernel")
        # Float32 is multiplied as such, for which there are none.
        if multiplies and not case.endswith("in float32") and not {"mma", "wgmma"} & {*compiled.instructions}:
            lines.append(f"{case}: {compiled.kernel} on sm_{arch} doesn't use the tensor cores")
    return lines


def page(found: list[tuple[str, int, Compiled]]) -> str:
    lines = [
        "# GPU kernels, as compiled",
        "",
        f"Generated by `python hack/kernels.py` with Triton {triton.__version__}, without a GPU: what each launch",
        "compiles to in Llama 3.1 8B's shapes, where nothing else is said. No speed here is measured. Spilled: bytes "
        "of local memory a thread.",
        "",
        "| launch | kernel | card | registers | spilled | shared memory, bytes | instructions |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, arch, compiled in found:
        numbers = f"{compiled.registers} | {compiled.spilled} | {compiled.shared} | {', '.join(compiled.instructions)}"
        lines.append(f"| {case} | `{compiled.kernel}` | sm_{arch} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args()
    found = rows()
    lines = problems(found)
    text = page(found)
    if args.check and PAGE.read_text() != text:
        lines.append(f"{PAGE.name} is out of step: run `python hack/kernels.py` and commit the result")
    elif not args.check:
        PAGE.write_text(text)
    sys.stderr.writelines(f"{line}\n" for line in lines)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
