"""LoRA adapters beside the model: loaded by name, several in one batch.

A projection's output gets B(A x) * scale added for the rows of the batch that belong to the adapter. Work is grouped by
adapter over the flat batch, never by sequence: an adapter costs two small products a projection, whatever the number
of its sequences. Rows of the base model are not touched: their values are the same bits with and without adapters
beside them. Adapters for query, key and value (gate and up) follow the fused matrices: their A stand one below the
other, their B on the diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open

from paceline_engine.models.config import ModelConfig
from paceline_engine.models.lora_files import PROJECTIONS, AdapterFolder, LoraError

# Fused matrix: the projections whose rows it holds, in order.
FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """One matrix's update: a [rank, in], b [out, rank] with the scale in it."""

    a: torch.Tensor
    b: torch.Tensor


# For each layer, the updates of its matrices by name.
LayerUpdates = tuple[Mapping[str, LowRank], ...]
# For one layer: fused matrix -> (rows [n] of the batch, update) of each adapter that changes it.
LayerDeltas = Mapping[str, Sequence[tuple[torch.Tensor, LowRank]]]
NO_DELTAS: LayerDeltas = {}


def add_deltas(output: torch.Tensor, x: torch.Tensor, deltas: LayerDeltas, matrix: str) -> torch.Tensor:
    """Add the adapters' updates of `matrix` to its output [tokens, out], in place, for input x [tokens, in]."""
    for rows, update in deltas.get(matrix, ()):
        output.index_add_(0, rows, F.linear(F.linear(x.index_select(0, rows), update.a), update.b))
    return output


class NamedAdapters:
    """The adapters of one model by name, at most `max_adapters`, each of rank `max_rank` or less.

    What is kept of one is each projection's update, in `dtype` and in host memory; `_kept` may make it another thing.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, max_adapters: int = 8, max_rank: int = 64) -> None:
        self._config = config
        self._dtype = dtype
        self._max_adapters = max_adapters
        self._max_rank = max_rank
        self._adapters: dict[str, LayerUpdates] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def load(self, name: str, path: Path) -> str:
        """Load the adapter in folder `path`, or replace it; its digest. Raises LoraError, and then nothing changes."""
        if name not in self._adapters and len(self._adapters) >= self._max_adapters:
            raise LoraError(f"{len(self._adapters)} adapters are loaded, the most there may be: unload one")
        folder = AdapterFolder(path)
        digest = folder.digest()
        self._adapters[name] = self._kept(_read(folder, self._config, self._max_rank))
        return digest

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises LoraError if it isn't loaded."""
        if self._adapters.pop(name, None) is None:
            raise LoraError(f"the adapter {name!r} isn't loaded")

    def _kept(self, layers: LayerUpdates) -> LayerUpdates:
        return tuple(
            {name: LowRank(update.a.to(self._dtype), update.b.to(self._dtype)) for name, update in updates.items()}
            for updates in layers
        )


class AdapterTable(NamedAdapters):
    """Adapters whose updates are fused as the decoder's matrices are."""

    def _kept(self, layers: LayerUpdates) -> LayerUpdates:
        sizes = projection_sizes(self._config)
        return tuple(
            {
                matrix: _fuse([updates.get(name) for name in names], [sizes[name][0] for name in names], self._dtype)
                for matrix, names in FUSED.items()
                if any(name in updates for name in names)
            }
            for updates in layers
        )

    def deltas(self, names: Sequence[str | None], counts: Sequence[int]) -> Sequence[LayerDeltas] | None:
        """Each layer's updates for a batch whose shares of counts[i] rows belong to names[i]; None if all are base.

        A name that isn't loaded counts as base: the runner fails its request.
        """
        present = sorted({name for name in names if name is not None and name in self._adapters})
        if not present:
            return None
        of_row = torch.repeat_interleave(
            torch.tensor([present.index(name) if name in present else -1 for name in names]),
            torch.tensor(counts),
        )
        members = [(self._adapters[name], (of_row == index).nonzero()[:, 0]) for index, name in enumerate(present)]
        return [
            {matrix: [(rows, updates[matrix]) for updates, rows in of_layer if matrix in updates] for matrix in FUSED}
            for of_layer in (
                [(layers[layer], rows) for layers, rows in members] for layer in range(self._config.num_layers)
            )
        ]


def _read(folder: AdapterFolder, config: ModelConfig, max_rank: int) -> LayerUpdates:
    """The folder's pairs in float32, by projection."""
    pairs: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    with safe_open(folder.weights_file, framework="pt", device="cpu") as file:
        for entry in folder.tensors:
            if entry.layer >= config.num_layers:
                raise folder.error(f"{entry.name}: the model has {config.num_layers} layers", "it is for another model")
            tensor: torch.Tensor = file.get_tensor(entry.name)
            if not bool(torch.isfinite(tensor).all()):
                raise folder.error(f"{entry.name} holds a value that is not finite", "train it again")
            pairs.setdefault((entry.layer, entry.projection), {})[entry.half] = tensor.float()
    sizes = projection_sizes(config)
    layers: tuple[dict[str, LowRank], ...] = tuple({} for _ in range(config.num_layers))
    for (layer, projection), pair in pairs.items():
        _check_pair(folder, f"layer {layer} {projection}", pair, sizes[projection], max_rank)
        part = next(part for part, names in PROJECTIONS.items() if projection in names)
        scale = folder.scale(f"model.layers.{layer}.{part}.{projection}", pair["A"].shape[0])
        layers[layer][projection] = LowRank(pair["A"], pair["B"] * scale)
    return layers


def projection_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of each projection."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def _check_pair(
    folder: AdapterFolder, where: str, pair: Mapping[str, torch.Tensor], size: tuple[int, int], max_rank: int
) -> None:
    """Both halves are there, and fit the model and each other."""
    if set(pair) != {"A", "B"}:
        raise folder.error(f"{where} has only lora_{next(iter(pair))}", "save the adapter again")
    rank = pair["A"].shape[0]
    if rank > max_rank:
        raise folder.error(f"{where} has rank {rank}, over the {max_rank} that are allowed", "raise --max-lora-rank")
    got = (tuple(pair["B"].shape), tuple(pair["A"].shape))
    wanted = ((size[0], rank), (rank, size[1]))
    if got != wanted:
        raise folder.error(f"{where} has shapes {got}, the model implies {wanted}", "it is for another model")


def _fuse(updates: Sequence[LowRank | None], sizes: Sequence[int], dtype: torch.dtype) -> LowRank:
    """Updates of neighbouring projections, each with so many outputs, as one; None changes nothing."""
    downs = [update.a for update in updates if update is not None]
    ups = [torch.zeros(size, 0) if update is None else update.b for update, size in zip(updates, sizes, strict=True)]
    return LowRank(torch.cat(downs).to(dtype), torch.block_diag(*ups).to(dtype))
