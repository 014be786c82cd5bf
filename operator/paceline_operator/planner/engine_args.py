"""The engine's command line from the spec, every default written out, so that what runs is what `kubectl get` shows.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline_api.names import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_KEY, MODEL_CACHE_DIR, MODEL_VOLUME_DIR
from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import Acceptance, EngineSpec, Speculative
from paceline_operator.planner.kv_settings import settings_flag
from paceline_operator.planner.pods import literal, port_flags, token_flag

_PREEMPTED_MEMORY = "--kv-store-memory=0"
_CLAIM = "pvc://"
# Of a draft guess: kept with probability min(1, p / (lenience * q)).
_LENIENCE = 0.5
# Flags that tie the engine to its Service, probes and volumes: another value would only break the pod.
RESERVED_FLAGS = frozenset(
    {
        "--model", "--served-model-name", "--host", "--port", "--admin-port", "--metrics-port",
        "--internal-token-file", "--cache-dir", "--chat-template", "--drain-timeout", "--kv-store-config",
        "--kv-store-disk", "--kv-store-disk-capacity",
    }
)  # fmt: skip


_OPTION = re.compile(r"--[a-z0-9][a-z0-9-]*(=.*)?", re.DOTALL)


def flag_of(argument: str) -> str:
    return argument.split("=", 1)[0]


def extra_args_problem(service: InferenceService) -> str | None:
    """Why the spec's extra arguments cannot be used, naming the field; None if they can."""
    for index, argument in enumerate((service.spec.engine or EngineSpec()).extra_args or []):
        field = f"spec.engine.extraArgs[{index}]"
        if _OPTION.fullmatch(argument) is None:
            return f"{field}: {argument!r} is not an option: write it as --name=value"
        if flag_of(argument) in RESERVED_FLAGS:
            return f"{field}: {flag_of(argument)} is set by the operator; remove it, or use the field of the spec"
    return None


def engine_args(service: InferenceService, has_store: bool, ports: Mapping[str, int], drain_s: int) -> list[str]:
    """Arguments of `paceline-engine serve`. An extra argument takes the place of a default of the same name."""
    engine = service.spec.engine or EngineSpec()
    extra = [literal(argument) for argument in engine.extra_args or []]
    overridden = {flag_of(argument) for argument in extra}
    fixed = [
        f"--model={literal(_source(service))}",
        f"--served-model-name={literal(service.served_name())}",
        *port_flags(ports),
        token_flag(),
        f"--cache-dir={MODEL_CACHE_DIR}",
        f"--drain-timeout={drain_s}s",
        *([] if flag_of(_PREEMPTED_MEMORY) in overridden else [_PREEMPTED_MEMORY]),
    ]
    if has_store:
        fixed.append(settings_flag())
    if service.spec.model.chat_template is not None:
        fixed.append(f"--chat-template={CHAT_TEMPLATE_DIR}/{CHAT_TEMPLATE_KEY}")
    tunable = [argument for argument in _tunable(engine) if flag_of(argument) not in overridden]
    return fixed + tunable + extra


def _source(service: InferenceService) -> str:
    model = service.spec.model
    if model.source.startswith(_CLAIM):
        return f"file://{MODEL_VOLUME_DIR}/{model.source.removeprefix(_CLAIM).partition('/')[2]}"
    return model.source if model.revision is None else f"{model.source}@{model.revision}"


def model_claim(service: InferenceService) -> str | None:
    """The PersistentVolumeClaim that the model is in, if it is in one."""
    source = service.spec.model.source
    return source.removeprefix(_CLAIM).partition("/")[0] if source.startswith(_CLAIM) else None


def _tunable(engine: EngineSpec) -> list[str]:
    values: dict[str, object] = {
        # Where GPUs are paid for, one that can't be used must not make a slow CPU of the pod.
        "device": "cuda" if engine.asks_for_gpus else "auto",
        "dtype": "auto",
        "max-model-len": engine.max_model_len,
        "max-num-seqs": engine.max_num_seqs or 64,
        "max-num-batched-tokens": engine.max_num_batched_tokens or max(2048, engine.max_num_seqs or 0),
        "prefill-chunk-tokens": engine.prefill_chunk_tokens or 512,
        "block-size": engine.block_size or 16,
        "kv-cache-memory": engine.kv_cache_memory or (None if engine.asks_for_gpus else "256Mi"),
        "kv-cache-dtype": engine.kv_cache_dtype,
        "gpu-memory-utilization": engine.gpu_memory_utilization,
        "tensor-parallel-size": engine.tensor_parallel_size,
        "batching": engine.batching or "continuous",
        "prefix-index": engine.prefix_index or "hash",
        "quantization": engine.quantization or "none",
    }
    caching = "--enable-prefix-caching" if engine.enable_prefix_caching is not False else "--no-enable-prefix-caching"
    given = [f"--{name}={value}" for name, value in values.items() if value is not None]
    return [*given, caching, *_speculation(engine.speculative)]


def _speculation(speculative: Speculative | None) -> list[str]:
    if speculative is None:
        return ["--speculative-method=none"]
    classes = sorted((speculative.traffic_classes or {}).items())
    draft, lenient = speculative.draft_source, speculative.acceptance is Acceptance.LENIENT
    return [
        f"--speculative-method={speculative.method}",
        f"--speculative-num-tokens={speculative.num_tokens or 'auto'}",
        *([literal(f"--speculative-model={draft}")] if draft is not None else []),
        *([f"--speculative-lenience={_LENIENCE}"] if lenient else []),
        *(literal(f"--speculative-traffic-class={name}={'on' if on else 'off'}") for name, on in classes),
    ]
