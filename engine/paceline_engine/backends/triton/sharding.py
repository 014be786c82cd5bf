"""Which part of a model each of several devices holds (Megatron's split, arXiv 1909.08053).

Query, key, value, gate and up projections are cut by rows, whole heads at a time, output and down projections by
columns: a layer's two sums over the devices are all that they say to one another. Embedding and head are cut by rows of
the vocabulary, filled up with zeros to equal parts. Where there are fewer KV heads than devices, neighbours hold the
same one. A rank reads its own part of each tensor and nothing else. Knows no process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from paceline_engine.kernels.quantized_gemm import GROUP
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.lora import projection_sizes
from paceline_engine.models.weights import WeightFiles

_BY_COLUMNS = ("o_proj", "down_proj")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size` equal ones of a model."""

    config: ModelConfig
    rank: int
    size: int

    @property
    def first_token(self) -> int:
        """The token of the first row of the rank's embedding."""
        return self.rank * self.part().vocab_size

    def part(self) -> ModelConfig:
        """A rank's geometry; the vocabulary's rows include the last ranks' padding."""
        config, size = self.config, self.size
        return replace(
            config,
            vocab_size=-(-config.vocab_size // size),
            num_heads=config.num_heads // size,
            num_kv_heads=max(1, config.num_kv_heads // size),
            intermediate_size=config.intermediate_size // size,
        )

    def cut(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int] | None:
        """Where the rank's part, of `shape`, stands in a tensor; None if every rank has all of it.

        That is: the whole tensor's shape, the dimension that is cut, and the part's first place in it.
        """
        if name in _VOCABULARY:
            return (self.config.vocab_size, *shape[1:]), 0, self.first_token
        projection, kind = name.split(".")[-2:]
        by_columns = projection in _BY_COLUMNS
        sizes = projection_sizes(self.config)
        if projection not in sizes or (by_columns and kind == "bias"):
            return None
        whole, dimension = sizes[projection][: len(shape)], int(by_columns)
        parts = whole[dimension] // shape[dimension]
        # With fewer parts than ranks, neighbours share one.
        return whole, dimension, self.rank * parts // self.size * shape[dimension]


def check_size(config: ModelConfig, size: int, quantization: str) -> None:
    """Raises ValueError, one line, if the model can't be cut in so many parts."""
    misfit = _misfit(config, size, quantization)
    if misfit is not None:
        fitting = [str(n) for n in range(1, config.num_heads + 1) if _misfit(config, n, quantization) is None]
        raise ValueError(f"--tensor-parallel-size {size}: {misfit}: use {' or '.join(fitting)}")


def _misfit(config: ModelConfig, size: int, quantization: str) -> str | None:
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    if heads % size:
        return f"the model's {heads} query heads can't be divided by it"
    if kv_heads % size and size % kv_heads:
        return f"the model's {kv_heads} KV heads can't be divided by it, nor it by them"
    if inner % size:
        return f"the MLP's {inner} columns can't be divided by it"
    if quantization != "none" and (heads // size * config.head_dim % GROUP or inner // size % GROUP):
        return f"groups of {GROUP} {quantization} weights would straddle the parts"
    return None


class RankWeights(WeightFiles):
    """One rank's part of each tensor of a checkpoint, asked for in the part's shape."""

    def __init__(self, files: Sequence[Path], dtype: torch.dtype, shard: Shard) -> None:
        super().__init__(files, dtype)
        self._shard = shard

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if self._shard.rank > 0 and name.endswith(tuple(f".{projection}.bias" for projection in _BY_COLUMNS)):
            # Ranks' outputs are summed: one of them brings the bias.
            return torch.zeros(shape)
        cut = self._shard.cut(name, shape)
        if cut is None:
            return super()._read(name, shape)
        whole, dimension, begin = cut
        length = whole[dimension]
        part = self._read_part(name, whole, dimension, min(begin, length), min(begin + shape[dimension], length))
        missing = shape[0] - part.shape[0]
        return F.pad(part, (0, 0, 0, missing)) if missing else part
