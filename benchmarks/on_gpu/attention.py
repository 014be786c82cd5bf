"""Attention at serving shapes: share of the limit, beside torch's own, and the same over several tilings.

Each tiling is checked before it is timed. The fastest of each shape is reported by name, so that one run says what
`choose_tiling` and `choose_num_segments` should choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from on_gpu.device import Device, num_processors
from on_gpu.run import Run
from on_gpu.work import Work, check, measure, relative_error
from report import Row

from paceline_engine.kernels.attention import (
    AttentionTiling,
    choose_num_segments,
    choose_tiling,
    paged_attention,
    paged_attention_reference,
)
from paceline_engine.kernels.rope_kv_write import quantize_vectors

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """sequences: (queries, context) of each. kv: 8-bit type of the pool, None is bfloat16."""

    sequences: Sequence[tuple[int, int]]
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    window: int | None = None
    softcap: float | None = None
    kv: torch.dtype | None = None


DECODES = Shape(sequences=[(1, 4096)] * 64)
PREFILL = Shape(sequences=[(8192, 8192)])
SHAPES = {
    "decode, 64 x 4k": DECODES,
    "prefill, 8k": PREFILL,
    "decode, 64 x 4k, fp8 KV": replace(DECODES, kv=torch.float8_e4m3fn),
    "decode, 64 x 4k, int8 KV": replace(DECODES, kv=torch.int8),
    "decode, 1 x 32k": Shape(sequences=[(1, 32768)]),
    "decode, 256 x 1k, Qwen3-0.6B heads": Shape(sequences=[(1, 1024)] * 256, heads=(16, 8)),
    "verification of 4, 64 x 4k": Shape(sequences=[(5, 4096)] * 64),
    "prefill, 4 x 2k": Shape(sequences=[(2048, 2048)] * 4),
    "prefill, 8k in a window of 4k": Shape(sequences=[(8192, 8192)], window=4096),
    "prefill, 4k, heads of 256, soft cap": Shape(sequences=[(4096, 4096)], heads=(8, 4), head_dim=256, softcap=50.0),
    "chunk of 2k beside 63 decodes": Shape(sequences=[(1, 4096)] * 63 + [(2048, 4096)]),
}
TARGETS = {"decode, 64 x 4k": "decode attention", "prefill, 8k": "prefill attention"}


def shrunk(shape: Shape) -> Shape:
    """The same in small, for a dry run."""
    few = [(min(queries, 9), min(context, 24)) for queries, context in shape.sequences[:1] + shape.sequences[-1:]]
    return replace(
        shape, sequences=few, heads=(4, 4 * shape.heads[1] // shape.heads[0]), head_dim=shape.head_dim // 4, window=None
    )


class Batch:
    """Random queries and pool of a shape; blocks in random order, as after a while of serving."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        self.shape = shape
        num_heads, num_kv_heads = shape.heads
        blocks = [-(-context // BLOCK_SIZE) for _, context in shape.sequences]
        ids = torch.randperm(sum(blocks), device=device).int()
        tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32, device=device)
        for index, (row, count) in enumerate(zip(tables, blocks, strict=True)):
            row[:count] = ids[sum(blocks[:index]) :][:count]
        pool = (sum(blocks), BLOCK_SIZE, num_kv_heads, shape.head_dim)
        self.key, self.value = (torch.randn(pool, dtype=torch.bfloat16, device=device) for _ in range(2))
        scales: dict[str, torch.Tensor] = {}
        if shape.kv is not None:
            self.key, scales["key_scale"] = quantize_vectors(self.key, shape.kv)
            self.value, scales["value_scale"] = quantize_vectors(self.value, shape.kv)
        counts = torch.tensor([0] + [queries for queries, _ in shape.sequences], device=device)
        self.query = torch.randn(int(counts.sum()), num_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
        self.arguments: dict[str, Any] = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "block_tables": tables,
            "begins": counts.cumsum(0).int(),
            "context_lens": torch.tensor([context for _, context in shape.sequences], device=device).int(),
            "scale": shape.head_dim**-0.5,
            "window": shape.window,
            "softcap": shape.softcap,
            **scales,
        }
        self.longest = max(queries for queries, _ in shape.sequences)
        self.expected = paged_attention_reference(**self.arguments)

    def work(self, tiling: AttentionTiling, num_segments: int) -> Work:
        """One launch with this tiling."""
        out = torch.full_like(self.query, torch.nan)

        def run() -> torch.Tensor:
            return paged_attention(
                **self.arguments, max_query_len=self.longest, num_segments=num_segments, tiling=tiling, out=out
            )

        return Work(
            run=run,
            num_bytes=self.num_bytes(),
            num_flops=self.num_flops(),
            error=lambda: relative_error(run(), self.expected),
        )

    def seen_pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        window = self.shape.window
        return sum(
            sum(min(end, window or end) for end in range(context - queries + 1, context + 1))
            for queries, context in self.shape.sequences
        )

    def num_flops(self) -> int:
        """Of both products, over what is visible alone."""
        return 4 * self.shape.heads[0] * self.shape.head_dim * self.seen_pairs()

    def num_bytes(self) -> int:
        """Each query and result once, and each sequence's visible keys and values once."""
        window = self.shape.window
        keys = sum(min(context, (window or context) + queries) for queries, context in self.shape.sequences)
        a_vector = self.shape.head_dim * self.key.dtype.itemsize + (0 if self.shape.kv is None else 4)
        return 2 * keys * self.shape.heads[1] * a_vector + 2 * self.query.nbytes


def torchs_own(shape: Shape, device: torch.device) -> Callable[[], object] | None:
    """torch's attention over KV that lies in a row, not in blocks, where all sequences are alike; None elsewhere."""
    queries, context = shape.sequences[0]
    plain = shape.window is None and shape.softcap is None and shape.kv is None
    if not plain or any(each != (queries, context) for each in shape.sequences) or queries not in (1, context):
        return None
    count, (heads, kv_heads) = len(shape.sequences), shape.heads
    query = torch.randn(count, heads, queries, shape.head_dim, dtype=torch.bfloat16, device=device)
    key, value = (
        torch.randn(count, kv_heads, context, shape.head_dim, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=queries > 1, enable_gqa=True)


def segments_of(shape: Shape, device: torch.device) -> int:
    """As the engine chooses for steps without long shares."""
    if max(queries for queries, _ in shape.sequences) > 1:
        return 1
    longest = max(context for _, context in shape.sequences)
    return choose_num_segments(len(shape.sequences), shape.heads[1], longest, num_processors(device))


def speed(run: Run, device: Device) -> None:
    """Every shape with the tiling that the engine chooses."""
    shapes = SHAPES.items()
    for name, full in run.cases(shapes):
        with run.case(name):
            shape = shrunk(full) if device.is_dry else full
            batch = Batch(shape, device.torch)
            tiling = choose_tiling(batch.longest, shape.heads[0] // shape.heads[1], shape.head_dim)
            work = batch.work(tiling, segments_of(shape, device.torch))
            peer = torchs_own(shape, device.torch)
            if peer is not None:
                work = replace(work, peers={"torch, KV in a row": peer})
            share = measure(run, device, f"attention, {name}", work)
            if share is not None and name in TARGETS:
                run.measured[TARGETS[name]] = share
        device.free()


def decode_tilings() -> list[tuple[AttentionTiling, int]]:
    """(tiling, segments) worth trying for decodes, where what counts is how many bytes are in flight."""
    sizes = [(32, 4, 2), (32, 4, 3), (32, 2, 3), (64, 4, 2), (64, 4, 3), (64, 2, 3), (64, 8, 3)]
    sizes += [(128, 4, 2), (128, 4, 3), (128, 8, 3)]
    tilings = [AttentionTiling(block_m=16, tile=t, num_warps=w, num_stages=s) for t, w, s in sizes]
    return [(tiling, 1) for tiling in tilings] + [(tilings[4], segments) for segments in (2, 4, 8)]


def prefill_tilings() -> list[tuple[AttentionTiling, int]]:
    """(tiling, segments) worth trying for long prefills: the warps of a program and what they hold in registers."""
    sizes = [(64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 8, 3), (128, 64, 8, 2)]
    sizes += [(128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3)]
    return [(AttentionTiling(block_m=m, tile=t, num_warps=w, num_stages=s), 1) for m, t, w, s in sizes]


def tune(run: Run, device: Device) -> None:
    """The two target shapes over many tilings, all reported."""
    for name, shape, tilings in (
        ("decode, 64 x 4k", DECODES, decode_tilings()),
        ("prefill, 8k", PREFILL, prefill_tilings()),
    ):
        batch = Batch(shrunk(shape) if device.is_dry else shape, device.torch)
        kept = tilings[:2] if device.is_dry else tilings
        times: dict[str, float] = {}
        for label, (tiling, segments) in run.cases((_label(name, *each), each) for each in kept):
            with run.case(label):
                work = batch.work(tiling, segments)
                check(work)
                times[label] = device.time(work.run, seconds=0.1).seconds
                run.add(Row(label, "time", "us", round(times[label] * 1e6, 2)))
        if times:
            best = min(times, key=times.__getitem__)
            run.add(Row(f"fastest of {len(times)}: {best}", "time", "us", round(times[best] * 1e6, 2)))
        del batch
        device.free()


def _label(name: str, tiling: AttentionTiling, segments: int) -> str:
    return (
        f"tiling of {name}: block_m {tiling.block_m}, tile {tiling.tile}, {tiling.num_warps} warps, "
        f"{tiling.num_stages} stages, {segments} segments"
    )
