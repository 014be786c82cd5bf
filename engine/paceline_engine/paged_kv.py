"""The block pool's memory, on any device."""

from __future__ import annotations

import torch

from paceline_engine.models.config import ModelConfig


class PagedKV:
    """One tensor [layers, 2 (key, value), blocks, block_size, kv_heads, head_dim].

    scales: of 8-bit KV, float32 [layers, 2, blocks, block_size, kv_heads]; None of wider types. num_kv_heads: of this
    device, where a model's are spread over several; None is all.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        device: torch.device | str = "cpu",
        num_kv_heads: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = config.attention_layers()
        kv_heads = config.num_kv_heads if num_kv_heads is None else num_kv_heads
        shape = (config.num_layers, 2, num_blocks, block_size, kv_heads)
        self.tensor = torch.zeros((*shape, config.head_dim), dtype=dtype, device=device)
        self.scales = torch.zeros(shape, dtype=torch.float32, device=device) if dtype.itemsize == 1 else None
        self._slots = self.tensor.view(config.num_layers, 2, num_blocks * block_size, -1)

    def release(self) -> None:
        """Give the memory back; nobody may use it before `allocate`."""
        for tensor in self._memory():
            tensor.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Have the memory again, perhaps elsewhere, with zeros in it."""
        for tensor in self._memory():
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.zero_()

    def _memory(self) -> list[torch.Tensor]:
        return [self.tensor] if self.scales is None else [self.tensor, self.scales]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] at flat slots [tokens]."""
        self._slots[layer, 0].index_copy_(0, slots, key.flatten(1))
        self._slots[layer, 1].index_copy_(0, slots, value.flatten(1))

    def gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of blocks [n], each a copy [n * block_size, kv_heads, head_dim]."""
        key, value = self.tensor[layer]
        return key.index_select(0, block_ids).flatten(0, 1), value.index_select(0, block_ids).flatten(0, 1)
