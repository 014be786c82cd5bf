"""llama.cpp: `llama-server`. Flags of the server that calls itself 0.6.0. Pure.

Options and values are words of their own: its parser has no `--name=value`. The image keeps the program in /app and not
on PATH, a laptop has it on PATH, so a shell looks it up.
"""

from __future__ import annotations

from paceline_api.names import INTERNAL_TOKEN_FILE, MODEL_CACHE_DIR
from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import EngineSpec, KvCacheDtype, Runtime, SpeculativeMethod
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
)
from paceline_operator.planner.runtimes.sources import parse_source, source_of

_GGUF = frozenset({Weights.GGUF})
_SLOTS = 4
_RESERVED = frozenset(
    {
        "--model", "-m", "--hf-repo", "-hf", "-hfr", "--hf-file", "-hff", "--model-url", "-mu", "--alias", "-a",
        "--host", "--port", "--api-key", "--api-key-file", "--chat-template-file", "--slots", "--path",
    }
)  # fmt: skip
_LOOK_UP = 'PATH="/app:$PATH" exec llama-server "$@"'


def _launch(service: InferenceService) -> Launch:
    engine = engine_of(service)
    slots = engine.max_num_seqs or _SLOTS
    values: dict[str, object | None] = {
        **_model(service),
        "alias": literal(service.served_name()),
        "host": HOST,
        "port": PORT,
        "api-key-file": INTERNAL_TOKEN_FILE,
        "parallel": slots,
        # The context is divided among the slots.
        "ctx-size": None if engine.max_model_len is None else engine.max_model_len * slots,
        "batch-size": engine.max_num_batched_tokens,
    }
    if engine.kv_cache_dtype is KvCacheDtype.INT8:
        # Values in 8 bits need it.
        values |= {"cache-type-k": "q8_0", "cache-type-v": "q8_0", "flash-attn": "on"}
    values["chat-template-file"] = chat_template_file(service)
    words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    caching = "--no-cache-prompt" if engine.enable_prefix_caching is False else "--cache-prompt"
    return Launch(
        command=("/bin/sh", "-c", _LOOK_UP, "llama-server"),
        # Slots show prompts; the figures of /metrics show none.
        args=(*words, "--metrics", "--no-slots", "--jinja", caching, *_speculation(engine), *extra_args(service)),
        env={"LLAMA_CACHE": MODEL_CACHE_DIR},
        token_file=True,
    )


def _model(service: InferenceService) -> dict[str, str]:
    source = source_of(service)
    if source.scheme == "hf":
        return {"hf-repo": literal(source.repository), "hf-file": literal(source.path)}
    return {"model": literal(source.local_path)}


def _speculation(engine: EngineSpec) -> tuple[str, ...]:
    wanted = engine.speculative
    if wanted is None or wanted.method is SpeculativeMethod.NONE:
        return ()
    tokens = wanted.num_tokens or str(DRAFT_TOKENS)
    if wanted.method is SpeculativeMethod.NGRAM:
        return ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", tokens)
    draft = literal(parse_source(wanted.draft_source or "").local_path)
    return ("--spec-type", "draft-simple", "--spec-draft-model", draft, "--spec-draft-n-max", tokens)


def _problem(service: InferenceService) -> str | None:
    wanted = engine_of(service).speculative
    if wanted is not None and wanted.draft_source is not None and not wanted.draft_source.startswith("file://"):
        return "spec.engine.speculative.draftSource: llamacpp takes a draft model from file:// only"
    return None


LLAMACPP = ForeignRuntime(
    name=Runtime.LLAMACPP,
    image="ghcr.io/ggml-org/llama.cpp:server",
    release="0.6.0",
    documentation="https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md",
    program="llama-server",
    capabilities=Capabilities(
        sources={"hf": _GGUF, "pvc": _GGUF, "file": _GGUF},
        fields={
            "model.chatTemplate": ANY,
            "engine.maxModelLen": ANY,
            "engine.maxNumSeqs": ANY,
            "engine.maxNumBatchedTokens": ANY,
            "engine.enablePrefixCaching": ANY,
            "engine.kvCacheDtype": frozenset({"int8"}),
            "engine.speculative.method": frozenset({"ngram", "draft"}),
            "engine.speculative.numTokens": frozenset({str(number) for number in range(1, 33)}),
            "engine.speculative.draftSource": ANY,
        },
    ),
    reserved=_RESERVED,
    launch=_launch,
    problem=_problem,
    notes=(
        f"maxNumSeqs is the number of slots, {_SLOTS} by default; each has maxModelLen tokens of context.",
        "It spreads a model over every GPU of its pod by itself; weights keep the precision of the .gguf file.",
        "A revision of the Hub cannot be pinned: it loads the newest.",
        "Option and value are two entries of extraArgs.",
    ),
)
