"""LoRA adapters on the device, all of them stacked for each matrix, so that one batch may hold rows of several.

A load or unload makes the stacks anew, as large as the adapters that there are: a captured graph must not use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from paceline_engine.backends.triton.staging import upload
from paceline_engine.kernels.lora import RowGroups, StackedAdapters, group_rows, stack_adapters
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.lora import FUSED, LowRank, NamedAdapters, projection_sizes
from paceline_engine.models.lora_files import LoraError

# One layer's stacks by fused matrix; a matrix that no adapter changes is missing.
LayerStacks = Mapping[str, StackedAdapters]


class DeviceAdapters(NamedAdapters):
    """Adapters by name, and their stacks. spread: the model is, over several devices, and then it has none."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_adapters: int,
        max_rank: int,
        spread: bool = False,
    ) -> None:
        super().__init__(config, dtype, max_adapters=max_adapters, max_rank=max_rank)
        self._device = device
        self._spread = spread
        self._sizes = {name: size[0] for name, size in projection_sizes(config).items()}
        self._order: dict[str, int] = {}
        self._stacks: tuple[LayerStacks, ...] = ()

    def load(self, name: str, path: Path) -> str:
        """As in `NamedAdapters`, and to the device."""
        if self._spread:
            raise LoraError("LoRA adapters with tensor parallelism are not built: use --tensor-parallel-size 1")
        before = dict(self._adapters)
        digest = super().load(name, path)
        try:
            self._stack()
        except torch.OutOfMemoryError as error:
            self._adapters = before
            self._stack()
            raise LoraError(
                f"the device has no memory for the adapter {name!r}: unload one, or lower --gpu-memory-utilization"
            ) from error
        return digest

    def unload(self, name: str) -> None:
        """As in `NamedAdapters`."""
        super().unload(name)
        self._stack()

    def groups(self, names: Sequence[str | None], counts: Sequence[int]) -> RowGroups | None:
        """Groups of a batch whose shares of counts[i] rows belong to names[i]; None if all are base.

        A name that isn't loaded counts as base: the runner fails its request. They hold until the adapters change.
        """
        indices = [-1 if name is None else self._order.get(name, -1) for name in names]
        if max(indices, default=-1) < 0:
            return None
        of_row = torch.repeat_interleave(torch.tensor(indices), torch.tensor(counts))
        groups = group_rows(of_row, len(self._order))
        return RowGroups(**upload({"rows": groups.rows.numpy(), "begins": groups.begins.numpy()}, self._device))

    def of_layer(self, layer: int) -> LayerStacks:
        """The layer's stacks; there must be an adapter."""
        return self._stacks[layer]

    def _stack(self) -> None:
        self._order = {name: index for index, name in enumerate(self._adapters)}
        # The old ones must not stand beside the new ones.
        self._stacks = ()
        self._stacks = tuple(self._stacks_of(layer) for layer in range(self._config.num_layers))

    def _stacks_of(self, layer: int) -> LayerStacks:
        adapters = [updates[layer] for updates in self._adapters.values()]
        return {
            matrix: stack_adapters(
                [[self._pair(updates, name) for name in names] for updates in adapters],
                [self._sizes[name] for name in names],
            )
            for matrix, names in FUSED.items()
            if any(name in updates for updates in adapters for name in names)
        }

    def _pair(self, updates: Mapping[str, LowRank], name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        update = updates.get(name)
        return None if update is None else (update.a.to(self._device), update.b.to(self._device))
