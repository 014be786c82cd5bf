"""Which decoder a CPU engine runs: the compiled one, or torch's where that can't be had or can't compute the model.

`--cpu-kernels auto` falls back and says so once; `native` and `torch` insist.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from paceline_engine.backends.cpu_model import TorchModel
from paceline_engine.backends.cpu_native import NativeDecoder, unsupported
from paceline_engine.config import EngineConfig
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.decoder import Decoder
from paceline_engine.models.loader import default_cache_dir
from paceline_engine.models.lora import AdapterTable
from paceline_engine.native.build import NativeBuildError, ensure_library
from paceline_engine.native.library import load_library

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

logger = logging.getLogger(__name__)


def create_decoder(
    config: EngineConfig, model: ModelConfig, weight_files: Sequence[Path], *, max_model_len: int, threads: int
) -> TorchModel | NativeDecoder:
    """The decoder that `config` asks for, loaded. Raises ValueError where it insists on what can't be had."""
    if config.cpu_kernels != "torch":
        try:
            return _native(config, model, weight_files, max_model_len, threads)
        except (NativeBuildError, OSError) as error:
            if config.cpu_kernels == "native":
                raise ValueError(f"--cpu-kernels native: {error}") from error
            _refuse_quantization(config, str(error))
            logger.warning("this engine runs on torch's kernels, which are several times slower: %s", error)
    _refuse_quantization(config, "torch's kernels have no such weights")
    return _torch(config, model, weight_files, max_model_len)


def _torch(
    config: EngineConfig,
    model: ModelConfig,
    weight_files: Sequence[Path],
    max_model_len: int,
    adapters: AdapterTable | None = None,
) -> TorchModel:
    decoder = Decoder(
        model,
        weight_files,
        max_model_len=max_model_len,
        dtype=TORCH_DTYPES[config.compute_dtype],
        max_adapters=config.max_loras,
        max_rank=config.max_lora_rank,
    )
    return TorchModel(decoder, adapters)


def _native(
    config: EngineConfig, model: ModelConfig, weight_files: Sequence[Path], max_model_len: int, threads: int
) -> NativeDecoder:
    reason = unsupported(model)
    if reason is not None:
        raise NativeBuildError(f"the native kernels don't compute {reason} of this model")
    library = load_library(ensure_library(Path(config.native_dir) if config.native_dir else default_cache_dir()))
    # Batches with adapters run on torch's decoder, over the same KV.
    adapters = AdapterTable(
        model, TORCH_DTYPES[config.compute_dtype], max_adapters=config.max_loras, max_rank=config.max_lora_rank
    )
    decoder = NativeDecoder(
        library,
        model,
        weight_files,
        max_model_len=max_model_len,
        weight_format=config.compute_dtype if config.quantization == "none" else config.quantization,
        threads=threads,
        cache=Path(config.model_dir),
        adapters=adapters,
        make_adapted=partial(_torch, config, model, weight_files, max_model_len, adapters),
    )
    logger.info("CPU kernels: %s, %d threads, weights %s", decoder.isa, threads, config.weights_dtype)
    return decoder


def _refuse_quantization(config: EngineConfig, reason: str) -> None:
    if config.quantization != "none":
        raise ValueError(f"--quantization {config.quantization} needs the native CPU kernels: {reason}")
