"""The decoder of `models.decoder` in compiled code: one call a step, embedding to logits.

Same forward pass, same arguments; what it can't compute, `unsupported` names, and torch's decoder takes that model.
Weights are packed once (`packed`), activations are float32 whatever the weights' format. A row's logits don't depend on
the batch that it is in.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from paceline_engine.backends.cpu_model import TorchModel
from paceline_engine.batch import Batch
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.decoder import HiddenRows
from paceline_engine.models.loader import DESCRIPTION
from paceline_engine.models.lora import AdapterTable
from paceline_engine.models.rope import RotaryEmbedding
from paceline_engine.models.weights import WeightFiles
from paceline_engine.native.library import (
    MAX_GROUP,
    BatchStruct,
    LayerStruct,
    ModelStruct,
    chosen_isa,
)
from paceline_engine.native.packed import (
    MATRICES,
    PackedWeights,
    Packer,
    open_or_pack,
    pack_in_memory,
    packed_name,
)
from paceline_engine.paged_kv import PagedKV

VECTORS = (
    "input_norm",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "output_bias",
    "post_norm",
    "gate_up_bias",
    "down_bias",
)

logger = logging.getLogger(__name__)


def unsupported(config: ModelConfig) -> str | None:
    """What of `config` these kernels don't compute, in the user's words; None if they compute it all."""
    reasons = {
        "soft caps": config.attention_softcap is not None or config.logit_softcap is not None,
        "norms after attention and MLP": config.post_norms,
        "scaled embeddings": config.embedding_scale != 1.0,
        f"activation {config.hidden_act}": config.hidden_act != "silu",
        f"over {MAX_GROUP} query heads a KV head": config.num_heads > MAX_GROUP * config.num_kv_heads,
        "odd head sizes": config.head_dim % 2 == 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class NativeDecoder:
    """Packed weights and a pool of threads; a `PagedModel`.

    weight_format: a key of FORMATS. cache: folder for the packed file; None packs into this process's memory.
    make_adapted: makes torch's decoder, which takes the batches that hold LoRA adapters; called with the first of them.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        weight_files: Sequence[Path],
        *,
        max_model_len: int,
        weight_format: str,
        threads: int,
        cache: Path | None = None,
        adapters: AdapterTable | None = None,
        make_adapted: Callable[[], TorchModel] | None = None,
    ) -> None:
        self.config = config
        self._num_layers = config.num_layers
        self._whole = self
        self.adapters = adapters if adapters is not None else AdapterTable(config, torch.float32)
        self._make_adapted = make_adapted
        self._adapted: TorchModel | None = None
        self.isa = chosen_isa(library)
        self._library = library
        # The head decides between close tokens, and is read once a step: 8 bits there cost little and keep quality.
        formats = (weight_format, "int8" if weight_format == "int4" else weight_format)
        weights = WeightFiles(weight_files, torch.bfloat16 if weight_format == "bfloat16" else torch.float32)
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._packed = _packed_weights(library, config, weight_files, formats, threads, cache)
        rotary = RotaryEmbedding(config, max_model_len, torch.float32)
        self._rotary = [rotary.table_of_layer(index) for index in range(config.num_layers)]
        self._layers = (LayerStruct * config.num_layers)(*map(self._layer, range(config.num_layers)))
        model = self._model(integer=weight_format in ("int8", "int4"))
        self._handle = library.paceline_create(ctypes.byref(model), self.isa.encode(), threads)
        if not self._handle:
            raise MemoryError("there is no memory for the CPU kernels' buffers")
        weakref.finalize(self, library.paceline_destroy, self._handle)

    def first_layers(self, count: int) -> NativeDecoder:
        """This decoder without its later layers, sharing everything: a drafter for it."""
        if not 1 <= count <= self.config.num_layers:
            raise ValueError(f"a drafter has 1 to {self.config.num_layers} of the model's layers, not {count}")
        shortened = copy.copy(self)
        shortened._num_layers = count
        return shortened

    def step(
        self, batch: Batch, kv: PagedKV, adapters: Sequence[str | None] = (), states: HiddenRows | None = None
    ) -> torch.Tensor:
        """See `PagedModel.step`."""
        if any(name is not None and name in self.adapters for name in adapters):
            return self._whole._with_adapters().first_layers(self._num_layers).step(batch, kv, adapters, states)
        token_ids, logits_rows = batch.token_ids, batch.logits_rows
        # The kernels index with these unchecked.
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.config.vocab_size:
            raise IndexError(f"a token id is outside the vocabulary of {self.config.vocab_size}")
        logits = torch.empty((logits_rows.shape[0], self.config.vocab_size), dtype=torch.float32)
        arguments = BatchStruct(
            tokens=token_ids.shape[0],
            sequences=batch.block_tables.shape[0],
            logits_rows=logits_rows.shape[0],
            layers=self._num_layers,
            token_ids=token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            sequence_begins=batch.sequence_begins.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            table_stride=batch.block_tables.stride(0),
            logits=logits_rows.data_ptr(),
            out=logits.data_ptr(),
            kv=kv.tensor.data_ptr(),
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            half_kv=int(kv.tensor.dtype == torch.bfloat16),
            states=states.rows.shape[0] if states is not None else 0,
            state_rows=states.rows.data_ptr() if states is not None else None,
            state_out=states.out.data_ptr() if states is not None else None,
        )
        if self._library.paceline_step(self._handle, ctypes.byref(arguments)) != 0:
            raise MemoryError(f"there is no memory for a step of {token_ids.shape[0]} tokens")
        return logits

    def _with_adapters(self) -> TorchModel:
        if self._adapted is None:
            if self._make_adapted is None:
                raise ValueError("the native CPU kernels run no LoRA adapters")
            self._adapted = self._make_adapted()
        return self._adapted

    def _layer(self, index: int) -> LayerStruct:
        addresses = {name: self._packed.address(f"{index}.{name}") for name in (*MATRICES, *VECTORS)}
        rotation = self._rotary[index]
        cosines, sines = (None, None) if rotation is None else (table.data_ptr() for table in rotation)
        window = self.config.attention_layers()[index].window or 0
        formats = {f"{name}_format": self._packed.format(f"{index}.{name}") for name in MATRICES}
        return LayerStruct(**addresses, cosines=cosines, sines=sines, window=window, **formats)

    def _model(self, *, integer: bool) -> ModelStruct:
        config = self.config
        return ModelStruct(
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            head_format=self._packed.format("head"),
            integer=int(integer),
            half_embedding=int(self._embedding.dtype == torch.bfloat16),
            epsilon=config.rms_norm_eps,
            scale=config.attention_layers()[0].scale,
            embedding=self._embedding.data_ptr(),
            norm=self._packed.address("norm"),
            head=self._packed.address("head"),
            layer=self._layers,
        )


def _packed_weights(
    library: ctypes.CDLL,
    config: ModelConfig,
    weight_files: Sequence[Path],
    formats: tuple[str, str],
    threads: int,
    cache: Path | None,
) -> PackedWeights:
    def packer() -> Packer:
        return Packer(library, config, WeightFiles(weight_files, torch.float32), formats, threads)

    # Only a folder of ours takes the file: a user's checkpoint folder stays as it is.
    if cache is not None and (cache / DESCRIPTION).is_file():
        try:
            return open_or_pack(cache / packed_name(config, weight_files, formats), packer)
        except OSError as error:
            logger.warning("packed weights can't be kept in %s (%s); packing into memory", cache, error.strerror)
    return pack_in_memory(packer())
