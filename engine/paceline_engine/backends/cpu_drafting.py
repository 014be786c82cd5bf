"""Who drafts on the CPU: a model of its own, or the target with fewer layers or with weights of fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline_engine.backends.cpu_decoder import create_decoder
from paceline_engine.backends.cpu_model import TorchModel
from paceline_engine.backends.cpu_native import NativeDecoder
from paceline_engine.config import EngineConfig
from paceline_engine.drafting import DraftModel
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.loader import load_model_dir
from paceline_engine.paged_kv import PagedKV
from paceline_engine.records import replace


def make_draft_model(
    config: EngineConfig,
    target: TorchModel | NativeDecoder,
    kv: PagedKV,
    weight_files: Sequence[Path],
    *,
    max_model_len: int,
    threads: int,
) -> DraftModel | None:
    """What `config` has draft for `target`, loaded; None if nothing does. kv: the target's, scratch blocks included.

    Raises ValueError where that can't work.
    """
    if config.speculative_method == "selfDraft":
        decoder, layers, quantization = target, config.speculative_layers, config.speculative_quantization
        if quantization == "auto":
            fewer_bits = layers is None and config.quantization != "int4" and isinstance(target, NativeDecoder)
            quantization = "int4" if fewer_bits else "none"
        if quantization != "none":
            cheap = replace(config, quantization=quantization)
            decoder = create_decoder(cheap, target.config, weight_files, max_model_len=max_model_len, threads=threads)
        elif layers is None:
            layers = max(1, 2 * target.config.num_layers // 3)
        return DraftModel(decoder=decoder if layers is None else decoder.first_layers(layers), kv=kv, shares_kv=True)
    if config.speculative_method != "draft":
        return None
    loaded = load_model_dir(config.speculative_model)
    check_draft_model(loaded.config, target.config, max_model_len)
    quantization = "none" if config.speculative_quantization == "auto" else config.speculative_quantization
    own = replace(config, model_dir=config.speculative_model, quantization=quantization)
    return DraftModel(
        decoder=create_decoder(own, loaded.config, loaded.files, max_model_len=max_model_len, threads=threads),
        kv=PagedKV(loaded.config, kv.num_blocks, kv.block_size, kv.tensor.dtype),
        shares_kv=False,
    )


def check_draft_model(drafter: ModelConfig, target: ModelConfig, max_model_len: int) -> None:
    if drafter.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model has {drafter.vocab_size} tokens and the model {target.vocab_size}; "
            "speculative-model must have the same vocabulary"
        )
    if drafter.max_position_embeddings < max_model_len:
        raise ValueError(
            f"the draft model has {drafter.max_position_embeddings} positions, fewer than max-model-len "
            f"{max_model_len}; lower that or choose another speculative-model"
        )
