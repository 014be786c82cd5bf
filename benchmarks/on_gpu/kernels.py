"""Kernels besides attention at Llama 3.1 8B's shapes: share of the limit, and torch's or cuBLAS's way to the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from on_gpu.device import Device, num_processors
from on_gpu.run import Run
from on_gpu.work import Work, measure, relative_error

from paceline_engine.kernels.block_copy import gather_blocks, scatter_blocks
from paceline_engine.kernels.cuts import SamplingRows
from paceline_engine.kernels.gated_mlp import gated_activation, gated_activation_reference
from paceline_engine.kernels.logprobs import token_logprobs
from paceline_engine.kernels.lora import add_lora, add_lora_reference, group_rows, stack_adapters
from paceline_engine.kernels.quantized_gemm import dequantize, pack_matrix, quantized_gemm, quantized_gemm_reference
from paceline_engine.kernels.rms_norm import rms_norm, rms_norm_reference
from paceline_engine.kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference
from paceline_engine.kernels.rules import Rules, apply_rules
from paceline_engine.kernels.sampling import choose_num_splits, draw, sample

BLOCK_SIZE = 16


def _random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def norm(rows: int, size: int, device: torch.device) -> Work:
    """RMSNorm with the residual sum before it."""
    x, weight, residual = (_random(*shape, device=device) for shape in ((rows, size), (size,), (rows, size)))
    out = torch.full_like(x, torch.nan)

    def error() -> float:
        sums, expected_sums = residual.clone(), residual.clone()
        expected = rms_norm_reference(x, weight, 1e-5, residual=expected_sums)
        got = rms_norm(x, weight, 1e-5, residual=sums, out=out)
        return max(relative_error(got, expected), relative_error(sums, expected_sums))

    def run() -> torch.Tensor:
        return rms_norm(x, weight, 1e-5, residual=residual, out=out)

    return Work(run=run, num_bytes=2 * x.nbytes + 2 * residual.nbytes, error=error)


def activation(rows: int, inner: int, device: torch.device) -> Work:
    """SwiGLU of a fused gate and up product."""
    gate_up = _random(rows, 2 * inner, device=device)
    out = torch.full((rows, inner), torch.nan, dtype=gate_up.dtype, device=device)

    def run() -> torch.Tensor:
        return gated_activation(gate_up, "silu", out=out)

    return Work(
        run=run,
        num_bytes=gate_up.nbytes + out.nbytes,
        error=lambda: relative_error(run(), gated_activation_reference(gate_up, "silu")),
        peers={"torch, two kernels": lambda: F.silu(gate_up[:, :inner]) * gate_up[:, inner:]},
    )


def rotation(
    rows: int,
    device: torch.device,
    kv: torch.dtype | None = None,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
) -> Work:
    """Rotation and KV write of a prefill's or a decode step's tokens."""
    qkv = _random(rows, (heads + 2 * kv_heads) * head_dim, device=device)
    pool = (-(-rows // BLOCK_SIZE) + 1, BLOCK_SIZE, kv_heads, head_dim)
    key, value = (torch.zeros(pool, dtype=kv or qkv.dtype, device=device) for _ in range(2))
    scales = {} if kv is None else {n: torch.zeros(pool[:3], device=device) for n in ("key_scale", "value_scale")}
    positions = torch.arange(rows, device=device)
    slots = torch.randperm(pool[0] * BLOCK_SIZE, device=device)[:rows]
    angles = torch.outer(positions.float(), 500_000.0 ** -torch.linspace(0, 1, head_dim // 2, device=device))
    tables = {"cos": angles.cos(), "sin": angles.sin(), **scales}

    def error() -> float:
        parts = [[each.clone() for each in (qkv, key, value)] for _ in range(2)]
        for function, (q, k, v) in zip((rope_kv_write, rope_kv_write_reference), parts, strict=True):
            function(q, positions, slots, k, v, **tables)
        return max(relative_error(got, expected) for got, expected in zip(*parts, strict=True))

    written = 2 * rows * kv_heads * (head_dim * key.dtype.itemsize + (0 if kv is None else 4))
    rotated = rows * (heads + kv_heads) * head_dim * qkv.dtype.itemsize
    return Work(
        run=lambda: rope_kv_write(qkv, positions, slots, key, value, **tables),
        num_bytes=qkv.nbytes + rotated + written + 2 * angles.nbytes + 2 * positions.nbytes,
        error=error,
        tolerance=1e-2 if kv is None else 8e-2,
    )


def product(rows: int, columns: int, inner: int, form: str, device: torch.device) -> Work:
    """A product with 8- or 4-bit weights beside cuBLAS's with bfloat16 ones."""
    weight, x = _random(columns, inner, device=device), _random(rows, inner, device=device)
    matrix = pack_matrix(weight, form)
    packed = matrix.values.nbytes + matrix.scales.nbytes + (0 if matrix.minima is None else matrix.minima.nbytes)
    assert dequantize(matrix).shape == weight.shape
    out = torch.full((rows, columns), torch.nan, dtype=x.dtype, device=device)

    def run() -> torch.Tensor:
        return quantized_gemm(x, matrix, out=out)

    return Work(
        run=run,
        num_bytes=packed + x.nbytes + out.nbytes,
        num_flops=2 * rows * columns * inner,
        error=lambda: relative_error(run(), quantized_gemm_reference(x, matrix)),
        peers={"cuBLAS, bfloat16": lambda: F.linear(x, weight)},
    )


