"""Tensor parallelism: what the ranks of one model say to one another (Megatron, arXiv 1909.08053).

NCCL between GPUs, gloo on the CPU. Every rank makes the same calls in the same order; all of them have the same hidden
states and logits. Collectives are queued on the device like kernels, and can be captured in a graph with them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

from paceline_engine.backends.triton.sharding import Shard
from paceline_engine.models.config import ModelConfig


class TensorParallel:
    """This process's rank among `size` others in `group`; None is all processes."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        # Around each collective of a step, to time it.
        self.span: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def connect(
        cls, rank: int, size: int, *, address: str, device: torch.device, timeout: timedelta = timedelta(minutes=5)
    ) -> TensorParallel:
        """Meet the other ranks at `address`, a URL as torch.distributed takes it (tcp://HOST:PORT, file:///PATH).

        Raises RuntimeError if they don't all come within `timeout`, which also bounds each collective.
        """
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=address,
            rank=rank,
            world_size=size,
            timeout=timeout,
            # Connected at once: a graph can't be captured while connections are made.
            device_id=device if on_gpu else None,
        )
        return cls(rank, size)

    def close(self) -> None:
        """Leave the group of `connect`."""
        dist.destroy_process_group()

    def shard(self, config: ModelConfig) -> Shard:
        """This rank's part of a model."""
        return Shard(config, self.rank, self.size)

    def kv_heads_per_rank(self, config: ModelConfig) -> int:
        """KV heads in this rank's pool."""
        return self.shard(config).part().num_kv_heads

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, in place."""
        with self.span():
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' x [rows, n] side by side: [rows, size * n]."""
        gathered = x.new_empty((self.size * x.shape[0], x.shape[1]))
        with self.span():
            dist.all_gather_into_tensor(gathered, x.contiguous(), group=self._group)
        return gathered.view(self.size, *x.shape).movedim(0, 1).flatten(1)

    def embed(self, token_ids: torch.Tensor, rows: torch.Tensor, first_token: int) -> torch.Tensor:
        """Embeddings [tokens, hidden], of which this rank has `rows` [n, hidden] from `first_token` on."""
        places = token_ids - first_token
        elsewhere = (places < 0) | (places >= rows.shape[0])
        embedded = F.embedding(places.masked_fill(elsewhere, 0), rows)
        return self.all_reduce(embedded.masked_fill_(elsewhere[:, None], 0.0))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, in place."""
        dist.broadcast(x, src=0, group=self._group)
        return x

    def smallest(self, number: int) -> int:
        """The least of the ranks' numbers; waited for."""
        on_gpu = dist.get_backend(self._group) == "nccl"
        least = torch.tensor([number], dtype=torch.int64, device="cuda" if on_gpu else "cpu")
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        return int(least)
