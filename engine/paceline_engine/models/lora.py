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
from paceline_engine.models.lora_files import AdapterFolder, LoraError

# Fused matrix: the projections whose rows it holds, in order.
_FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """One fused matrix's update: a [rank, in], b [out, rank] with the scale in it."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter: for each layer, the updates of its fused matrices by name. digest: of its files' content."""

    digest: str
    layers: tuple[Mapping[str, LowRank], ...]


# For one layer: fused matrix -> (rows [n] of the batch, update) of each adapter that changes it.
LayerDeltas = Mapping[str, Sequence[tuple[torch.Tensor, LowRank]]]
NO_DELTAS: LayerDeltas = {}


def add_deltas(output: torch.Tensor, x: torch.Tensor, deltas: LayerDeltas, matrix: str) -> torch.Tensor:
    """Add the adapters' updates of `matrix` to its output [tokens, out], in place, for input x [tokens, in]."""
    for rows, update in deltas.get(matrix, ()):
        output.index_add_(0, rows, F.linear(F.linear(x.index_select(0, rows), update.a), update.b))
    return output


class AdapterTable:
    """The adapters of one model by name, at most `max_adapters`, each of rank `max_rank` or less."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, max_adapters: int = 8, max_rank: int = 64) -> None:
        self._config = config
        self._dtype = dtype
        self._max_adapters = max_adapters
        self._max_rank = max_rank
        self._adapters: dict[str, Adapter] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def load(self, name: str, path: Path) -> str:
        """Load the adapter in folder `path`, or replace it; its digest. Raises LoraError, and then nothing changes."""
        if name not in self._adapters and len(self._adapters) >= self._max_adapters:
            raise LoraError(f"{len(self._adapters)} adapters are loaded, the most there may be: unload one")
        adapter = _read(AdapterFolder(path), self._config, self._dtype, self._max_rank)
        self._adapters[name] = adapter
        return adapter.digest

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises LoraError if it isn't loaded."""
        if self._adapters.pop(name, None) is None:
            raise LoraError(f"the adapter {name!r} isn't loaded")

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
            {matrix: [(rows, updates[matrix]) for updates, rows in of_layer if matrix in updates] for matrix in _FUSED}
            for of_layer in (
                [(adapter.layers[layer], rows) for adapter, rows in members] for layer in range(self._config.num_layers)
            )
        ]


def _read(folder: AdapterFolder, config: ModelConfig, dtype: torch.dtype, max_rank: int) -> Adapter:
    """The folder's pairs as fused updates."""
    digest = folder.digest()
    pairs: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    with safe_open(folder.weights_file, framework="pt", device="cpu") as file:
        for entry in folder.tensors:
            if entry.layer >= config.num_layers:
                raise folder.error(f"{entry.name}: the model has {config.num_layers} layers", "it is for another model")
            tensor: torch.Tensor = file.get_tensor(entry.name)
            if not bool(torch.isfinite(tensor).all()):
                raise folder.error(f"{entry.name} holds a value that is not finite", "train it again")
            pairs.setdefault((entry.layer, entry.projection), {})[entry.half] = tensor.float()
    sizes = _sizes(config)
    for (layer, projection), pair in pairs.items():
        _check_pair(folder, f"layer {layer} {projection}", pair, sizes[projection], max_rank)
    return Adapter(
        digest,
        tuple(
            {
                matrix: _fuse(folder, layer, projections, pairs, sizes, dtype)
                for matrix, projections in _FUSED.items()
                if any((layer, projection) in pairs for projection in projections)
            }
            for layer in range(config.num_layers)
        ),
    )


def _sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
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


def _fuse(
    folder: AdapterFolder,
    layer: int,
    projections: Sequence[str],
    pairs: Mapping[tuple[int, str], Mapping[str, torch.Tensor]],
    sizes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
) -> LowRank:
    part = "self_attn" if projections[0] in ("q_proj", "o_proj") else "mlp"
    downs: list[torch.Tensor] = []
    ups: list[torch.Tensor] = []
    for projection in projections:
        pair = pairs.get((layer, projection))
        if pair is None:
            ups.append(torch.zeros(sizes[projection][0], 0))
            continue
        scale = folder.scale(f"model.layers.{layer}.{part}.{projection}", pair["A"].shape[0])
        downs.append(pair["A"])
        ups.append(pair["B"] * scale)
    return LowRank(torch.cat(downs).to(dtype), torch.block_diag(*ups).to(dtype))
