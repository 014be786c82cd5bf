"""vLLM: `vllm serve`. Flags of release 0.33.0. Pure.

`NIM` (nim.py) takes the same flags: its server passes them on to vLLM.
"""

from __future__ import annotations

import json

from paceline_api.names import MODEL_CACHE_DIR
from paceline_api.quantity import parse_quantity
from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import EngineSpec, Runtime, SpeculativeMethod
from paceline_operator.planner.pods import literal
from paceline_operator.planner.runtimes.base import (
    ANY,
    DRAFT_TOKENS,
    HOST,
    PORT,
    Capabilities,
    ForeignRuntime,
    Launch,
    Weights,
    chat_template_file,
    engine_of,
    extra_args,
    flags,
)
from paceline_operator.planner.runtimes.sources import Source, parse_source, source_of

_FOLDER = frozenset({Weights.FOLDER})
FIELDS: dict[str, frozenset[object] | None] = {
    "model.revision": ANY,
    "model.chatTemplate": ANY,
    "engine.maxModelLen": ANY,
    "engine.maxNumSeqs": ANY,
    "engine.maxNumBatchedTokens": ANY,
    "engine.prefillChunkTokens": ANY,
    "engine.blockSize": frozenset({16, 32, 64, 128}),
    "engine.prefixIndex": frozenset({"hash"}),
    "engine.enablePrefixCaching": ANY,
    "engine.gpuMemoryUtilization": ANY,
    "engine.kvCacheMemory": ANY,
    "engine.kvCacheDtype": frozenset({"fp8"}),
    "engine.tensorParallelSize": ANY,
    "engine.speculative.method": frozenset({"ngram", "draft"}),
    "engine.speculative.numTokens": frozenset({str(number) for number in range(1, 33)}),
    "engine.speculative.draftSource": ANY,
}
RESERVED = frozenset(
    {"--model", "--served-model-name", "--host", "--port", "--api-key", "--uds", "--root-path", "--chat-template"}
)


def _launch(service: InferenceService) -> Launch:
    source = source_of(service)
    return Launch(
        command=("vllm", "serve"),
        args=(
            literal(_model(source)),
            *flags({"host": HOST, "port": PORT, "load-format": "runai_streamer" if source.scheme == "s3" else None}),
            *model_flags(service),
            *extra_args(service),
        ),
        env={"HF_HOME": MODEL_CACHE_DIR, "VLLM_CACHE_ROOT": f"{MODEL_CACHE_DIR}/vllm"},
        token_env="VLLM_API_KEY",
    )


def model_flags(service: InferenceService) -> tuple[str, ...]:
    """What the spec asks for, in vLLM's flags."""
    engine, revision = engine_of(service), source_of(service).revision
    memory = engine.kv_cache_memory
    caching = {None: (), True: ("--enable-prefix-caching",), False: ("--no-enable-prefix-caching",)}
    return (
        *flags(
            {
                "served-model-name": literal(service.served_name()),
                "revision": literal(revision) if revision else None,
                "chat-template": chat_template_file(service),
                "max-model-len": engine.max_model_len,
                "max-num-seqs": engine.max_num_seqs,
                "max-num-batched-tokens": engine.max_num_batched_tokens,
                "long-prefill-token-threshold": engine.prefill_chunk_tokens,
                "block-size": engine.block_size,
                "gpu-memory-utilization": engine.gpu_memory_utilization,
                "kv-cache-memory-bytes": int(parse_quantity(memory)) if memory is not None else None,
                "kv-cache-dtype": engine.kv_cache_dtype,
                "tensor-parallel-size": engine.tensor_parallel_size,
                "speculative-config": _speculation(engine),
            }
        ),
        *caching[engine.enable_prefix_caching],
    )


def _speculation(engine: EngineSpec) -> str | None:
    wanted = engine.speculative
    if wanted is None or wanted.method is SpeculativeMethod.NONE:
        return None
    tokens = int(wanted.num_tokens) if wanted.num_tokens else DRAFT_TOKENS
    config: dict[str, object] = {"num_speculative_tokens": tokens}
    if wanted.method is SpeculativeMethod.NGRAM:
        config |= {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    else:
        draft = parse_source(wanted.draft_source or "")
        config |= {"method": "draft_model", "model": _model(draft)}
        if draft.revision:
            config["revision"] = draft.revision
    return literal(json.dumps(config, separators=(",", ":")))


def _model(source: Source) -> str:
    if source.scheme == "hf":
        return source.repository
    return f"s3://{source.path}" if source.scheme == "s3" else source.local_path


VLLM = ForeignRuntime(
    name=Runtime.VLLM,
    image="vllm/vllm-openai:v0.33.0",
    release="0.33.0",
    documentation="https://docs.vllm.ai/en/stable/cli/serve/",
    program="vllm",
    capabilities=Capabilities(sources={"hf": _FOLDER, "pvc": _FOLDER, "file": _FOLDER, "s3": _FOLDER}, fields=FIELDS),
    reserved=RESERVED,
    launch=_launch,
    notes=(
        "s3:// needs the Run:ai streamer that the official image has.",
        f"speculative without numTokens guesses {DRAFT_TOKENS} tokens; auto is Paceline's only.",
    ),
)
