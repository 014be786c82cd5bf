"""Who drafts on the device: a model of its own, or the target with fewer layers or with weights of fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from paceline_engine.backends.cpu_drafting import check_draft_model
from paceline_engine.backends.triton.decoder import TritonDecoder
from paceline_engine.backends.triton.model import TritonModel
from paceline_engine.backends.triton.parallel import TensorParallel
from paceline_engine.config import EngineConfig
from paceline_engine.drafting import DraftModel
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.loader import load_model_dir
from paceline_engine.paged_kv import PagedKV
from paceline_engine.records import replace

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def load_decoder(
    config: EngineConfig,
    model: ModelConfig,
    weight_files: Sequence[Path],
    *,
    device: torch.device,
    max_model_len: int,
    parallel: TensorParallel | None = None,
) -> TritonDecoder:
    """The decoder that `config` asks for, on the device; this rank's part of it where it is spread."""
    return TritonDecoder(
        model,
        weight_files,
        device=device,
        max_model_len=max_model_len,
        dtype=TORCH_DTYPES[config.compute_dtype],
        quantization=config.quantization,
        parallel=parallel,
        max_adapters=config.max_loras,
        max_rank=config.max_lora_rank,
    )


class Drafts:
    """A drafter's decoder, loaded before KV is sized, and what it needs of KV then."""

    def __init__(
        self,
        config: EngineConfig,
        target: TritonDecoder,
        weight_files: Sequence[Path],
        *,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self._device = device
        self._own: ModelConfig | None = None
        loading = {"device": device, "max_model_len": max_model_len}
        if config.speculative_method == "draft":
            loaded = load_model_dir(config.speculative_model)
            check_draft_model(loaded.config, target.config, max_model_len)
            quantization = "none" if config.speculative_quantization == "auto" else config.speculative_quantization
            own = replace(config, quantization=quantization)
            self._own = loaded.config
            self._decoder = load_decoder(own, loaded.config, loaded.files, **loading)
            return
        layers, quantization = config.speculative_layers, config.speculative_quantization
        if quantization == "auto":
            quantization = "int4" if layers is None and config.quantization != "int4" else "none"
        self._decoder = target
        if quantization != "none":
            cheap = replace(config, quantization=quantization)
            self._decoder = load_decoder(cheap, target.config, weight_files, **loading)
        elif layers is None:
            layers = max(1, 2 * target.config.num_layers // 3)
        if layers is not None:
            self._decoder = self._decoder.first_layers(layers)

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """What a token of a draft model of its own takes beside the target's."""
        return 0 if self._own is None else self._own.kv_bytes_per_token(bytes_per_element)

    def over(self, kv: PagedKV) -> DraftModel:
        """The draft model over the target's KV, scratch blocks included, or over as much of its own."""
        model = TritonModel(self._decoder, self._device)
        if self._own is None:
            return DraftModel(decoder=model, kv=kv, shares_kv=True)
        own = PagedKV(self._own, kv.num_blocks, kv.block_size, kv.tensor.dtype, device=self._device)
        return DraftModel(decoder=model, kv=own, shares_kv=False)