def adapters(
    rows: int, device: torch.device, inner: int = 4096, sizes: tuple[int, ...] = (4096, 1024, 1024), count: int = 8
) -> Work:
    """LoRA of rank 16 on query, key and value, rows of 8 adapters in turn; beside the product that it is added to."""
    stacked = stack_adapters(
        [
            [(_random(16, inner, device=device) / inner**0.5, _random(size, 16, device=device)) for size in sizes]
            for _ in range(count)
        ],
        sizes,
    )
    x, weight = _random(rows, inner, device=device), _random(sum(sizes), inner, device=device)
    out = _random(rows, sum(sizes), device=device)
    of_row = (torch.arange(rows, device=device) % count).int()
    groups = group_rows(of_row, count)

    def error() -> float:
        got, expected = out.clone(), out.clone()
        add_lora(got, x, stacked, groups)
        add_lora_reference(expected, x, stacked, of_row)
        return relative_error(got, expected)

    return Work(
        run=lambda: add_lora(out, x, stacked, groups),
        num_bytes=stacked.a.nbytes + stacked.b.nbytes + x.nbytes + 2 * out.nbytes,
        num_flops=2 * rows * 16 * (len(sizes) * inner + sum(sizes)),
        error=error,
        peers={"cuBLAS, the product it is added to": lambda: F.linear(x, weight)},
    )


def blocks(ids: int, layers: int, device: torch.device, heads: int = 8, head_dim: int = 128) -> Work:
    """Blocks of all layers gathered into one buffer, and scattered back to others."""
    pool = _random(layers, 2, 2 * ids, BLOCK_SIZE, heads, head_dim, device=device)
    staging = torch.zeros(layers, 2, ids, *pool.shape[3:], dtype=pool.dtype, device=device)
    order = torch.randperm(2 * ids, device=device).int()
    taken, given = order[:ids].contiguous(), order[ids:].contiguous()

    def run() -> None:
        gather_blocks(pool, taken, staging)
        scatter_blocks(pool, given, staging)

    def error() -> float:
        expected = pool[:, :, taken.long()].clone()
        run()
        same = torch.equal(staging, expected) and torch.equal(pool[:, :, given.long()], expected)
        return 0.0 if same else 1.0

    return Work(run=run, num_bytes=4 * staging.nbytes, error=error, tolerance=0.0)


def rows_to_draw(rows: int, device: torch.device, *, cuts: bool, temperature: float = 0.8) -> SamplingRows:
    """Requests with a seed each; top_k 50 and top_p 0.9 where there are cuts."""
    numbers = torch.arange(rows, device=device)
    return SamplingRows(
        temperature=torch.full((rows,), temperature, device=device),
        seeds=numbers,
        positions=numbers + 100,
        top_k=torch.full((rows,), 50, dtype=torch.int32, device=device) if cuts else None,
        top_p=torch.full((rows,), 0.9, device=device) if cuts else None,
    )


def _logits(rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab_size, device=device)


def drawing(rows: int, vocab_size: int, device: torch.device, *, cuts: bool) -> Work:
    """One token a row, with or without cuts; at least one pass over the logits."""
    logits, how = _logits(rows, vocab_size, device), rows_to_draw(rows, device, cuts=cuts)
    splits = choose_num_splits(rows, vocab_size, num_processors(device))

    def torchs_own() -> torch.Tensor:
        scaled = logits / 0.8
        if cuts:
            values, ids = scaled.topk(50, dim=-1)
            share = values.softmax(-1)
            share = share.where(share.cumsum(-1) - share < 0.9, 0.0)
            return ids.gather(1, torch.multinomial(share, 1))
        return torch.multinomial(scaled.softmax(-1), 1)

    return Work(
        run=lambda: sample(logits, how, num_splits=splits),
        num_bytes=logits.nbytes,
        peers={"torch: topk and multinomial" if cuts else "torch: softmax and multinomial": torchs_own},
    )


