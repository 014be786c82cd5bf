"""SGLang: `python3 -m sglang.launch_server`. Flags of release 0.5.23. Pure."""

from __future__ import annotations

from paceline_api.names import MODEL_CACHE_DIR
from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import EngineSpec, KvCacheDtype, Runtime, SpeculativeMethod
from paceline_operator.planner.pods import literal
from paceline_operator.planner.runtimes.base import (
    ANY,
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
# Its health check generates a token, and waits behind the step that runs.
_PROBE_TIMEOUT_S = 20


def _launch(service: InferenceService) -> Launch:
    source, engine = source_of(service), engine_of(service)
    return Launch(
        command=("python3", "-m", "sglang.launch_server"),
        args=(
            *flags(
                {
                    "model-path": literal(_model(source)),
                    "revision": literal(source.revision) if source.revision else None,
                    "served-model-name": literal(service.served_name()),
                    "host": HOST,
                    "port": PORT,
                    "chat-template": chat_template_file(service),
                    "context-length": engine.max_model_len,
                    "max-running-requests": engine.max_num_seqs,
                    "chunked-prefill-size": engine.max_num_batched_tokens,
                    "page-size": engine.block_size,
                    "mem-fraction-static": engine.gpu_memory_utilization,
                    "kv-cache-dtype": "fp8_e4m3" if engine.kv_cache_dtype is KvCacheDtype.FP8 else None,
                    "tensor-parallel-size": engine.tensor_parallel_size,
                }
            ),
            "--enable-metrics",
            *(("--disable-radix-cache",) if engine.enable_prefix_caching is False else ()),
            *_speculation(engine),
            *extra_args(service),
        ),
        env={"HF_HOME": MODEL_CACHE_DIR},
        probe_timeout_s=_PROBE_TIMEOUT_S,
    )


def _speculation(engine: EngineSpec) -> tuple[str, ...]:
    wanted = engine.speculative
    if wanted is None or wanted.method is SpeculativeMethod.NONE:
        return ()
    tokens = int(wanted.num_tokens) if wanted.num_tokens else None
    if wanted.method is SpeculativeMethod.NGRAM:
        return flags({"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": tokens})
    # A chain of guesses: one branch a step, and the token that starts it is among the verified ones.
    chain = {
        "speculative-num-steps": tokens,
        "speculative-eagle-topk": None if tokens is None else 1,
        "speculative-num-draft-tokens": None if tokens is None else tokens + 1,
    }
    draft = literal(_model(parse_source(wanted.draft_source or "")))
    return flags({"speculative-algorithm": "STANDALONE", "speculative-draft-model-path": draft, **chain})


def _model(source: Source) -> str:
    return source.repository if source.scheme == "hf" else source.local_path


SGLANG = ForeignRuntime(
    name=Runtime.SGLANG,
    image="lmsysorg/sglang:v0.5.23",
    release="0.5.23",
    documentation="https://docs.sglang.io/advanced_features/server_arguments.html",
    program="sglang",
    capabilities=Capabilities(
        sources={"hf": _FOLDER, "pvc": _FOLDER, "file": _FOLDER},
        fields={
            "model.revision": ANY,
            "model.chatTemplate": ANY,
            "engine.maxModelLen": ANY,
            "engine.maxNumSeqs": ANY,
            "engine.maxNumBatchedTokens": ANY,
            "engine.blockSize": ANY,
            "engine.prefixIndex": frozenset({"radix"}),
            "engine.enablePrefixCaching": ANY,
            "engine.gpuMemoryUtilization": ANY,
            "engine.kvCacheDtype": frozenset({"fp8"}),
            "engine.tensorParallelSize": ANY,
            "engine.speculative.method": frozenset({"ngram", "draft"}),
            "engine.speculative.numTokens": frozenset({str(number) for number in range(1, 33)}),
            "engine.speculative.draftSource": ANY,
        },
        gpus_only=True,
    ),
    reserved=frozenset(
        {"--model-path", "--model", "--served-model-name", "--host", "--port", "--api-key", "--chat-template"}
    ),
    launch=_launch,
    notes=(
        "maxNumBatchedTokens bounds the prompt tokens of a step; running sequences come on top.",
        "gpuMemoryUtilization is the share for weights and KV; activations come on top.",
        "It checks no token: keep others away from its pods with a NetworkPolicy.",
    ),
)
