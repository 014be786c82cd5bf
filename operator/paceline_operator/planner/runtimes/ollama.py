"""Ollama: `ollama serve`, with the model put into its store before. Variables of release 0.13. Pure.

It has no flags, no token, no load figures and no revision. A first container puts the model into the store under the
served name; the pod is ready once the model is loaded, which the start-up probe does.
"""

from __future__ import annotations

from paceline_api.kube import Manifest
from paceline_api.names import MODEL_CACHE_DIR
from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import KvCacheDtype, Runtime
from paceline_operator.planner.pods import literal
from paceline_operator.planner.runtimes.base import (
    ANY,
    HOST,
    PORT,
    Capabilities,
    ForeignRuntime,
    Launch,
    Weights,
    engine_of,
)
from paceline_operator.planner.runtimes.sources import source_of

_GGUF = frozenset({Weights.GGUF})
_NAME_PARTS_MAX = 3
_SERVE = (
    "ollama serve & pid=$!; until ollama list > /dev/null 2>&1; do kill -0 $pid || exit 1; sleep 1; done; "
    "{steps}; code=$?; kill $pid; wait $pid; exit $code"
)
_PULL = 'ollama pull "$PACELINE_MODEL" && ollama cp "$PACELINE_MODEL" "$PACELINE_SERVED_NAME"'
_IMPORT = (
    "printf 'FROM %s\\n' \"$PACELINE_MODEL\" > /tmp/Modelfile && "
    'ollama create "$PACELINE_SERVED_NAME" -f /tmp/Modelfile'
)
_LOAD_TRIES = 30
_LOAD_TIMEOUT_S = 600


def _launch(service: InferenceService) -> Launch:
    engine, source = engine_of(service), source_of(service)
    on_hub = source.scheme == "hf"
    # The Hub's registry takes a file's name as the tag.
    model = f"hf.co/{source.repository}:{source.path}" if on_hub else source.local_path
    env: dict[str, str] = {
        "OLLAMA_HOST": f"{HOST}:{PORT}",
        "OLLAMA_MODELS": f"{MODEL_CACHE_DIR}/ollama",
        "OLLAMA_KEEP_ALIVE": "-1",
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "PACELINE_MODEL": literal(model),
        "PACELINE_SERVED_NAME": literal(service.served_name()),
    }
    if engine.max_model_len is not None:
        env["OLLAMA_CONTEXT_LENGTH"] = str(engine.max_model_len)
    if engine.max_num_seqs is not None:
        env["OLLAMA_NUM_PARALLEL"] = str(engine.max_num_seqs)
    if engine.kv_cache_dtype is KvCacheDtype.INT8:
        env |= {"OLLAMA_KV_CACHE_TYPE": "q8_0", "OLLAMA_FLASH_ATTENTION": "1"}
    script = _SERVE.replace("{steps}", _PULL if on_hub else _IMPORT)
    return Launch(
        command=("ollama",),
        args=("serve",),
        env=env,
        init=(("model", ("/bin/sh", "-c", script)),),
        ready="/",
        live="/",
        startup=_loaded(),
    )


def _loaded() -> Manifest:
    """Asks for nothing, which loads the model and waits for it."""
    return {
        "exec": {"command": ["/bin/sh", "-c", 'exec ollama run "$PACELINE_SERVED_NAME" ""']},
        "periodSeconds": 2,
        "timeoutSeconds": _LOAD_TIMEOUT_S,
        "failureThreshold": _LOAD_TRIES,
    }


def _problem(service: InferenceService) -> str | None:
    if engine_of(service).extra_args:
        return "spec.engine.extraArgs: ollama serve has no options; set variables in podTemplate"
    name = service.served_name()
    if name.count("/") >= _NAME_PARTS_MAX or name.count(":") > 1 or "/" in name.partition(":")[2]:
        return f"spec.model.servedName: {name!r} is no name of an Ollama model: write NAME, ORG/NAME or NAME:TAG"
    return None


OLLAMA = ForeignRuntime(
    name=Runtime.OLLAMA,
    image="ollama/ollama:0.13.0",
    release="0.13.0",
    documentation="https://docs.ollama.com/faq",
    program="ollama",
    capabilities=Capabilities(
        sources={"hf": _GGUF, "pvc": _GGUF, "file": _GGUF},
        fields={
            "engine.maxModelLen": ANY,
            "engine.maxNumSeqs": ANY,
            "engine.enablePrefixCaching": frozenset({True}),
            "engine.kvCacheDtype": frozenset({"int8"}),
        },
    ),
    reserved=frozenset(),
    launch=_launch,
    problem=_problem,
    notes=(
        "The model is fetched anew for each pod; a repository on the Hub is not pinned.",
        "It tells no load: routers count their own requests only. It checks no token.",
    ),
)