def greedy(rows: int, vocab_size: int, device: torch.device) -> Work:
    """The likeliest token of each row."""
    logits, how = _logits(rows, vocab_size, device), rows_to_draw(rows, device, cuts=False, temperature=0.0)
    splits = choose_num_splits(rows, vocab_size, num_processors(device))

    def run() -> torch.Tensor:
        return draw(logits, how, num_splits=splits)

    def error() -> float:
        return float((run() != logits.argmax(-1)).float().mean())

    return Work(
        run=run,
        num_bytes=logits.nbytes,
        error=error,
        tolerance=0.0,
        peers={"torch: argmax": lambda: logits.argmax(-1)},
    )


def penalties(rows: int, vocab_size: int, device: torch.device) -> Work:
    """Repetition, frequency and presence of every row, in place."""
    logits = _logits(rows, vocab_size, device)
    rules = Rules(
        penalties=torch.tensor([[1.1, 0.1, 0.1]], device=device).repeat(rows, 1),
        counts=torch.randint(0, 4, (rows, vocab_size), dtype=torch.int32, device=device),
        count_slots=torch.arange(rows, dtype=torch.int32, device=device),
    )
    return Work(run=lambda: apply_rules(logits, rules), num_bytes=3 * logits.nbytes)


def logprobs(rows: int, vocab_size: int, device: torch.device) -> Work:
    """Log probability and rank of one token a row."""
    logits = _logits(rows, vocab_size, device)
    tokens = torch.randint(0, vocab_size, (rows,), device=device)

    def error() -> float:
        expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return relative_error(token_logprobs(logits, tokens, 0).logprobs, expected)

    return Work(
        run=lambda: token_logprobs(logits, tokens, 0),
        num_bytes=logits.nbytes,
        error=error,
        tolerance=1e-5,
        peers={"torch: log_softmax": lambda: logits.log_softmax(-1)},
    )


def cases(device: Device) -> list[tuple[str, Callable[[], Work]]]:
    """Every launch by name, most telling first; in small in a dry run."""
    dry, at = device.is_dry, device.torch
    hidden, inner, vocab, many, few = (64, 96, 300, 20, 2) if dry else (4096, 14336, 151_936, 8192, 256)
    small: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32} if dry else {}
    lora: dict[str, Any] = {"inner": 64, "sizes": (32, 16, 16), "count": 2} if dry else {}
    copied = partial(blocks, 3, 2, at, heads=2, head_dim=16) if dry else partial(blocks, 256, 32, at)
    listed: list[tuple[str, Callable[[], Work]]] = [
        (f"rotation and KV write, {many} tokens", partial(rotation, many, at, **small)),
        (f"RMSNorm with residual, {many} rows", partial(norm, many, hidden, at)),
        (f"SwiGLU, {many} rows", partial(activation, many, inner, at)),
        (f"sampling with cuts, {few} x {vocab}", partial(drawing, few, vocab, at, cuts=True)),
        (f"sampling, {few} x {vocab}", partial(drawing, few, vocab, at, cuts=False)),
        (f"greedy, {few} x {vocab}", partial(greedy, few, vocab, at)),
        (f"penalties, {few} x {vocab}", partial(penalties, few, vocab, at)),
        (f"log probabilities, {few} x {vocab}", partial(logprobs, few, vocab, at)),
    ]
    for form in ("int8", "int4"):
        for rows in (1, 3) if dry else (1, 16, 64, 256, 2048):
            made = partial(product, rows, 2 * inner, hidden, form, at)
            listed.append((f"{form} product, {rows} rows x {2 * inner} x {hidden}", made))
    listed += [
        ("block copies, all layers" if dry else "block copies, 256 blocks of 32 layers", copied),
        (f"LoRA, {few} rows of 8 adapters", partial(adapters, few, at, **lora)),
        (f"LoRA, {many} rows of 8 adapters", partial(adapters, many, at, **lora)),
        (f"rotation and KV write, {few} tokens", partial(rotation, few, at, **small)),
        (f"rotation and KV write to int8, {many} tokens", partial(rotation, many, at, kv=torch.int8, **small)),
        (f"rotation and KV write to fp8, {many} tokens", partial(rotation, many, at, kv=torch.float8_e4m3fn, **small)),
        (f"RMSNorm with residual, {few} rows", partial(norm, few, hidden, at)),
        (f"SwiGLU, {few} rows", partial(activation, few, inner, at)),
    ]
    return listed


def speed(run: Run, device: Device) -> None:
    """Each launch, checked and timed."""
    for name, build in run.cases(cases(device)):
        with run.case(name):
            measure(run, device, name, build())
        device.free()
